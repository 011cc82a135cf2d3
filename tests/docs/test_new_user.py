"""The quickstart and the README, typed by someone who has only a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import doc_workspace
import pytest
from doc_blocks import ROOT, Command, runnable
from test_blocks import check

OFFLINE = (  # pip's messages about an index that is unreachable or breaks off
    "Could not find a version",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "HTTPSConnectionPool",
    "HTTPConnectionPool",
    "Connection broken",
    "Connection reset by peer",
    "Read timed out",
    "pip._vendor.urllib3.exceptions",
    "requests.exceptions",
    "HTTP error",
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the files that git tracks or would add."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    folder = tmp_path / "weft"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="the pages show a Linux shell")
def test_the_quickstart_line_by_line(clone: Path):
    pages = [ROOT / "docs/quickstart.md", ROOT / "README.md"]
    commands: dict[str, tuple[Path, Command]] = {}  # the README repeats lines of the quickstart
    for page in pages:
        for command in runnable(page):
            commands.setdefault(command.text, (page, command))
    env = {
        "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(clone.parent),
        "COLUMNS": "80",
        "LC_ALL": "C.UTF-8",
    }
    results = doc_workspace.typed([command for _, command in commands.values()], clone, env)
    code, output = results[-1]
    last = list(commands)[len(results) - 1]
    if code and "pip install" in last and any(words in output for words in OFFLINE):
        pytest.skip("no package index can be reached")
    for (page, command), result in zip(commands.values(), results, strict=False):
        check(page, [command], [result])
    assert len(results) == len(commands)
