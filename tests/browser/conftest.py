"""One headless Chromium for all tests of this folder; without one they are skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from devtools import Browser, find_chromium

for folder in ("report", "docs"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium found; install one or set WEFT_CHROMIUM")
    found = Browser(executable)
    yield found
    found.close()
