"""Profiler traces: what is exposed, why, and what would hide it. Needs neither torch nor a GPU.

The names below are loaded when first used: processes that only read a file need none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Analysis": "weft.trace.analysis",
    "RankAnalysis": "weft.trace.analysis",
    "analyze": "weft.trace.analysis",
    "compare": "weft.trace.comparison",
}

__all__ = ["Analysis", "RankAnalysis", "analyze", "compare"]

if TYPE_CHECKING:
    from weft.trace.analysis import Analysis, RankAnalysis, analyze
    from weft.trace.comparison import compare


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.trace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
