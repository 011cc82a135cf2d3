"""Every example on a GPU, with ghost ranks and as two torchrun ranks under MPS: the same losses under weft.

WEFT_TEST_NCCL names the NCCL (2.30 or newer).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
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
}
NEEDS = {"lightning": "lightning", "huggingface": "transformers"}
RUNNER = Path(__file__).parents[1] / "jobs" / "examples_runner.py"
POLICY = ("--priority", "high", "--head-start", "5", "--residency", "2", "--when", "overlap")
DEADLINE_S = 90


def start(command: list[str], env: dict[str, str], deadline_s: float) -> str:
    """Run a command in its own session; if it hangs, kill it with all its ranks. Returns its output."""
    paths = os.pathsep.join(path for path in sys.path if path)
    full = {**os.environ, "PYTHONPATH": paths, **env}
    with subprocess.Popen(
        command, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=deadline_s)[0]
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            said = process.communicate()[0]
            pytest.fail(f"took longer than {deadline_s} s:\n{said[-3000:]}")
    assert process.returncode == 0, said[-3000:]
    return said


def under(weft: tuple[str, ...] | None, folder: Path) -> list[str]:
    """The `weft run` prefix of a command; empty without weft."""
    if weft is None:
        return []
    return [sys.executable, "-m", "weft", "run", *weft, "--stats", str(folder / "stats.json"), "--"]


def run_all(folder: Path, nccl: str, weft: tuple[str, ...] | None) -> tuple[Path, dict[str, list[int]]]:
    """All examples with ghost ranks, a fork each."""
    chosen = {name: job for name, job in JOBS.items() if importlib.util.find_spec(NEEDS.get(name, "torch"))}
    jobs = [(name, script, [*SIZES, "--steps", "12", *more]) for name, (script, *more) in chosen.items()]
    command = [*under(weft, folder), sys.executable, str(RUNNER), str(folder), json.dumps(jobs), "ghost"]
    start(command, {"WEFT_NCCL": nccl, "EXAMPLES_DEADLINE_S": "45"}, deadline_s=240)
    return folder, json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def plain(nccl, tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("plain"), nccl, None)


@pytest.fixture(scope="module")
def under_weft(nccl, tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("weft"), nccl, POLICY)


def losses(found: tuple[Path, dict[str, list[int]]], name: str) -> list[str]:
    folder, codes = found
    if name not in codes:
        pytest.skip(f"needs {NEEDS[name]}")
    assert codes[name] == [0], (folder / f"{name}.0.log").read_text()[-3000:]
    return (folder / f"{name}.losses").read_text().split()


NUMERICS = """
import copy, sys, torch
sys.path.insert(0, sys.argv[1])
from triton_linear import TritonLinear
torch.manual_seed(0)
for tokens, width, out in ((256, 512, 1024), (100, 200, 72)):
    layer = TritonLinear(width, out, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    exact, y = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    found, wanted = layer(x), torch.nn.functional.linear(y, exact.weight)
    grad = torch.randn_like(found)
    found.backward(grad)
    wanted.backward(grad.double())
    pairs = ((found, wanted), (x.grad, y.grad), (layer.weight.grad, exact.weight.grad))
    for ours, theirs in pairs:
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 1e-2
print("right")
"""


def test_the_triton_layer_is_right():
    pytest.importorskip("triton")
    command = [sys.executable, "-c", NUMERICS, str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout.strip() == "right", done.stderr[-3000:]


@pytest.mark.parametrize("name", JOBS)
def test_an_example_with_a_ghost_rank(plain, name):
    assert all(math.isfinite(float.fromhex(text)) for text in losses(plain, name))


@pytest.mark.parametrize("name", JOBS)
def test_its_losses_are_the_same_under_weft(plain, under_weft, name):
    assert losses(under_weft, name) == losses(plain, name)


def run(command: list[str], tmp_path: Path, env: dict[str, str], weft: tuple[str, ...] | None) -> list[str]:
    """Run one job; returns its losses."""
    path = tmp_path / "losses"
    path.unlink(missing_ok=True)
    line = [*under(weft, tmp_path), sys.executable, *command, "--losses", str(path)]
    start(line, {"WEFT_STORE": str(tmp_path / "store"), **env}, DEADLINE_S)
    return path.read_text().split()


def ghost(name: str, steps: int) -> list[str]:
    script, *more = JOBS[name]
    sizes = [*SIZES, "--steps", str(steps), *more]
    return ["-m", "weft.comm.ghost", "--ranks", "2", str(EXAMPLES / script), *sizes]


@pytest.mark.parametrize("name", ["triton", "inference"])
def test_tuned_with_ghost_ranks_same_losses(name, nccl, tmp_path):
    env, command = {"WEFT_NCCL": nccl}, ghost(name, 800)
    plain = run(command, tmp_path, env, None)
    assert run(command, tmp_path, env, ("--tune",)) == plain
    tuning = json.loads((tmp_path / "stats.json").read_text())["tuning"]
    assert tuning["state"] in ("kept", "left alone"), tuning["text"]
    assert 0 < tuning["steps"] < 760
    assert len(tuning["candidates"]) > 1


@pytest.fixture(scope="module")
def mps(tmp_path_factory):
    """The environment for MPS; without MPS two ranks take turns, and one may wait for the other."""
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
    time.sleep(1)
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
