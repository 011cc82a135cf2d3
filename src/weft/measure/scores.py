"""Scores: how far apart candidates are, from measurements in shared rounds with noise, outliers and drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOISE_FLOOR = 0.002
"""Relative; keeps a lucky quiet start from dropping good candidates."""
CLIP = 2.0  # standard deviations: what lies further out counts as this in the noise,
CLIPPED = 0.9205  # the variance that this leaves of a normal distribution
SURE = 16  # degrees of freedom at which the noise is known well enough
PASSES = 4
STEADY = 6  # degrees of freedom from which a median deviation can be had
NORMAL_MAD = 1.4826
HICCUP = 3.5  # standard deviations: further out it is a hiccup of the machine, and left out

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

        Student's way: wider while sigma is a guess.
        """
        wider = 1 + (z * z + 1) / (4 * self.freedom) if self.freedom else math.inf
        return z * wider * self.sigma * math.sqrt(1 / a + 1 / b)


def fit(rounds: Sequence[Round], members: Sequence[int], known: Noise) -> tuple[Array, Array, Noise]:
    """The level of each member, from how many measurements, and the noise.

    A measurement is the member's level and the round's level and noise: what slows a whole round slows
    nobody more than others. `known` is the noise so far; it stays where these rounds tell less.
    """
    held = [found for found in rounds if any(i in found for i in members)]
    x = np.array([[found.get(i, math.nan) for found in held] for i in members]).reshape(len(members), -1)
    last = np.arange(len(members)), (np.sum(~np.isnan(x), axis=1) - 1) // 2
    part = math.sqrt(max(len(members) - 1, 1) / len(members))
    whole = x[:, ~np.isnan(x).any(axis=0)]  # rounds in which all took part: a level to begin with
    level = np.median(whole - np.median(whole, axis=0), axis=1) if whole.size else _median(x, 1)
    noise = known
    for number in range(PASSES):
        clean = x - _median(x - level[:, None], 0)
        rest = clean - level[:, None]
        if number:  # what is far from the member's own middle says nothing about it
            middle = np.sort(clean, axis=1)[last]
            clean[np.abs(clean - middle[:, None]) > HICCUP * noise.sigma * part] = math.nan
        level = np.nanmean(clean, axis=1)
        noise = _noise(rest, known)
    return level, np.sum(~np.isnan(clean), axis=1), noise


def _median(x: Array, axis: int) -> Array:
    """Without what is missing; many times faster where nothing is."""
    found: Array = np.nanmedian(x, axis=axis) if np.isnan(x).any() else np.median(x, axis=axis)
    return found


def _noise(rest: Array, known: Noise) -> Noise:
    """The noise that is left when the levels of members and rounds are taken out."""
    rest = rest[np.sum(~np.isnan(rest), axis=1) > 1]
    rest = rest[:, np.sum(~np.isnan(rest), axis=0) > 1]
    found = rest[~np.isnan(rest)]
    freedom = found.size - sum(rest.shape) + 1 if found.size else 0
    if freedom < min(SURE, max(known.freedom, 1)):
        return known
    part = math.sqrt(freedom / found.size)  # the levels took some of the noise with them
    scale = float(np.sqrt(np.mean(found**2)))
    if freedom >= STEADY:  # a start that outliers cannot spoil
        scale = min(scale, NORMAL_MAD * float(np.median(np.abs(found))))
    for _ in range(PASSES):
        scale = math.sqrt(float(np.mean(np.clip(found, -CLIP * scale, CLIP * scale) ** 2)) / CLIPPED)
    sigma = max(scale / part, NOISE_FLOOR)
    return Noise(sigma, freedom, bool(np.max(np.abs(found)) > HICCUP * part * sigma))
