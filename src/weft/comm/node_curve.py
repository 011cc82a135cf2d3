"""TimeCurve: the time of a collective by size, from constants of the network model or from points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

LARGE_MESSAGE_BYTES = 16 << 20
"""Messages of at least this size count as large; their error is stated separately."""
_START_US = 15.0
"""Start-up time that is assumed if a log has no small messages."""
_NEAR = 8
"""Two sizes count as neighbours if their ratio is at most this."""


@dataclass(frozen=True)
class CtaRate:
    """Bus bandwidth per CTA in GB/s, and the range of the published or assumed values."""

    gb_s: float
    low: float
    high: float
    basis: str
    source: str = ""


@dataclass(frozen=True)
class TimeCurve:
    """Time of one collective by size: constants of the network model, or measured points."""

    collective: str
    ranks: int
    basis: str
    algorithm: str | None = None
    """None: the algorithm that the library chooses."""
    error_pct: float | None = None
    """Mean error in percent for LARGE_MESSAGE_BYTES and more, on results from sources left out of the fit."""
    error_small_pct: float | None = None
    """The same below LARGE_MESSAGE_BYTES."""
    sources: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    """Constants that replace the node's, such as `launch_us` or `gb_s` (`node_file.NODE_CONSTANTS`)."""
    points: tuple[tuple[int, float], ...] = ()
    """(bytes, microseconds) in order of size; empty: the time comes from the constants."""


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes over a rank's links per byte of the collective, as nccl-tests defines bus bandwidth."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def interpolate_us(points: tuple[tuple[int, float], ...], nbytes: int) -> float:
    """Microseconds for a size, interpolated between measured points; never decreases with size.

    Interpolation is linear in the logarithms between neighbouring sizes, and linear in size between sizes far
    apart. Below the first point it assumes a start-up time and a bandwidth. Above the last point it continues
    with the bandwidth between the last two points.
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
