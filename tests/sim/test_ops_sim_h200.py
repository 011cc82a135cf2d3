"""Schedules on a simulated H200 whose peers are pinned host memory, against measurements."""

from __future__ import annotations

import pytest

from weft.ops.case import Case
from weft.ops.pick import pick
from weft.ops.simulate import simulate

# ms by copy engine, eight ranks, bf16: benchmarks/results/ops/h200.json.
NAMES = ("serial", "shard", "uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d", "uniform-fused-2d")
MEASURED = {
    ("all_gather_matmul", 32768, 11264, 8192): (16.28, 9.74, 9.95, 9.83, 9.16, 16.21),
    ("all_gather_matmul", 32768, 22528, 8192): (24.14, 17.32, 17.45, 17.09, 18.34, 26.83),
    ("matmul_reduce_scatter", 32768, 8192, 22528): (25.54, 15.68, 17.26, 16.21, 16.18, 16.96),
    ("all_to_all_matmul", 32768, 16384, 8192): (19.81, 11.86, 13.34, 12.03, 12.06, 20.30),
}


@pytest.mark.parametrize(("case", "times"), MEASURED.items(), ids=str)
def test_every_schedule_takes_about_as_long_as_measured(case, times):
    operation, m, n, k = case
    node = Case(operation=operation, m=m, n=n, k=k, ranks=8, gpu="h200", topology="host")
    for name, ms in zip(NAMES, times, strict=True):
        assert simulate(node, name, "dma").ms == pytest.approx(ms, rel=0.15), name


@pytest.mark.parametrize(("case", "times"), MEASURED.items(), ids=str)
def test_the_pick_is_the_measured_best_or_close(case, times):
    found = pick(*case, 8, "bf16", "h200", "host", engines=("dma",))
    assert times[NAMES.index(found.schedule)] <= 1.03 * min(times)
