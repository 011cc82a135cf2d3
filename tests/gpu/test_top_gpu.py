"""`weft top` and the checks of `weft doctor` on a real GPU, driver and NCCL. Every run has a deadline."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs/top_steps.py"


def environment(folder: Path) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder), "PORT": str(port)}


def weft(*words: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_figures_of_a_real_job_and_a_policy_from_outside(tmp_path):
    env = environment(tmp_path)
    command = [
        sys.executable,
        "-m",
        "weft",
        "run",
        "--stats",
        "stats.json",
        "--",
        sys.executable,
        str(PROGRAM),
    ]
    (tmp_path / "policy.json").write_text(json.dumps({"version": 1, "comm": {"priority": "high"}}))
    with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
        try:
            deadline = time.monotonic() + 60
            while not (calls := list(tmp_path.glob("weft-job-*/calls.*"))):
                assert job.poll() is None, job.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            folder = str(calls[0].parent)
            watch = subprocess.Popen(
                [sys.executable, "-m", "weft", "top", folder, "--json"],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            time.sleep(6)
            changed = weft("top", folder, "--policy", "policy.json", env=env, folder=tmp_path)
            assert changed.returncode == 0, changed.stderr
            time.sleep(2)
            (tmp_path / "stop").touch()
            assert job.wait(60) == 0
            lines = [json.loads(line)["jobs"][0] for line in watch.communicate(timeout=30)[0].splitlines()]
        finally:
            (tmp_path / "stop").touch()
            if job.poll() is None:
                job.kill()
    stats, own = (json.loads((tmp_path / name).read_text()) for name in ("stats.json", "own.json"))
    last = lines[-1]
    print(json.dumps({key: last[key] for key in ("step_ms", "step_spread_pct", "totals")}))
    assert last["state"] == "ended"
    assert last["totals"] == {name: stats[name] for name in last["totals"]}
    assert last["totals"]["comm_bytes"] > 0
    assert last["step_ms"] == pytest.approx(median(own[-64:]), rel=0.25)
    assert stats["policy_changes"] >= 1
    assert lines[0]["policy_label"] == "overlap"
    assert last["policy_label"] == "priority"


def test_clocks_and_shared_memory_are_looked_at(tmp_path):
    done = weft(
        "doctor", "--json", "--", sys.executable, str(PROGRAM), env=environment(tmp_path), folder=tmp_path
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    print(
        checks.get("clocks"),
        checks["shared memory"],
        checks.get("nccl regression"),
        checks.get("compile flags"),
    )
    assert checks["shared memory"]["status"] in ("ok", "warn")
    assert "clocks" in checks
