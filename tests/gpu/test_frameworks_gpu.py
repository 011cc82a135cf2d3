"""Every example on a GPU: with ghost ranks, and by torchrun with two ranks under MPS; the same losses under weft.

WEFT_TEST_NCCL names the NCCL (2.30 or newer). MPS is used where nvidia-cuda-mps-control runs already or can be started.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ("--layers", "4", "--width", "1024", "--heads", "8", "--length", "512", "--batch", "4")
JOBS = {
    "ddp": ("ddp.py",),
    "bf16-hook": ("ddp_bf16_hook.py",),
    "powersgd": ("ddp_powersgd.py",),
    "compiled": ("compiled.py", "--layers", "2"),
    "triton": ("triton_ddp.py",),
    "fsdp2": ("fsdp2.py",),
    "fsdp2-triton": ("fsdp2.py", "--triton"),
    "tensor-parallel": ("tensor_parallel.py",),
    "inference": ("inference.py",),
    "cuda-graph": ("cuda_graph.py",),
    "lightning": ("lightning_gpt.py",),
    "huggingface": ("huggingface_trainer.py",),
}
UNDER_MPS = {
    "ddp": ("ddp.py",),
    "1f1b": ("pipeline.py",),
    "interleaved": ("pipeline.py", "--schedule", "Interleaved1F1B"),
    "tensor-parallel": ("tensor_parallel.py",),
    "cuda-graph": ("cuda_graph.py",),
}
NEEDS = {"lightning": "lightning", "huggingface": "transformers"}
DEADLINE_S = 90


def run(command: list[str], tmp_path: Path, env: dict[str, str], weft: tuple[str, ...] | None) -> list[str]:
    """Run one job to its end; returns its losses."""
    losses = tmp_path / "losses"
    losses.unlink(missing_ok=True)
    command = [sys.executable, *command, "--losses", str(losses)]
    if weft is not None:
        stats = tmp_path / "stats.json"
        command = [sys.executable, "-m", "weft", "run", *weft, "--stats", str(stats), "--", *command]
    paths = os.pathsep.join(path for path in sys.path if path)
    full = {**os.environ, "PYTHONPATH": paths, "WEFT_STORE": str(tmp_path / "store"), **env}
    # In a session of its own: a job that hangs is ended with all its ranks.
    with subprocess.Popen(
        command, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=DEADLINE_S)[0]
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            said = process.communicate()[0]
            pytest.fail(f"took longer than {DEADLINE_S} s:\n{said[-3000:]}")
    assert process.returncode == 0, said[-3000:]
    return losses.read_text().split()


def ghost(name: str, steps: int) -> list[str]:
    script, *more = JOBS[name]
    sizes = [*SIZES, "--steps", str(steps), *more]
    return ["-m", "weft.comm.ghost", "--ranks", "2", str(EXAMPLES / script), *sizes]


@pytest.mark.parametrize("name", JOBS)
def test_ghost_ranks_same_losses_under_weft(name, nccl, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    env, command = {"WEFT_NCCL": nccl}, ghost(name, 12)
    plain = run(command, tmp_path, env, None)
    assert all(math.isfinite(float.fromhex(text)) for text in plain)
    policy = ("--priority", "high", "--head-start", "5", "--residency", "2", "--when", "overlap")
    assert run(command, tmp_path, env, policy) == plain


@pytest.mark.parametrize("name", ["triton", "tensor-parallel", "inference"])
def test_tuned_with_ghost_ranks_same_losses(name, nccl, tmp_path):
    env, command = {"WEFT_NCCL": nccl}, ghost(name, 140)
    plain = run(command, tmp_path, env, None)
    assert run(command, tmp_path, env, ("--tune",)) == plain
    tuning = json.loads((tmp_path / "stats.json").read_text())["tuning"]
    assert tuning["state"] in ("kept", "left alone"), tuning["text"]
    assert 0 < tuning["steps"] < 60
    assert len(tuning["candidates"]) > 1


@pytest.fixture(scope="module")
def mps(tmp_path_factory):
    """The environment of programs under MPS; without it two ranks take turns and one may wait for the other."""
    if os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        yield {}
        return
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("needs nvidia-cuda-mps-control")
    folder = tmp_path_factory.mktemp("mps")
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    started = subprocess.run(
        [control, "-d"], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if started.returncode:
        pytest.skip(f"MPS does not start: {started.stderr[:200]}")
    yield env
    subprocess.run([control], input="quit\n", env={**os.environ, **env}, text=True, check=False, timeout=30)


@pytest.mark.parametrize("name", UNDER_MPS)
def test_two_ranks_under_mps_same_losses_under_weft(name, nccl, mps, tmp_path):
    script, *more = UNDER_MPS[name]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / script),
    ]
    env = {
        **mps,
        "LD_PRELOAD": ":".join(filter(None, (nccl, os.environ.get("LD_PRELOAD")))),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "4",
    }
    command = [*torchrun, *SIZES, "--steps", "12", *more]
    plain = run(command, tmp_path, env, None)
    assert run(command, tmp_path, env, ("--head-start", "5")) == plain
