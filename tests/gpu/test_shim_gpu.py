"""The shim on real kernels: it sees all of them, changes no result; residency N gives N blocks per SM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

POLICY_FILES = {
    "residency 1": {"version": 1, "compute": {"rules": [{"kernel": "*", "residency": 1}]}},
    "residency 2 while in flight, priority, head start": {
        "version": 1,
        "comm": {"priority": "high", "head_start_us": 5},
        "compute": {"residency": 2, "when": "overlap"},
    },
}


def test_the_shim_counts_what_the_profiler_sees(run_program, nccl):
    done = run_program("mixed.py", "--profile", weft=("--priority", "high", "--head-start", "5"))
    result = json.loads(done.stdout.splitlines()[-1])
    seen, counted = result["profiler"], result["shim"]
    assert sum(seen.values()) == sum(counted.values())
    families = {
        "ncclDevKernel": 0,
        "triton": 0,
        "scaled_sum": 0,
        "cudnn": 0,
        "nvjet": 0,
        "at::native": 0,
        "weft_head_start": 0,
    }
    for name in counted:
        for family in families:
            families[family] += family in name
    assert families["ncclDevKernel"]
    assert families["scaled_sum"]
    assert families["at::native"]
    assert families["weft_head_start"]
    # By the part of the name that both spell alike (a trace may write templates differently).
    alike = {name for name in seen if name in counted}
    assert all(seen[name] == counted[name] for name in alike)
    assert len(alike) >= len(seen) // 2


@pytest.mark.parametrize("label", POLICY_FILES)
def test_outputs_are_bit_identical_shaped_and_unshaped(run_program, nccl, tmp_path, label):
    policy, stats = tmp_path / "policy.json", tmp_path / "stats.json"
    policy.write_text(json.dumps(POLICY_FILES[label]))
    plain = json.loads(run_program("mixed.py", weft=None).stdout.splitlines()[-1])
    done = run_program("mixed.py", weft=("--policy", str(policy), "--stats", str(stats)))
    shaped = json.loads(done.stdout.splitlines()[-1])
    assert shaped["digests"] == plain["digests"]
    counted = json.loads(stats.read_text())
    assert counted["shape_failures"] == counted["priority_failures"] == counted["head_start_failures"] == 0
    if label == "residency 1":
        assert counted["shaped"] > 0
        computes = [k for k in counted["kernels"] if k["kind"] == "compute" and k["shaped"]]
        assert {k["blocks_per_sm"] for k in computes} == {1}


def test_n_blocks_live_on_an_sm_when_n_are_asked_for(run_program):
    pytest.importorskip("cupy")
    shapes = [[64, 0], [128, 0], [256, 1000], [512, 4096], [1024, 0]]
    result = json.loads(run_program("residents.py", json.dumps(shapes)).stdout.splitlines()[-1])
    wrong = [row for row in result["rows"] if row[3] != row[4]]
    assert not wrong
    assert len(result["rows"]) >= 32 + 16 + 8 + 4 + 2


def test_an_unmodified_ddp_job_keeps_its_losses(nccl, tmp_path):
    """Two ranks of torchrun on one GPU need MPS, else they are time-sliced (and slow, not wrong)."""
    stats = tmp_path / "stats.json"
    env = {
        **os.environ,
        "LD_PRELOAD": nccl,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "4",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps"),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "mps"),
    }
    (tmp_path / "mps").mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=False)
    time.sleep(1)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29611",
    ]
    job = [*torchrun, str(PROGRAMS / "ddp.py")]
    weft = [
        sys.executable,
        "-m",
        "weft",
        "run",
        "--priority",
        "high",
        "--head-start",
        "5",
        "--stats",
        str(stats),
        "--",
    ]

    def losses(command):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses")]
        return json.loads(line.removeprefix("losses"))

    try:
        plain, under = losses(job), losses([*weft, *job])
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=env, check=False)
    assert plain == under
    counted = json.loads(stats.read_text())
    ranks = [process["rank"] for process in counted["processes"] if process["comm_launches"]]
    assert sorted(ranks) == [0, 1]
    assert counted["prioritised"] == counted["comm_launches"] > 0
    assert counted["head_starts"] > 0
