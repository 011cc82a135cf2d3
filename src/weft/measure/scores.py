"""Levels of candidates and the noise, from measurements in shared rounds with outliers and drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOISE_FLOOR = 0.002
"""Relative; an accidentally quiet start must not drop good candidates."""
_CLIP = 2.0  # standard deviations at which residuals are clipped,
CLIPPED = 0.9205  # and the variance that a normal distribution has left then
SURE = 16  # degrees of freedom at which the noise is known well enough
PASSES = 4
STEADY = 6  # degrees of freedom from which a median deviation is usable
NORMAL_MAD = 1.4826
HICCUP = 3.5  # standard deviations beyond which a measurement is an outlier and left out

Array = npt.NDArray[np.float64]
Round = Mapping[int, float]
"""What was measured in one round, by candidate: natural logarithms of times."""


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one measurement (relative), and how well it is known."""

    sigma: float = NOISE_FLOOR
    freedom: int = 0
    outliers: bool = False

    def margin(self, z: float, a: int, b: int) -> float:
        """z standard errors of the difference of two means of a and b measurements.

        Wider while sigma is poorly known, as with Student's t.
        """
        wider = 1 + (z * z + 1) / (4 * self.freedom) if self.freedom else math.inf
        return z * wider * self.sigma * math.sqrt(1 / a + 1 / b)


def fit_scores(rounds: Sequence[Round], members: Sequence[int], known: Noise) -> tuple[Array, Array, Noise]:
    """The level of each member, its number of measurements, and the noise.

    Model: a measurement is the member's level plus the round's level plus noise, so what slows a whole round
    affects no comparison. `known` is the noise so far; it is kept where these rounds say less about it.
    """
    held = [found for found in rounds if any(i in found for i in members)]
    x = np.array([[found.get(i, math.nan) for found in held] for i in members]).reshape(len(members), -1)
    last = np.arange(len(members)), (np.sum(~np.isnan(x), axis=1) - 1) // 2
    part = math.sqrt(max(len(members) - 1, 1) / len(members))
    whole = x[:, ~np.isnan(x).any(axis=0)]  # rounds that measured all members give the initial level
    level = np.median(whole - np.median(whole, axis=0), axis=1) if whole.size else _median(x, 1)
    noise = known
    for number in range(PASSES):
        clean = x - _median(x - level[:, None], 0)
        rest = clean - level[:, None]
        if number:  # measurements far from the member's median are outliers
            middle = np.sort(clean, axis=1)[last]
            clean[np.abs(clean - middle[:, None]) > HICCUP * noise.sigma * part] = math.nan
        level = np.nanmean(clean, axis=1)
        noise = _noise(rest, known)
    return level, np.sum(~np.isnan(clean), axis=1), noise


def _median(x: Array, axis: int) -> Array:
    """Median that ignores missing values; many times faster where there are none."""
    found: Array = np.nanmedian(x, axis=axis) if np.isnan(x).any() else np.median(x, axis=axis)
    return found


def _noise(rest: Array, known: Noise) -> Noise:
    """The noise of the residuals, with the levels of members and rounds removed."""
    rest = rest[np.sum(~np.isnan(rest), axis=1) > 1]
    rest = rest[:, np.sum(~np.isnan(rest), axis=0) > 1]
    found = rest[~np.isnan(rest)]
    freedom = found.size - sum(rest.shape) + 1 if found.size else 0
    if freedom < min(SURE, max(known.freedom, 1)):
        return known
    part = math.sqrt(freedom / found.size)  # the fitted levels absorbed part of the noise
    scale = float(np.sqrt(np.mean(found**2)))
    if freedom >= STEADY:  # a starting value that is robust to outliers
        scale = min(scale, NORMAL_MAD * float(np.median(np.abs(found))))
    for _ in range(PASSES):
        scale = math.sqrt(float(np.mean(np.clip(found, -_CLIP * scale, _CLIP * scale) ** 2)) / CLIPPED)
    sigma = max(scale / part, NOISE_FLOOR)
    return Noise(sigma, freedom, bool(np.max(np.abs(found)) > HICCUP * part * sigma))
