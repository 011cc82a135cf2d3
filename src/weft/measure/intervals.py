"""Confidence intervals of medians and of ratios, from a handful of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 1000


def bootstrap_ci(samples: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bootstrap confidence interval of the median; NaNs without samples.

    It is never narrower than the exact interval between two order statistics: with few samples the bootstrap
    alone is too narrow.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    if not len(values):
        return math.nan, math.nan
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [(1 - level) / 2, (1 + level) / 2])
    outer = _order_statistic(len(values), level)
    return float(min(low, values[outer])), float(max(high, values[-1 - outer]))


def _order_statistic(count: int, level: float) -> int:
    """The largest index from both ends of the sorted samples that encloses the median at this level."""
    k, outside = 0, 2 * 0.5**count
    while k + 1 < count // 2:
        outside += 2 * math.comb(count, k + 1) * 0.5**count
        if outside > 1 - level:
            break
        k += 1
    return k


def ratio_ci(
    a: Sequence[float], b: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Median of a/b and the ends of its confidence interval; NaNs without samples.

    Samples are paired by round if both have equally many; the interval is then never narrower than the exact
    one between two order statistics of the paired ratios.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not len(x) or not len(y):
        return math.nan, math.nan, math.nan
    if len(x) == len(y):
        low, high = bootstrap_ci((x / y).tolist(), level=level, seed=seed)
        return float(np.median(x / y)), low, high
    rng = np.random.default_rng(seed)
    first, second = (rng.integers(0, len(v), (RESAMPLES, len(v))) for v in (x, y))
    estimates = np.median(x[first], axis=1) / np.median(y[second], axis=1)
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2])
    return float(np.median(x) / np.median(y)), float(low), float(high)
