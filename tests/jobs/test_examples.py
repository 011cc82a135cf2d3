"""Every example over gloo, two ranks, with and without `weft run`: the same losses, bit by bit."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_scenarios import PATIENT

from weft.tuning.live.proof import BLOCK, USUAL_BLOCKS

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("examples_runner.py")
STEPS = 4
SIZES = ("--steps", str(STEPS), "--width", "32", "--length", "16")
JOBS = {
    "ddp": ("ddp.py",),
    "bf16-hook": ("ddp_bf16_hook.py",),
    "powersgd": ("ddp_powersgd.py",),
    "compiled": ("compiled.py", "--compiler", "aot_eager"),
    "triton": ("triton_ddp.py",),
    "fsdp2": ("fsdp2.py",),
    "fsdp2-compiled": ("fsdp2.py", "--compile", "--compiler", "aot_eager", "--triton"),
    "tensor-parallel": ("tensor_parallel.py",),
    "inference": ("inference.py",),
    "1f1b": ("pipeline.py",),
    "interleaved": ("pipeline.py", "--schedule", "Interleaved1F1B", "--batch", "4", "--layers", "4"),
    "gpipe": ("pipeline.py", "--schedule", "GPipe", "--batch", "4", "--layers", "4"),
    "cuda-graph": ("cuda_graph.py",),
    "lightning": ("lightning_gpt.py",),
    "huggingface": ("huggingface_trainer.py",),
}
PIPELINES = ("1f1b", "interleaved", "gpipe")  # with ghosts rank 0 is never the last stage, so it has no loss
NEEDS = {"lightning": "lightning", "huggingface": "transformers"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test of each way runs them all


def present(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def run_all(folder: Path, *before: str, ghost: bool = False) -> dict[str, list[int]]:
    chosen = {name: job for name, job in JOBS.items() if present(name)}
    jobs = [(name, script, [*more, *SIZES]) for name, (script, *more) in chosen.items()]
    command = [
        *before,
        sys.executable,
        str(RUNNER),
        str(folder),
        json.dumps(jobs),
        *(["ghost"] if ghost else []),
    ]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WEFT_STORE": str(folder / "store"),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[int]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_all(folder)


@pytest.fixture(scope="module")
def under_weft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weft")
    options = ("--priority", "high", "--head-start", "5", "--residency", "2")
    return folder, run_all(folder, sys.executable, "-m", "weft", "run", *options, "--")


def losses(found, name: str, ranks: int = 2) -> list[str]:
    folder, codes = found
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob(f"{name}.*.log")))
    assert codes[name] == [0] * ranks, logs
    return (folder / f"{name}.losses").read_text().split()


@pytest.mark.parametrize("name", JOBS)
def test_an_example_runs_as_it_is(plain, name):
    if not present(name):
        pytest.skip(f"needs {NEEDS[name]}")
    values = [float.fromhex(text) for text in losses(plain, name)]
    assert len(values) == STEPS
    assert all(math.isfinite(value) for value in values)
    assert len(set(values)) > 1  # the losses change from step to step


@pytest.mark.parametrize("name", JOBS)
def test_its_losses_are_the_same_under_weft(plain, under_weft, name):
    if not present(name):
        pytest.skip(f"needs {NEEDS[name]}")
    assert losses(under_weft, name) == losses(plain, name)


def test_with_a_ghost_rank(tmp_path):
    codes = run_all(tmp_path, ghost=True)
    assert set(codes) == {name for name in JOBS if present(name)}
    for name in codes:
        values = [float.fromhex(text) for text in losses((tmp_path, codes), name, ranks=1)]
        assert len(values) == STEPS
        assert (len(set(values)) > 1) != (name in PIPELINES)
        assert all(math.isfinite(value) for value in values)


def test_every_example_is_tested():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts - {"common.py", "model.py", "triton_linear.py"} == {script for script, *_ in JOBS.values()}


def tune(name: str, tmp_path: Path, steps: int, **env: str) -> tuple[dict[str, Any], list[str]]:
    """Run an example by torchrun under `weft run --tune`; the result of tuning, and the losses."""
    out, stats = tmp_path / "losses", tmp_path / "stats.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script, *more = JOBS[name]
    sizes = [*SIZES, "--steps", str(steps), "--losses", str(out)]
    job = [*torchrun, str(ROOT / "examples" / script), *more, *sizes]
    command = [sys.executable, "-m", "weft", "run", "--tune", "--stats", str(stats), "--", *job]
    full = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WEFT_STORE": str(tmp_path / "store"),
    }
    done = subprocess.run(
        command, env={**full, **env}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(stats.read_text())["tuning"], out.read_text().split()


def test_where_nothing_can_be_changed_tuning_leaves_a_job_alone(plain, tmp_path):
    tuning, found = tune("inference", tmp_path, STEPS)
    assert tuning["state"] == "stopped"
    assert found == losses(plain, "inference")


@pytest.mark.parametrize("name", ["fsdp2", "lightning", "huggingface"])
def test_a_frameworks_steps_are_found_and_tuned_on_all_ranks_alike(plain, tmp_path, name):
    """With controls of known effect: all ranks find the best one within the budget, at the same steps."""
    if not present(name):
        pytest.skip(f"needs {NEEDS[name]}")
    path = os.pathsep.join([str(RUNNER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    controls = {"WEFT_TUNE_CONTROLS": "examples_controls:VirtualControls", **PATIENT}
    tuning, found = tune(name, tmp_path, 260, RECORD=str(tmp_path), PYTHONPATH=path, **controls)
    assert tuning["state"] == "kept", tuning["text"]
    assert tuning["policy"]["comm"]["max_ctas"] == 16
    assert 0 < tuning["steps"] < 60 + USUAL_BLOCKS * BLOCK
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert found[:STEPS] == losses(plain, name)
