"""How many steps a trial of the watch has and how many trials are decided at a time, by a step's time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

BETWEEN_S = 0.25  # seconds between decisions of a watch, at least
MEET = (8, 256)  # trials between decisions of a watch
TRIAL_MS, MOST_TOGETHER = 15.0, 64  # a trial of a watch: at least this long, with at most this many steps
IDLE_MS, MOST_IDLE = 250.0, 512  # the same where no policy is in force; counting 512 costs as much as a look
LAG = 2  # trials whose times need not be known when a watch decides
RECENT = 5  # trials that give the current time of a step
_MISFIT = 4  # times as many steps as a trial should have, or fewer by this factor


def steps_of_a_trial(step_ms: float, *, idle: bool = False) -> int:
    """How many steps a watch times together: it takes tens of microseconds each time."""
    trial_ms, most = (IDLE_MS, MOST_IDLE) if idle else (TRIAL_MS, MOST_TOGETHER)
    return min(max(math.ceil(trial_ms / max(step_ms, 1e-3)), 1), most)


def lengths(step_ms: float, *, idle: bool = False) -> tuple[int, int]:
    """Steps of a trial and trials to decide in advance."""
    each = steps_of_a_trial(step_ms, idle=idle)
    return each, meeting(each * step_ms) + LAG


def meeting(trial_ms: float) -> int:
    """Trials between two decisions of a watch."""
    return min(max(math.ceil(1e3 * BETWEEN_S / max(trial_ms, 1e-3)), MEET[0]), MEET[1])


def refitted(each: int, recent_ms: Sequence[float], *, idle: bool = False) -> tuple[int, int] | None:
    """Steps of a trial and trials to decide in advance, where `each` steps no longer fit the job's pace."""
    if len(recent_ms) < RECENT:
        return None
    step_ms = median(recent_ms)
    wanted = steps_of_a_trial(step_ms, idle=idle)
    if each / _MISFIT < wanted < each * _MISFIT:
        return None
    return lengths(step_ms, idle=idle)
