"""Length of the watch's trials in steps, and number of trials decided at a time, from the time of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

BETWEEN_S = 0.25  # least seconds between two decisions of a watch, within MEET
MEET = (8, 256)  # fewest and most trials between two decisions of a watch
TRIAL_MS, MOST_TOGETHER = 15.0, 64  # least ms and most steps of a watch's trial
IDLE_MS, MOST_IDLE = 250.0, 512  # the same if no policy is in force; counting 512 costs as much as a timing
LAG = 2  # trials whose times need not be known when a watch decides
RECENT = 5  # trials that determine the current time of a step
_MISFIT = 4  # factor by which a trial's steps may be off before its length changes


def steps_of_a_trial(step_ms: float, *, idle: bool = False) -> int:
    """How many steps a watch times together, because each timing takes tens of microseconds."""
    trial_ms, most = (IDLE_MS, MOST_IDLE) if idle else (TRIAL_MS, MOST_TOGETHER)
    return min(max(math.ceil(trial_ms / max(step_ms, 1e-3)), 1), most)


def lengths(step_ms: float, *, idle: bool = False) -> tuple[int, int]:
    """Steps per trial, and number of trials to decide in advance."""
    each = steps_of_a_trial(step_ms, idle=idle)
    return each, meeting(each * step_ms) + LAG


def meeting(trial_ms: float) -> int:
    """Number of trials between two decisions of a watch."""
    return min(max(math.ceil(1e3 * BETWEEN_S / max(trial_ms, 1e-3)), MEET[0]), MEET[1])


def refitted(each: int, recent_ms: Sequence[float], *, idle: bool = False) -> tuple[int, int] | None:
    """New `lengths` if trials of `each` steps no longer fit the job's pace, else None."""
    if len(recent_ms) < RECENT:
        return None
    step_ms = median(recent_ms)
    wanted = steps_of_a_trial(step_ms, idle=idle)
    if each / _MISFIT < wanted < each * _MISFIT:
        return None
    return lengths(step_ms, idle=idle)
