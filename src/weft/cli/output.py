"""Results as JSON: one object on standard output, with the version of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RESULT_VERSION = 1
"""Changes where a key is removed or gets another type, not where one is added."""


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result with its version, which `weft schema` describes."""
    return {"version": RESULT_VERSION, **document}
