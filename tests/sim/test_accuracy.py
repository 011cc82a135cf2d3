"""The simulator against a few committed measurements, so that a change of the model is noticed."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from weft.execute.sim import SimExecutor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "sim"))

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
