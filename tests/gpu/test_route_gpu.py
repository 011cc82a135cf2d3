"""The collectives' CTAs changed inside a running program: ghost ranks, and plain DDP with two ranks under MPS.

Needs torch and an NCCL that places two ranks on one GPU (WEFT_TEST_NCCL). Every run has a deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def ghosts(nccl):
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, "WEFT_NCCL": nccl}
    command = [sys.executable, "-m", "weft", "run", "--", sys.executable, str(PROGRAMS / "route_ghosts.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernels_of_nccl_get_the_ctas_that_were_asked_for(ghosts):
    for phase in ghosts["phases"]:
        assert max(phase["ctas"]) == (phase["limit"] or 12), ghosts["phases"]


def test_results_are_bit_equal_on_every_route(ghosts):
    assert len({digest for phase in ghosts["phases"] for digest in phase["digests"]}) == 1


def test_a_collective_with_more_ctas_is_faster(ghosts):
    """On one GPU only the CTAs move data: the gap between 16 and 4 is far above the noise."""
    times = {limit: min(p["ms"] for p in ghosts["phases"] if p["limit"] == limit) for limit in (None, 4, 16)}
    assert max(times[16], times[None]) < times[4], times
    # A sibling is as fast as a communicator created with the same limit.
    for limit, fresh_ms in ghosts["fresh_ms"].items():
        assert times[int(limit)] == pytest.approx(fresh_ms, rel=0.3), (times, ghosts["fresh_ms"])


def test_the_program_is_counted_and_left_in_order(ghosts):
    assert ghosts["keys"] == 1
    assert len(set(ghosts["collectives"])) == 1
    assert ghosts["max_ctas"] == [12, 12]
    assert ghosts["heard"] == [5, 10, 15, 20]
    assert ghosts["prepared_after_release"] == [16]
    assert ghosts["routed"] > 0
    assert ghosts["left"] == 0
    assert ghosts["beside"] > 0


@pytest.fixture(scope="module")
def ddp(nccl, tmp_path_factory):
    """The losses of an ordinary job, and of the same job with its CTAs changed as it runs."""
    mps = tmp_path_factory.mktemp("mps")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "LD_PRELOAD": nccl,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "6",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_MPS_PIPE_DIRECTORY": str(mps),
        "CUDA_MPS_LOG_DIRECTORY": str(mps),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = str(PROGRAMS / "route_ddp.py")
    weft = [sys.executable, "-m", "weft", "run", "--"]

    def result(command, extra):
        done = subprocess.run(
            command, env={**env, **extra}, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("result")]
        print(line)
        return json.loads(line.removeprefix("result"))

    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=False)
    time.sleep(1)
    try:
        plain = result([*torchrun, "--master-port", "29621", script, "--plain"], {})
        routed = result([*weft, *torchrun, "--master-port", "29622", script], {"WEFT_LIVE": "1"})
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=env, check=False)
    return plain, routed


def test_ddp_keeps_its_losses_while_its_ctas_change(ddp):
    plain, routed = ddp
    assert routed["losses"] == plain["losses"]


def test_ddp_has_the_ctas_of_the_environment_and_then_others(ddp):
    _, routed = ddp
    for phase in routed["phases"]:
        assert max(phase["ctas"]) == (phase["limit"] or 6), routed["phases"]
    assert any(why is None and most == 6 for _, _, most, _, why in routed["communicators"])
