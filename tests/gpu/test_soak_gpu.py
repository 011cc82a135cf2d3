"""The shim over many real launches, resets and contexts: results are bit-identical, counts exact. About 2 minutes.

WEFT_SOAK_LAUNCHES sets the length of the long run (10 million by default).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
LAUNCHES = int(float(os.environ.get("WEFT_SOAK_LAUNCHES", "1e7")))
POLICY = {
    "version": 1,
    "comm": {"priority": "high", "head_start_us": 5},
    "compute": {"when": "overlap", "rules": [{"kernel": "*", "residency": 2}]},
}

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def build(name: str, folder: Path) -> Path:
    program = folder / name
    command = [
        "nvcc",
        "-O2",
        "-Wno-deprecated-gpu-targets",
        "-o",
        str(program),
        str(PROGRAMS / f"{name}.cu"),
        "-lcuda",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return program


def both_ways(program: Path, arguments: list[str], folder: Path, timeout: float) -> tuple[str, str, dict]:
    """The program's output without and with weft, and the shim's counts."""
    policy, stats = folder / "policy.json", folder / "stats.json"
    policy.write_text(json.dumps(POLICY))
    weft = [
        sys.executable,
        "-m",
        "weft",
        "run",
        "--quiet",
        "--policy",
        str(policy),
        "--stats",
        str(stats),
        "--",
    ]
    paths = os.pathsep.join(path for path in sys.path if path)

    def run(*prefix: str) -> str:
        done = subprocess.run(
            [*prefix, str(program), *arguments],
            env={**os.environ, "PYTHONPATH": paths, "NCCL_MAX_CTAS": "4"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    plain = run()
    return plain, run(*weft), json.loads(stats.read_text())


def test_contexts_that_come_and_go_change_no_result(tmp_path):
    plain, under, counted = both_ways(build("contexts", tmp_path), [], tmp_path, 60)
    assert under == plain
    launches = {kernel["name"].split("(")[0]: kernel["launches"] for kernel in counted["kernels"]}
    steps = 200 * (2 * 20 + 2 * 20 + 1)
    by_kind = {
        kind: sum(n for name, n in launches.items() if kind in name) for kind in ("advance", "ncclDevKernel")
    }
    assert by_kind == {"advance": steps, "ncclDevKernel": steps // 20}
    assert counted["tracking_failures"] == counted["head_start_failures"] == counted["unknown"] == 0
    assert counted["head_starts"] > 0


def test_many_launches_with_collectives_change_no_result(nccl, tmp_path):
    program = build("soak", tmp_path)
    plain, under, counted = both_ways(program, [str(LAUNCHES), nccl], tmp_path, 150)
    assert under == plain
    own = sum(
        k["launches"] for k in counted["kernels"] if k["name"].startswith(("advance", "through_shared"))
    )
    assert own == LAUNCHES
    assert counted["comm_launches"] == 2 * -(-LAUNCHES // 1000)
    assert counted["prioritised"] == counted["comm_launches"]
    assert (
        counted["shape_failures"]
        == counted["tracking_failures"]
        == counted["unknown"]
        == counted["unlisted"]
        == 0
    )
