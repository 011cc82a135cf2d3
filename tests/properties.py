"""Settings of property tests: the same examples in every run, so that CI fails only because of a change.

WEFT_EXPLORE=1 pytest … draws new examples each time.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings


def examples(count: int = 100, **more: Any) -> settings:
    """This many examples without a deadline: the machine may be busy."""
    return settings(max_examples=count, deadline=None, derandomize="WEFT_EXPLORE" not in os.environ, **more)
