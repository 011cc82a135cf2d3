"""How far the predictions were from published runs: measured once, shipped with the figures."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "data" / "accuracy.json"


@cache
def known_error() -> dict[str, Any] | None:
    """Mean and 90th percentile of the error of step time on held-out published runs, in percent, if known."""
    if not SHIPPED.exists():
        return None
    found: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return found
