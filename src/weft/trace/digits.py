"""Exact integer nanoseconds from the digits of `ts` and `dur`, which are decimal microseconds.

float64 holds 1.7e15 µs (a Unix clock) only to 0.25 µs, so the numbers never become floats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

UNKNOWN = np.iinfo(np.int64).min
"""Stands where a time is missing, not a number, or beyond the limit below."""

LIMIT_NS = 1 << 62
"""146 years; sums and differences of two times within it still fit 64 bits."""

_NUMBER = re.compile(rb'"?([-+]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([-+]?[0-9]{1,4}))?"?')
_INTEGERS = msgspec.json.Decoder(list[int])


def nanoseconds(tokens: Sequence[bytes | msgspec.Raw]) -> npt.NDArray[np.int64]:
    """Nanoseconds of JSON number texts in microseconds. UNKNOWN where a text is no usable number."""
    joined = b",".join(tokens)
    fast = _uniform(joined, len(tokens))
    if fast is not None:
        return fast
    return np.array([_nanoseconds(bytes(token)) for token in tokens], dtype=np.int64)


def _uniform(joined: bytes, count: int) -> npt.NDArray[np.int64] | None:
    """All integers, or all with three decimals: what profilers write. None for anything else."""
    if b"-" in joined or b"e" in joined or b"E" in joined:
        return None
    decimals = b"." in joined
    if decimals:
        text = np.frombuffer(joined + b",", dtype=np.uint8)
        if not np.array_equal(np.flatnonzero(text == ord(".")) + 4, np.flatnonzero(text == ord(","))):
            return None
        # JSON has no 012, so the fraction gets a digit in front that is taken off again below.
        joined = joined.replace(b".", b",1")
    try:
        values = np.array(_INTEGERS.decode(b"[" + joined + b"]"), dtype=np.int64)
    except (msgspec.DecodeError, OverflowError):
        return None
    if len(values) != count * (1 + decimals) or (len(values) and int(values.max()) > LIMIT_NS // 1000):
        return None
    return values[0::2] * 1000 + (values[1::2] - 1000) if decimals else values * 1000


def _nanoseconds(token: bytes) -> int:
    """One number of any form, rounded half up to a nanosecond."""
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
