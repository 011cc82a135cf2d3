"""What holds for tests of whole jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

ABORTED = "-6 != 0|SIGABRT"
"""A rank ended by SIGABRT. It was seen once in about 400 jobs of gloo ranks, at the end of a job, and its cause is
not known: such a test runs a second time and must pass then. Any other failure counts at once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=ABORTED))
