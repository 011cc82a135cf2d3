"""weft: hide multi-GPU communication behind computation, on unmodified programs.

Importing weft loads neither torch nor the launch shim; each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Policy": "weft.policy",
    "Rule": "weft.policy",
    "Timeline": "weft.timeline",
    "WeftError": "weft.errors",
    "overlap": "weft.shim.apply",
    "restart": "weft.shim.restart",
    "analyze": "weft.trace",
    "tune": "weft.tuning.callable",
}

__all__ = [
    "Policy",
    "Rule",
    "Timeline",
    "WeftError",
    "__version__",
    "analyze",
    "ops",
    "overlap",
    "restart",
    "tune",
]

if TYPE_CHECKING:
    from weft import ops
    from weft.errors import WeftError
    from weft.policy import Policy
    from weft.rules import Rule
    from weft.shim.apply import overlap
    from weft.shim.restart import restart
    from weft.timeline import Timeline
    from weft.trace import analyze
    from weft.tuning.callable import tune


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("weft.ops")
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
