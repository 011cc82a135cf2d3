"""Builds the site as `scripts/docs` does; tests of the pages and of the browser share it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BUILT: list[Path] = []


def build(folder: Path) -> Path:
    """The site, built strictly, once for all tests of a run; skips where MkDocs is not installed."""
    if _BUILT:
        return _BUILT[0]
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("no MkDocs: pip install -e '.[docs]'")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "-d", str(folder)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    _BUILT.append(folder)
    return folder
