"""What a control could gain: an explicit, simple model, in one function so that a simulator can replace it.

The shares are measured on an H200 with GEMMs, attention and NCCL (see docs/analyze.md). Whole training steps
made of many kernels gained little or nothing from them, so the lower end is cautious.
"""

from __future__ import annotations

from weft.trace.blockers import Blocker

HEAD_START_US = 5
"""The wait that gave most on the H200; 40 µs already cost more than it gave."""

RECOVERED = {
    "priority": (0.0, 0.45),
    "residency": (0.25, 0.95),
    "head_start": (0.30, 0.75),
    "none": (0.0, 0.0),
}
"""The least and most of what waited behind compute that a control gets back."""


def predict(blocker: Blocker) -> tuple[float, float]:
    """The least and most µs per rank that the blocker's control could save, never more than what waited."""
    low, high = RECOVERED[blocker.control]
    cost_us = HEAD_START_US * blocker.calls if blocker.control == "head_start" else 0.0
    return (
        round(max(low * blocker.exposed_us - cost_us, 0.0), 1),
        round(max(high * blocker.exposed_us - cost_us, 0.0), 1),
    )
