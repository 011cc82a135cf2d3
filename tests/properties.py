"""How properties are tested: on the same examples in every run, so that CI fails only for what changed.

WEFT_EXPLORE=1 pytest … draws others each time.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings


def examples(count: int = 100, **more: Any) -> settings:
    """So many examples, however long each of them takes: the machine may be busy."""
    return settings(max_examples=count, deadline=None, derandomize="WEFT_EXPLORE" not in os.environ, **more)
