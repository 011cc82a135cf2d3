"""weft: hide multi-GPU communication behind computation, on unmodified programs.

Importing weft loads neither torch nor the launch shim; each name below is loaded when it is first used.
"""

from __future__ import annotations

from weft.lazy import TYPE_CHECKING, lazy_names

__version__ = "0.1.0"

_HOMES = {
    "Policy": "weft.policy",
    "Rule": "weft.policy",
    "Timeline": "weft.timeline",
    "WeftError": "weft.errors",
    "overlap": "weft.shim.apply",
    "restart": "weft.shim.restart",
    "analyze": "weft.trace",
    "ops": "weft.ops",
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


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
