"""Reads untrusted documents: tolerates absent keys, odd types and hostile text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]

# Control characters could control a terminal, bidirectional overrides could disguise a name, and lone
# surrogates cannot be encoded as UTF-8.
_BLANKS = re.compile("[\\t\\n\\r\\f\\v\u2028\u2029]+")
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(value: object) -> str:
    """Text that is safe to print and to encode: one line of printable characters."""
    return _UNPRINTABLE.sub("\ufffd", _BLANKS.sub(" ", str(value)))


def shorten(value: str, limit: int) -> str:
    """At most `limit` characters, shortened in the middle, because long names also differ at their ends."""
    if len(value) <= limit:
        return value
    tail = (limit - 1) // 3
    return value[: limit - 1 - tail] + "…" + (value[-tail:] if tail else "")


def number(source: Document, key: str) -> float | None:
    """A finite number, or None."""
    return finite(source.get(key))


def finite(value: object) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def amount(source: Document, key: str) -> float:
    """A finite number, or 0 if there is none."""
    return number(source, key) or 0.0


def text(source: Document, key: str, default: str = "") -> str:
    """Cleaned text of a scalar, or the default if there is none."""
    value = source.get(key)
    return default if value is None or isinstance(value, (dict, list)) else clean(value)


def record(source: Document, key: str) -> dict[str, Any]:
    """A nested object, or an empty one."""
    value = source.get(key)
    return value if isinstance(value, dict) else {}


def records(source: Document, key: str) -> list[dict[str, Any]]:
    """The objects in a list; other items are left out."""
    value = source.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def interval(source: Document, key: str) -> tuple[float, float] | None:
    """A pair of finite numbers in order, or None."""
    value = source.get(key)
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = finite(value[0]), finite(value[1])
    return None if low is None or high is None else (min(low, high), max(low, high))
