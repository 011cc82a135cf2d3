"""Real processes over gloo: every collective, several numbers of ranks, odd sizes, and a rank that dies."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
from rank_processes import run_rank_processes

pytest.importorskip("torch")
HERE = Path(__file__).parent

PROGRAM = """
import json, os, sys
from leaving import end
from weft.execute.dist import DistExecutor
from weft.policy import Policy
from weft.workload import Compute, Workload
from weft.errors import WeftError

executor = DistExecutor("cpu")
wrong = os.environ.get("CORRUPT")
if wrong:
    from weft.comm import dist as groups
    whole = groups.issue
    def broken(collective, send, recv, group):
        work = whole(collective, send, recv, group)
        work.wait()
        recv[-1] += executor.rank == int(wrong)
        return work
    groups.issue = broken
for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
    for size in (4, 1001, 65537):
        for dtype in ("fp32", "fp64"):
            compute = Compute(kind="gemm", shape=(33, 17, 9), dtype=dtype)
            workload = Workload(compute=compute, collective=collective, bytes=size, ranks=executor.size, iterations=3)
            for mode in ("overlap", "sequential", "compute", "comm"):
                try:
                    ms = executor.measure(workload, Policy(priority="high", max_ctas=4), mode).ms
                    assert ms > 0
                except WeftError as error:
                    print(f"problem rank {executor.rank}: {error}", flush=True)
                    os._exit(3)  # gloo's threads may still hold tensors: torch 2.13 would abort
    if os.environ.get("DIE") == str(executor.rank):
        os._exit(9)
print("done", executor.rank, executor.device, flush=True)
end()
"""


def run(ranks: int, tmp_path, program=PROGRAM, arguments=(), **extra: str) -> tuple[list[int], list[str]]:
    """The exit code and the output of each rank."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(program))
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **extra, "PYTHONPATH": path}
    return run_rank_processes([script, *arguments], ranks, env, tmp_path, timeout_s=100)


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_collective_is_right(ranks, tmp_path):
    codes, outputs = run(ranks, tmp_path)
    assert codes == [0] * ranks, "\n".join(outputs)
    assert all("done" in text and f"cpu:{ranks}xgloo" in text for text in outputs)


def test_a_wrong_result_is_told_on_every_rank(tmp_path):
    _, outputs = run(2, tmp_path, CORRUPT="1")
    assert "problem rank 1" in outputs[1]
    assert "gave rank 1" in outputs[1]
    assert "problem rank 0" in outputs[0]


def test_a_rank_that_dies_is_one_line_on_the_others(tmp_path):
    codes, outputs = run(3, tmp_path, DIE="2")
    assert codes == [3, 3, 9], "\n".join(outputs)
    for text in outputs[:2]:
        assert sum("problem rank" in line for line in text.splitlines()) == 1
        assert "did another rank exit?" in text


BENCH = """
import sys, typer
from weft.cli.bench import bench
app = typer.Typer()
app.command()(bench)
app(["check", "--device", "cpu", "--json", "--out", sys.argv[1]])
"""


def test_the_check_suite_over_gloo(tmp_path):
    codes, outputs = run(2, tmp_path, program=BENCH, arguments=[str(tmp_path / "out")])
    assert codes == [0, 0], "\n".join(outputs)
    lines = outputs[0].splitlines()
    document = json.loads(next(line for line in lines if line.startswith("{")))
    assert document["device"] == "cpu:2xgloo"
    assert len(document["rows"]) == 16
    assert all(row["status"] == "ok" for row in document["rows"])
    assert "rows" not in outputs[1]
    assert len((tmp_path / "out" / "check.jsonl").read_text().splitlines()) == 17
