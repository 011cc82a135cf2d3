"""Exact integer nanoseconds from the digits of `ts` and `dur`, which are decimal microseconds.

float64 resolves 1.7e15 µs (a Unix clock) only to 0.25 µs, so the numbers never become floats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

UNKNOWN = np.iinfo(np.int64).min
"""Marks a time that is missing, not a number, or beyond LIMIT_NS."""

LIMIT_NS = 1 << 62
"""146 years: sums and differences of two such times still fit 64 bits."""

_NUMBER = re.compile(rb'"?([-+]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([-+]?[0-9]{1,4}))?"?')
_COMMA, _DOT, _NOUGHT = (np.uint8(ord(c)) for c in ",.0")
_ZERO = np.zeros(1, dtype=np.intp)
_POWERS = 10 ** np.arange(18, -1, -1, dtype=np.int64)


def nanoseconds(tokens: Sequence[bytes | msgspec.Raw]) -> npt.NDArray[np.int64]:
    """Converts JSON numbers in microseconds, as text, to nanoseconds. UNKNOWN if unusable."""
    if not tokens:
        return np.empty(0, dtype=np.int64)
    joined = b",".join(tokens)
    fast = _uniform(joined, len(tokens))
    if fast is not None:
        return fast
    return np.array([_nanoseconds(bytes(token)) for token in tokens], dtype=np.int64)


def _uniform(joined: bytes, count: int) -> npt.NDArray[np.int64] | None:
    """Fast path for the usual texts: all integers, or all with three decimals. None for anything else."""
    text = np.frombuffer(joined + b",", dtype=np.uint8)
    ends = np.flatnonzero(text == _COMMA)
    scale = 1000
    if b"." in joined:
        if not np.array_equal(np.flatnonzero(text == _DOT) + 4, ends):
            return None
        text = text[text != _DOT]
        ends = ends - np.arange(1, len(ends) + 1)
        scale = 1
    starts = np.concatenate((_ZERO, ends[:-1] + 1))
    lengths = ends - starts
    if len(ends) != count or lengths.min() < 1 or lengths.max() > (16 if scale == 1000 else 19):
        return None
    if np.any((text - _NOUGHT > 9) & (text != _COMMA)):
        return None
    # 19 digits of nanoseconds stay below LIMIT_NS if the first digit is at most 3.
    if np.any((lengths == (16 if scale == 1000 else 19)) & (text[starts] > _NOUGHT + 3)):
        return None
    longest = int(lengths.max())
    if lengths.min() == longest:
        digits = text.reshape(count, longest + 1)[:, :longest] - _NOUGHT
        return np.asarray(digits @ _POWERS[-longest:] * scale)
    # Add the last digit of every number, then the one before it, and so on.
    total = np.zeros(count, dtype=np.int64)
    for place in range(longest):
        digit = text[np.maximum(ends - 1 - place, 0)].astype(np.int64) - _NOUGHT
        total += np.where(place < lengths, digit, 0) * 10**place
    return total * scale


def _nanoseconds(token: bytes) -> int:
    """One number of any form in nanoseconds, rounded half away from zero."""
    found = _NUMBER.fullmatch(token.strip())
    if not found:
        return UNKNOWN
    sign, whole, fraction, exponent = found.groups()
    fraction = fraction or b""
    if not whole and not fraction:
        return UNKNOWN
    shift = int(exponent or 0) + 3
    digits = (whole + fraction).lstrip(b"0") or b"0"
    places = shift - len(fraction)
    if len(digits) + places > 19 or len(digits) > 4000:
        return UNKNOWN
    value = int(digits)
    if places >= 0:
        value *= 10**places
    elif -places > len(digits) + 1:
        value = 0
    else:
        value = (value + 5 * 10 ** (-places - 1)) // 10**-places
    if value > LIMIT_NS:
        return UNKNOWN
    return -value if sign == b"-" else value
