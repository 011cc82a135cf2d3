"""Occupancy of each SM over time: mean resident blocks of compute and of collectives, in equal bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.sim.core import SimMachine, simulate_launches
from weft.sim.launches import Launch

OCCUPANCY_BINS = 480
"""Number of bins over the simulated time."""


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Mean resident blocks by SM (rows) and time bin (columns)."""

    total_s: float
    compute: npt.NDArray[np.float64]
    comm: npt.NDArray[np.float64]


def occupancy(machine: SimMachine, launches: Sequence[Launch], bins: int = OCCUPANCY_BINS) -> Occupancy:
    """Simulate the launches and bin every change of residency."""
    outcome = simulate_launches(machine, launches, log=True)
    communicates = np.array([launch.comm for launch in launches])[outcome.changes["launch"]]
    parts = (outcome.changes[~communicates], outcome.changes[communicates])
    compute, comm = (_binned(changes, machine.sms, outcome.total_s, bins) for changes in parts)
    return Occupancy(outcome.total_s, compute, comm)


def _binned(changes: npt.NDArray[np.void], sms: int, total_s: float, bins: int) -> npt.NDArray[np.float64]:
    """Mean resident blocks by SM and bin.

    A change counts for the part of its own bin that follows it, and fully in all later bins.
    """
    place = changes["time"] / total_s * bins
    column = np.minimum(place.astype(np.int64), bins - 1)
    amount = changes["change"].astype(np.float64)
    own, later = np.zeros((sms, bins)), np.zeros((sms, bins + 1))
    np.add.at(own, (changes["sm"], column), amount * (column + 1 - place))
    np.add.at(later, (changes["sm"], column + 1), amount)
    return own + np.cumsum(later[:, :bins], axis=1)
