"""Two runs: per step, matched by collective, refused or flagged where they are not comparable."""

from __future__ import annotations

import pytest
from trace_building import GEMM, TraceBuilder

import weft
import weft.trace
from weft.errors import UsageError

US = 1_000


def run_of(path, *, steps=2, exposed_us=200, world=2, kernel=GEMM, device="NVIDIA H200", elements=1 << 20):
    built = TraceBuilder(world_size=world, device_name=device)
    for step in range(steps):
        at = step * 2_000 * US
        built.step(step, at - 5 * US, at + 1_900 * US)
        built.gpu(kernel, at, at + 1_000 * US, launch=at)
        built.collective(at + 900 * US, at + (1_000 + exposed_us) * US, launch=at + 5 * US, elements=elements)
    path.mkdir(exist_ok=True)
    built.write(path / "rank0.json")
    return weft.analyze(path)


def test_runs_of_different_length_are_compared_per_step(tmp_path):
    change = weft.trace.compare(
        run_of(tmp_path / "a", steps=2, exposed_us=300), run_of(tmp_path / "b", steps=5, exposed_us=150)
    )["change"]
    assert change["steps"] == {"before": 2, "after": 5}
    exposed = change["per_step"]["exposed_comm_us"]
    assert (exposed["before"], exposed["after"], exposed["percent"]) == (300.0, 150.0, -50.0)
    assert "0.300" in change["text"]
    assert "Per rank and step" in change["text"]


def test_collectives_are_matched_by_kind_group_and_size(tmp_path):
    before, after = run_of(tmp_path / "a", elements=1 << 20), run_of(tmp_path / "b", elements=1 << 22)
    rows = weft.trace.compare(before, after)["change"]["matched"]
    assert {(row["bytes"], row["in_both"]) for row in rows} == {(2 << 20, False), (8 << 20, False)}
    (row,) = weft.trace.compare(before, run_of(tmp_path / "c", exposed_us=0))["change"]["matched"]
    assert row["in_both"]
    assert (row["exposed_us"]["before"], row["exposed_us"]["after"], row["calls"]["before"]) == (
        200.0,
        0.0,
        1.0,
    )


def test_runs_of_different_sizes_are_refused(tmp_path):
    with pytest.raises(UsageError, match="2 and 8 ranks"):
        weft.trace.compare(run_of(tmp_path / "a"), run_of(tmp_path / "b", world=8))


def test_another_model_or_gpu_is_flagged(tmp_path):
    before = run_of(tmp_path / "a")
    told = " ".join(
        weft.trace.compare(before, run_of(tmp_path / "b", kernel="other", device="A100"))["warnings"]
    )
    assert "0% of the compute" in told
    assert "different GPUs" in told
    (same,) = weft.trace.compare(before, run_of(tmp_path / "c"))["warnings"]
    assert same.startswith("traces of 1 of 2 ranks")  # true of both runs, printed once


def test_the_option_and_the_two_folders_say_the_same(tmp_path, capsys):
    from weft.cli.main import main

    run_of(tmp_path / "a", exposed_us=300)
    run_of(tmp_path / "b")
    said = []
    for arguments in ([tmp_path / "a", tmp_path / "b"], [tmp_path / "b", "--against", tmp_path / "a"]):
        with pytest.raises(SystemExit) as ended:
            main(["analyze", *map(str, arguments), "--json"])
        assert not ended.value.code
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
