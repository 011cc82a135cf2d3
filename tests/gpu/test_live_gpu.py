"""`weft run --tune` on a GPU: an unmodified DDP job, and inference without an optimizer, with a ghost rank each.

Needs torch and an NCCL that places two ranks on one GPU (WEFT_TEST_NCCL). Every run has a deadline. These
tests check that tuning runs, ends in time and changes no result; speed is for benchmarks/live.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"layers": 2, "width": 4096, "heads": 32, "length": 1024, "batch": 2, "lr": 0.001}


@pytest.fixture
def job(nccl, tmp_path):
    def run(example: str, steps: int, tune: bool = True, **sizes: int) -> tuple[dict, str]:
        losses = tmp_path / f"losses{tune}"
        flags = [text for name, value in {**SIZES, **sizes}.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "weft.comm.ghost", "--ranks", "2", str(EXAMPLES / example), *flags]
        command += ["--steps", str(steps), "--losses", str(losses)]
        if tune:
            weft = [sys.executable, "-m", "weft", "run", "--tune", "--stats", str(tmp_path / "stats.json")]
            command = [*weft, "--", *command]
        paths = os.pathsep.join(path for path in sys.path if path)
        env = {
            **os.environ,
            "PYTHONPATH": paths,
            "WEFT_NCCL": nccl,
            "WEFT_STORE": str(tmp_path / "store.sqlite"),
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        print(done.stderr[-2000:])
        stats = json.loads((tmp_path / "stats.json").read_text()) if tune else {}
        return stats, losses.read_text()

    return run


def test_a_ddp_job_is_tuned_and_its_losses_stay_the_same_to_the_last_bit(job):
    stats, losses = job("ddp.py", steps=700)
    tuning = stats["tuning"]
    assert tuning["state"] in ("kept", "left alone"), tuning
    assert 0 < tuning["steps"] < 660
    assert tuning["facts"]["ctas"] == 12
    assert tuning["facts"]["cta_choices"] == [6, 16, 24, 32]
    assert tuning["facts"]["collectives_per_step"] > 0
    tried = {candidate["label"] for candidate in tuning["candidates"]}
    assert {"ctas16", "ctas24", "ctas32"} <= tried
    assert not [c for c in tuning["candidates"] if "stalled" in c["note"]]
    assert tuning["explanation"], "no kernel overlapped with a collective"
    assert stats["routed"] > 0
    _, plain = job("ddp.py", steps=700, tune=False)
    assert losses == plain

    again, _ = job("ddp.py", steps=700)  # the next start finds this job's result in the store
    assert again["tuning"]["facts"]["workload"] == tuning["facts"]["workload"]


def test_inference_is_tuned_by_the_period_of_its_collectives(job):
    stats, _ = job("inference.py", steps=900, layers=8)
    tuning = stats["tuning"]
    assert tuning["state"] in ("kept", "left alone"), tuning
    assert 0 < tuning["steps"] < 860
