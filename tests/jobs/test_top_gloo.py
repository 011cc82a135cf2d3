"""`weft top` on ranks of gloo: step times against the program's own, and what live tuning does and finds."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import weft
from weft.policy import Policy

pytest.importorskip("torch")

HERE = Path(__file__).parent
SOURCE = Path(weft.__file__).parents[1]
STEPS = """
import json, os, sys, time
import torch, torch.distributed as dist
from leaving import end
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
times, begin = [], time.monotonic()
stop = torch.zeros(1)
while not stop or len(times) <= 40:
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(1e3 * (time.monotonic() - begin))
    begin = time.monotonic()
    stop = torch.tensor([float(os.path.exists("stop"))])
    dist.all_reduce(stop)  # all ranks leave after the same step, whichever of them saw the file first
rank = dist.get_rank()
open(f"own.{rank}.json", "w").write(json.dumps(times))
end()
"""


@contextmanager
def launch(
    folder: Path, options: list[str], ranks: int, program: list[str], **env: str
) -> Iterator[subprocess.Popen[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    weft_run = [sys.executable, "-m", "weft", "run", "--stats", "stats.json", *options, "--"]
    with subprocess.Popen(
        [*weft_run, *torchrun, *program],
        cwd=folder,
        env=environment(folder, **env),
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.terminate()  # a failed test leaves the job waiting


def environment(folder: Path, **env: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEFT", "TORCH"))}
    paths = f"{SOURCE}:{HERE}"
    return kept | {
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "HOME": str(folder),
        **env,
    }


def top(folder: Path, job: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Start `weft top --json` on the job in this folder, as soon as the job exists."""
    while not (found := list(folder.glob("weft-job-*/job.json"))):
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.01)
    command = [sys.executable, "-m", "weft", "top", str(found[0].parent), "--json"]
    return subprocess.Popen(command, env=environment(folder), stdout=subprocess.PIPE, text=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(STEPS)
    return tmp_path


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_and_their_steps(folder, ranks):
    lines = []
    with launch(folder, ["--steps"], ranks, ["program.py"]) as job, top(folder, job) as watch:
        for line in watch.stdout:
            lines.append(json.loads(line)["jobs"][0])
            if sum((rank["steps"] or 0) > 60 for rank in lines[-1]["ranks"]) == ranks:
                (folder / "stop").touch()
        assert job.wait(60) == 0, job.stderr.read()
    last, stats = lines[-1], json.loads((folder / "stats.json").read_text())
    assert last["state"] == "ended"
    assert last["totals"] == {name: stats[name] for name in last["totals"]}
    assert [rank["rank"] for rank in last["ranks"]] == list(range(ranks))
    for rank in last["ranks"]:
        own = json.loads((folder / f"own.{rank['rank']}.json").read_text())
        # A step is known once it has repeated itself; the program's own clock leaves out its last all-reduce.
        assert len(own) - 10 < rank["steps"] <= len(own)
        # Of the 64 latest steps, whose median is shown, at least 54 are among the program's own 64 latest.
        assert rank["step_ms"] >= 0.8 * sorted(own[-64:])[32 - 10 - 1]


@pytest.mark.slow
def test_what_tuning_does_and_finds_is_that_of_the_statistics(folder):
    effects = {"ctas6": 1.8, "ctas16": 0.5, "ctas24": 0.8, "head5": 1.1, "priority": 1.1}
    environment = {
        "WEFT_TUNE_CONTROLS": "live_job:FakeControls",
        "WEFT_STORE": str(folder / "store"),
        "RECORD": str(folder),
        "EFFECTS": json.dumps(effects),
        "STEPS": "560",
        # The job waits until `weft top` has seen it: at the start, and in the watch, where a step may be a
        # probe.
        "HOLD": json.dumps({"start": "seen.0", "430": "seen.1", "445": "seen.2", "460": "seen.3"}),
    }
    program = [str(HERE / "live_job.py")]
    lines, seen = [], itertools.count()
    with launch(folder, ["--tune"], 2, program, **environment) as job, top(folder, job) as watch:
        for line in watch.stdout:
            lines.append(json.loads(line)["jobs"][0])
            if len(lines) == 1 or lines[-1]["tuning"]["phase"] == "watching":
                (folder / f"seen.{next(seen)}").touch()
        assert job.wait(60) == 0, job.stderr.read()
    stats = json.loads((folder / "stats.json").read_text())
    last = lines[-1]
    assert last["tuning"]["state"] == stats["tuning"]["state"] == "kept"
    assert last["tuning"]["gain_pct"] == stats["tuning"]["gain_pct"]
    assert lines[0]["tuning"]["phase"] == "waiting"
    kept = Policy.from_dict(stats["tuning"]["policy"]).label
    assert kept in {line["tuning"]["trying"] for line in lines if line["tuning"]["phase"] == "watching"}
    assert last["tuning"]["phase"] == "over"
    assert {rank["policy"] for rank in last["ranks"]} == {last["tuning"]["trying"]}
    assert last["totals"] == {name: stats[name] for name in last["totals"]}
