"""Estimates candidates' levels and the noise, from measurements in shared rounds with outliers and drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOISE_FLOOR = 0.002
"""Relative: after an accidentally quiet start, good candidates must not be dropped."""
_CLIP = 2.0  # standard deviations at which residuals are clipped
CLIPPED = 0.9205  # variance of a standard normal distribution after this clipping
SURE = 16  # degrees of freedom from which the noise is known well enough
PASSES = 4
STEADY = 6  # degrees of freedom from which a median deviation is usable
NORMAL_MAD = 1.4826
HICCUP = 3.5  # standard deviations beyond which a measurement is an outlier and left out

Array = npt.NDArray[np.float64]
Round = Mapping[int, float]
"""Log times measured in one round, by candidate index."""


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one measurement (relative), and how well it is known."""

    sigma: float = NOISE_FLOOR
    freedom: int = 0
    outliers: bool = False

    def margin(self, z: float, a: int, b: int) -> float:
        """z standard errors of the difference between two means, of a and b measurements.

        Wider while sigma is poorly known, as with Student's t.
        """
        wider = 1 + (z * z + 1) / (4 * self.freedom) if self.freedom else math.inf
        return z * wider * self.sigma * math.sqrt(1 / a + 1 / b)


def fit_scores(rounds: Sequence[Round], members: Sequence[int], known: Noise) -> tuple[Array, Array, Noise]:
    """The level of each member, its number of measurements, and the noise.

    Model: a measurement is the member's level plus the round's level plus noise, so whatever slows a whole
    round affects no comparison. `known` is the noise so far; it is kept if these rounds say less about it.
    """
    held = [found for found in rounds if any(i in found for i in members)]
    x = np.array([[found.get(i, math.nan) for found in held] for i in members]).reshape(len(members), -1)
    missing = np.isnan(x)
    any_missing = bool(missing.any())
    last = np.arange(len(members)), ((~missing).sum(axis=1) - 1) // 2
    part = math.sqrt(max(len(members) - 1, 1) / len(members))
    whole = x[:, ~missing.any(axis=0)]  # rounds that measured all members determine the initial level
    level = _middle(whole - _middle(whole, 0), 1) if whole.size else _median(x, 1, any_missing)
    noise = known
    for number in range(PASSES):
        clean = x - _median(x - level[:, None], 0, any_missing)
        rest = clean - level[:, None]
        left_out = missing
        if number:  # measurements far from the member's median are outliers
            middle = np.sort(clean, axis=1)[last]
            left_out = missing | (np.abs(clean - middle[:, None]) > HICCUP * noise.sigma * part)
        counts = (~left_out).sum(axis=1)
        level = np.where(left_out, 0.0, clean).sum(axis=1) / counts
        noise = _noise(rest, missing, any_missing, known)
    return level, counts, noise


def _median(x: Array, axis: int, any_missing: bool) -> Array:
    """Median that ignores missing values; many times faster if there are none."""
    found: Array = np.nanmedian(x, axis=axis) if any_missing else _middle(x, axis)
    return found


def _middle(x: Array, axis: int) -> Array:
    """np.median without its checks, for values of which none is missing."""
    ordered, half = np.sort(x, axis=axis), x.shape[axis] // 2
    upper: Array = ordered.take(half, axis=axis)
    return upper if x.shape[axis] % 2 else (ordered.take(half - 1, axis=axis) + upper) / 2


def _noise(rest: Array, missing: npt.NDArray[np.bool_], any_missing: bool, known: Noise) -> Noise:
    """The noise in the residuals, from which the levels of members and rounds are removed."""
    if any_missing or min(rest.shape) < 2:
        rest = rest[(~missing).sum(axis=1) > 1]
        rest = rest[:, (~np.isnan(rest)).sum(axis=0) > 1]
        found = rest[~np.isnan(rest)]
    else:
        found = rest.ravel()
    freedom = found.size - sum(rest.shape) + 1 if found.size else 0
    if freedom < min(SURE, max(known.freedom, 1)):
        return known
    part = math.sqrt(freedom / found.size)  # the fitted levels absorbed part of the noise
    magnitudes = np.abs(found)
    scale = math.sqrt(float((found * found).sum()) / found.size)
    if freedom >= STEADY:  # a starting value that is robust to outliers
        scale = min(scale, NORMAL_MAD * float(_middle(magnitudes, 0)))
    for _ in range(PASSES):
        clipped = np.minimum(magnitudes, _CLIP * scale)
        scale = math.sqrt(float((clipped * clipped).sum()) / found.size / CLIPPED)
    sigma = max(scale / part, NOISE_FLOOR)
    return Noise(sigma, freedom, bool(magnitudes.max() > HICCUP * part * sigma))
