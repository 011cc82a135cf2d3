"""TimeCurve: the time of a collective over its bytes, by constants of the network model or by points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

LARGE_MESSAGE_BYTES = 16 << 20
"""From this size on, the error of large messages applies."""
_START_US = 15.0
"""Start-up time of a collective, if a log has no small messages."""
_NEAR = 8
"""Sizes whose ratio is at most this count as neighbours."""


@dataclass(frozen=True)
class CtaRate:
    """Bus bandwidth that one CTA adds, in GB/s, and the range of what is published or assumed."""

    gb_s: float
    low: float
    high: float
    basis: str
    source: str = ""


@dataclass(frozen=True)
class TimeCurve:
    """Time over bytes of one collective: constants of the network model, or measured points."""

    collective: str
    ranks: int
    basis: str
    algorithm: str | None = None
    """None: the one that the library chooses."""
    error_pct: float | None = None
    """Mean error from LARGE_MESSAGE_BYTES on, on results of sources that were left out of the fit."""
    error_small_pct: float | None = None
    """The same below LARGE_MESSAGE_BYTES."""
    sources: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    """`launch_us`, `hop_us`, `gb_s`, `switch_gain`, `half_bytes`; absent: the node's."""
    points: tuple[tuple[int, float], ...] = ()
    """Bytes and microseconds, in order of size."""


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes over a rank's links for each byte of the collective, as nccl-tests counts bus bandwidth."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def interpolate_us(points: tuple[tuple[int, float], ...], nbytes: int) -> float:
    """Microseconds between measured points: linear in the logarithms, never decreasing with size.

    If two sizes are far apart, and below the first point: a start-up time and a bandwidth. Above the last
    point: the bandwidth between the last two.
    """
    rising: list[tuple[int, float]] = []
    most = 0.0
    for size, us in points:
        most = max(most, us)
        rising.append((size, most))
    first, least = rising[0]
    if nbytes <= first or len(rising) == 1:
        start = min(least, _START_US)
        return start + (least - start) * nbytes / first
    for (below, least), (above, greatest) in pairwise(rising):
        if nbytes <= above:
            if above > _NEAR * below:
                return least + (greatest - least) * (nbytes - below) / (above - below)
            share = math.log(nbytes / below) / math.log(above / below)
            return least * math.pow(greatest / least, share)
    (below, least), (above, greatest) = rising[-2:]
    return greatest + (nbytes - above) * max((greatest - least) / (above - below), greatest / above / 2)
