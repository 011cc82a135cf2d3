"""Raw numbers say where they come from."""

from __future__ import annotations

import fnmatch
import re
import subprocess

import pytest
from doc_blocks import ROOT

RESULTS = ROOT / "benchmarks/results"


def test_every_file_of_results_is_listed_with_its_command():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=RESULTS, capture_output=True, text=True, check=True
    )
    rows = re.findall(r"^\| (.*?) \|", (RESULTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    patterns = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    files = [name for name in listed.stdout.split("\0") if name and not name.endswith("README.md")]
    assert [name for name in files if not any(fnmatch.fnmatch(name, each) for each in patterns)] == []
