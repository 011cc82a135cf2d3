"""`weft reproduce --device cuda`: the paper's setting with two ranks on one GPU. About 40 s."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


def test_the_papers_setting_runs_on_a_gpu(nccl):
    command = [sys.executable, "-m", "weft", "reproduce", "2606.09200", "--device", "cuda", "--json"]
    env = {**os.environ, "WEFT_NCCL": nccl}
    done = subprocess.run(
        [*command, "--budget", "20"], env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["simulated"] is False
    ratios = [row for row in document["figures"] if row["id"] == "fig2/H100"]
    assert ratios, document["findings"]
    assert all(0.2 < row["ours"] < 1.3 for row in ratios)
    assert any(row["id"] == "controls/gain" for row in document["figures"])
