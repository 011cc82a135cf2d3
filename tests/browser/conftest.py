"""One headless Chromium for the tests of this folder; without one they are skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from devtools import Browser, find_chromium

for folder in ("report", "docs"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


@pytest.fixture(scope="session")
def browsers() -> Iterator[list[Browser]]:
    """The one browser that all tests share, in a list that is empty until a test starts it."""
    started: list[Browser] = []
    yield started
    for one in started:
        one.close()


@pytest.fixture
def browser(browsers: list[Browser], request: pytest.FixtureRequest) -> Browser:
    """The shared browser; a new one if it has died or if this test is a rerun of a failed one."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium found; install one or set WEFT_CHROMIUM")
    again = getattr(request.node, "execution_count", 1) > 1
    if browsers and (again or not browsers[0].alive):
        browsers.pop().close()
    if not browsers:
        browsers.append(Browser(executable))
    return browsers[0]
