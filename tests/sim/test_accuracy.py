"""The simulator against measurements: a few committed cases, so that a change of the model is noticed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest

from weft.execute.sim import SimExecutor
from weft.policy import Policy

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "sim"))

import fig2  # noqa: E402
from lab_rows import cases, halves  # noqa: E402


def test_every_workload_is_in_exactly_one_half():
    fitted, held_out = halves(cases())
    assert len(fitted) + len(held_out) == len(cases())
    assert not {c.cell for c in fitted} & {c.cell for c in held_out}
    assert 0.8 < len({c.cell for c in fitted}) / len({c.cell for c in held_out}) < 1.25


def test_held_out_workloads_are_predicted():
    _, held_out = halves(cases())
    wanted = (
        "cb-ar-opt2-natural",
        "cb-ar-opt1-64",
        "cb-a2a-opt2-16",
        "cublas-8192-ar-1",
        "llama70b-qkv-ag-0.5",
    )
    found = [c for c in held_out if c.cell in wanted]
    assert found
    errors = []
    for case in found:
        run = SimExecutor("h200-ghost", baseline_ctas=case.ctas)
        errors.append(abs(run.measure(case.workload, case.policy, case.mode).ms / case.ms - 1))
    assert median(errors) <= 0.08


@pytest.mark.parametrize("title", fig2.GPUS)
def test_figure_2_is_reproduced_on_its_diagonal(title):
    gpu, ranks = fig2.GPUS[title]
    paper = json.loads(fig2.PAPER.read_text())
    run = fig2.executor(gpu)
    for i, n in enumerate(paper["grid"][:7]):
        found = fig2.time_ratio(run, fig2.workload("cb-ar-opt2", (n, n), ranks))
        assert found == pytest.approx(paper["gpus"][title][i][i], abs=0.2)


def test_priority_helps_most_at_medium_and_large_grids():
    run = fig2.executor("a40")

    def gain(n):
        cell = fig2.workload("cb-ar-opt2", (n, n), 4)
        return 1 - run.measure(cell, Policy(priority="high")).ms / run.measure(cell, Policy()).ms

    assert gain(4) < 0.02
    assert 0.2 < max(gain(n) for n in (32, 64, 128)) < 0.3
