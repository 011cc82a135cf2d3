"""The reasons for exposure in words: one table for the terminal, the page, the export and the summary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """A reason: its key, a short name, what it means, and the end of "… is exposed, mostly because …"."""

    key: str
    name: str
    meaning: str
    because: str


REASON_TABLE = (
    Reason(
        "same_stream",
        "same stream",
        "the collective is on the stream that computes, so nothing can overlap with it",
        "the collectives run on the compute stream",
    ),
    Reason(
        "needed_by_compute",
        "needed by compute",
        "the next compute kernel, or the CPU, waits for the result",
        "the next compute waits for the collectives",
    ),
    Reason(
        "waits_for_input",
        "waits for input",
        "it starts when the compute that makes its input ends, and no other compute is left",
        "the collectives wait for compute that makes their input",
    ),
    Reason(
        "queue_full",
        "queue full",
        "the CPU could not launch because the queue to the GPU was full",
        "the queue to the GPU is full when the collectives are issued",
    ),
    Reason(
        "launched_late",
        "launched late",
        "the CPU launched the collective, or the compute to hide it, too late",
        "the CPU launches late",
    ),
    Reason(
        "behind_compute",
        "behind compute",
        "the collective was ready but waited for compute to leave the SMs",
        "the collectives wait behind compute that holds the SMs",
    ),
    Reason(
        "slower_rank",
        "slower rank",
        "the collective waited for a rank that arrived later",
        "the collectives wait for a slower rank",
    ),
    Reason(
        "pipeline_bubble",
        "pipeline bubble",
        "a receive waited for another pipeline stage",
        "receives wait for other pipeline stages",
    ),
    Reason(
        "nothing_to_hide_behind",
        "no compute left",
        "no compute was left to overlap with it: communication outlasts compute, or the run ends",
        "no compute is left to overlap with the collectives",
    ),
)
"""All reasons, in the order of `weft.trace.attribute.REASONS`."""

BY_KEY = {reason.key: reason for reason in REASON_TABLE}
