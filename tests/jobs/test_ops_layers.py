"""Layers, styles and parallelize of weft.ops on real processes over gloo, next to plain torch and torch's styles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_programs import run_torch_program

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs"


def run(folder: Path, program: str, *arguments: object, timeout: float = 240) -> str:
    output, errors = folder / "output", folder / "errors"
    code = run_torch_program(
        [PROGRAMS / program, *arguments],
        {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_STORE": "/nonexistent/store"},
        output,
        errors,
        timeout_s=timeout,
    )
    assert code == 0, errors.read_text()[-4000:] + output.read_text()[-500:]
    return output.read_text()


def layers(count: int, folder: Path, *checks: str) -> None:
    folder.mkdir(exist_ok=True)
    run(folder, "ops_layers.py", count, folder, *checks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_layers_equal_plain_ones_and_look_like_those_of_torch(count, tmp_path):
    """Values, gradients, uneven tokens, placements, state_dicts, gradient norms, optimizers, meta, checkpointing.

    And what replaces torch's collectives: fused graphs, DTensors with a pending gather.
    """
    more = ["checkpointed", "model", "refused"] if count == 2 else ["graphs", "pending"]
    layers(count, tmp_path, "values", "uneven_tokens", "like_torch", "optimizers", "meta", *more)


@pytest.mark.timeout(300)
def test_torch_compile(tmp_path):
    layers(2, tmp_path, "compiled")


@pytest.mark.timeout(300)
def test_a_llama_like_model_with_fsdp2_over_the_other_dimension(tmp_path):
    layers(4, tmp_path, "model", "fsdp")


@pytest.mark.timeout(300)
def test_a_checkpoint_resumes_bit_identical_and_on_another_number_of_ranks(tmp_path):
    layers(4, tmp_path / "first", "save")
    layers(4, tmp_path / "second", "load")
    layers(2, tmp_path / "third", "load")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("count", "calls"), [(1, 60), (2, 60), (3, 40), (4, 30), (8, 10)])
def test_random_calls_equal_plain_torch(count, calls, tmp_path):
    """`ops_fuzz.py P CALLS SEED` runs as many as you like."""
    assert f"{calls} calls on {count} ranks" in run(tmp_path, "ops_fuzz.py", count, calls, 11)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_llama_of_transformers_trains_as_with_the_styles_of_torch(count, tmp_path):
    pytest.importorskip("transformers")
    assert "equal" in run(tmp_path, "ops_llama.py", count, tmp_path, 6, timeout=500)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_families_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    assert "families are equal on 2 ranks" in run(tmp_path, "ops_families.py", 2, tmp_path, timeout=500)


def weft_run_ops(wanted: str, stats: Path, *program: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_OPS": wanted}
    command = [sys.executable, "-m", "weft", "run", "--ops", "--stats", str(stats), "--", *program]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="weft run needs Linux")
def test_weft_run_ops_fuses_the_layers_of_an_unmodified_program(tmp_path):
    stats = tmp_path / "stats.json"
    program = [sys.executable, str(PROGRAMS / "ops_unmodified.py"), "2", "3", "eager"]
    done = weft_run_ops("all", stats, *program)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "15 layers use fused operations" in done.stderr
    (process,) = json.loads(stats.read_text())["ops"]["processes"]
    assert {each["schedule"] for each in process["operations"]} == {"hetero-fused-1d"}
    # From the second step on, query, key and value share a gather: 16 + 8 + 8 columns.
    assert ("all_gather_matmul", 32) in {(each["operation"], each["n"]) for each in process["operations"]}


@pytest.mark.skipif(sys.platform != "linux", reason="weft run needs Linux")
def test_weft_run_ops_goes_by_the_pick_unless_the_environment_says_otherwise(tmp_path):
    stats = tmp_path / "stats.json"
    done = weft_run_ops("", stats, sys.executable, "-c", "import os; print(os.environ['WEFT_OPS'])")
    assert (done.returncode, done.stdout) == (0, "pick\n"), done.stderr
    assert json.loads(stats.read_text())["ops"]["processes"] == []
    done = weft_run_ops("yes", stats, "true")
    assert done.returncode == 2
    assert "use pick or all" in done.stderr
