"""The lab on a GPU: ghost ranks, every collective, the effect of each control, and training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch")

from weft.errors import UsageError
from weft.execute.base import HungError, MemoryFullError, References
from weft.execute.worker import RemoteExecutor, worker_environment
from weft.policy import Policy, Rule
from weft.workload import COLLECTIVES, Compute, Workload

SMOKE = Path(__file__).parents[2] / "benchmarks" / "lab" / "smoke.py"
TRITON = Compute(kind="triton_gemm", shape=(4096, 4096, 4096), tile=(64, 64, 64))
MiB = 1 << 20


@pytest.fixture(scope="module")
def executor():
    path = os.environ.get("WEFT_TEST_NCCL", "")
    if not Path(path).is_file():
        pytest.skip("set WEFT_TEST_NCCL to an NCCL library of 2.30 or newer")
    before = os.environ.get("WEFT_NCCL")
    os.environ["WEFT_NCCL"] = path
    try:
        with RemoteExecutor(deadline_s=60) as found:
            yield found
    finally:
        if before is None:
            del os.environ["WEFT_NCCL"]
        else:
            os.environ["WEFT_NCCL"] = before


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_of_odd_sizes_are_right(executor, collective, ranks):
    workload = Workload(compute=TRITON, collective=collective, bytes=7 * MiB + 3, ranks=ranks, iterations=2)
    for mode in ("overlap", "sequential"):
        assert executor.measure(workload, Policy(), mode).ms > 0  # raises if a result is wrong


def test_a_run_lies_between_its_references(executor):
    workload = Workload(compute=TRITON, bytes=128 * MiB, iterations=6)
    modes, policy = ("sequential", "compute", "comm"), Policy(priority="high")
    alone = (median(executor.measure(workload, Policy(), mode).ms for _ in range(5)) for mode in modes)
    found = References(*alone, workload.iterations)
    ms = median(executor.measure(workload, policy).ms for _ in range(5))
    assert found.sequential_ms == pytest.approx(found.compute_ms + found.comm_ms, rel=0.2)
    assert 0.9 * found.ideal_ms < ms < 1.1 * found.sequential_ms
    timeline = executor.timeline(workload, policy)
    assert 0 < timeline.figures().overlap_pct <= 100
    assert any("nccl" in name for name in timeline.names)
    assert any("weft_gemm" in name for name in timeline.names)


def test_fewer_ctas_make_a_slower_collective(executor):
    workload = Workload(compute=TRITON, bytes=128 * MiB, iterations=4)
    times = [
        min(executor.measure(workload, Policy(max_ctas=n), "comm").ms for _ in range(3)) for n in (2, 16)
    ]
    assert times[0] > 3 * times[1]


def test_a_rule_pins_the_residency_of_our_gemm(executor):
    workload = Workload(compute=TRITON, bytes=16 * MiB, iterations=2)
    for blocks in (3, 2, 1):
        executor.measure(workload, Policy(rules=(Rule("weft_gemm", blocks),)))
    kernels = [k for k in executor.shim_stats()["kernels"] if "weft_gemm" in k["name"]]
    assert any(kernel["shaped"] for kernel in kernels)


def test_what_cannot_work_is_refused(executor):
    workload = Workload(compute=TRITON, bytes=16 * MiB, ranks=4, iterations=2)
    with pytest.raises(UsageError, match="would hang"):
        executor.measure(workload, Policy(max_ctas=64))
    with pytest.raises(MemoryFullError, match="does not fit"):
        executor.measure(workload.but(bytes=300 << 30), Policy())
    assert executor.measure(workload, Policy()).ms > 0


def test_a_run_past_its_deadline_costs_one_measurement(executor):
    workload = Workload(compute=TRITON, bytes=16 * MiB, iterations=64)
    kept, executor._deadline_s = executor._deadline_s, 0.001
    try:
        with pytest.raises(HungError):
            executor.measure(workload, Policy())
    finally:
        executor._deadline_s = kept
    assert executor.measure(workload, Policy()).ms > 0


@pytest.mark.parametrize("program", ["numerics", "ddp", "fsdp2"])
def test_programs(program, nccl):
    env = worker_environment({**os.environ, "WEFT_NCCL": nccl})
    command = [sys.executable, str(SMOKE), "--inside", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
