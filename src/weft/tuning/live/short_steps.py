"""Short steps: delays the search of a job whose steps take a fraction of a millisecond.

A search makes all ranks wait at about a hundred meetings, however long a step is. If steps are much shorter
than a meeting, that takes as long as thousands of steps. So such a job first runs until a search's meetings
are a small share of its time; a job that ends earlier is left unchanged.
"""

from __future__ import annotations

from collections.abc import Generator
from statistics import median

from weft.policy import Policy
from weft.tuning.live.trial import Record, Sample, Trial, ask

_SHORT_MS = 0.5  # with steps at least this long, a job of one minute can afford a search at once
_MEETINGS = 120  # meetings of a search
_SHARE = 0.006  # largest share of a job's time for these meetings
_FIRST, _MOST = 32, 4096  # steps between two meetings while the job waits: at first and at most
_ENOUGH = 4  # steps that determine the time of a step and of a meeting


def run_until_affordable(default: Policy, record: Record) -> Generator[Trial, Sample, list[float]]:
    """Run the first steps of a job for as long as a search would take too large a share of its time.

    Returns the times of the first single steps.
    """
    samples = []
    for _ in range(_ENOUGH):
        samples.append((yield from ask(Trial(default), record, "warm-up")))
    meeting_ms = median(sample.paused_ms for sample in samples[1:])  # nobody waited before the first
    step_ms = min(sample.ms for sample in samples)
    ran_ms, steps = 0.0, _FIRST
    while 0 < step_ms < min(meeting_ms, _SHORT_MS) and _SHARE * ran_ms < _MEETINGS * meeting_ms:
        sample = yield from ask(Trial(default, steps), record, "warm-up")
        step_ms = sample.ms
        ran_ms += steps * step_ms
        steps = min(2 * steps, _MOST)
    return [sample.ms for sample in samples]
