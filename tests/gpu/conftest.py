"""Tests on a real GPU: run by scripts/gpu-test, skipped on machines without one.

WEFT_TEST_NCCL names an NCCL library of 2.30 or newer, which can place several ranks on one GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.gpu.probe import probe

PROGRAMS = Path(__file__).parent / "programs"


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in Path(item.fspath).parents]
    if here and not probe():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def nccl() -> str:
    path = os.environ.get("WEFT_TEST_NCCL", "")
    if not Path(path).is_file():
        pytest.skip("set WEFT_TEST_NCCL to an NCCL library of 2.30 or newer")
    return path


@pytest.fixture
def run_program(tmp_path):
    """Runs a program of tests/gpu/programs, under `weft run` with the given options (None: without weft)."""

    def run(name, *arguments, weft=(), env=None, timeout=180):
        command = [sys.executable, str(PROGRAMS / name), *arguments]
        if weft is not None:
            command = [sys.executable, "-m", "weft", "run", *weft, "--", *command]
        paths = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run
