"""Steps: finds where a program's steps end, from the events that it repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import groupby

REPEATS = 4  # for any number of optimizers: the stages of a pipeline may have different numbers
_WINDOW = 720  # events within which a period must be found
LONGEST = 3072  # the same for many optimizers, such as one for each parameter
_LOOK_EVERY = 64  # events between two searches for a period of many optimizers, which take longer
RUN = 128  # an event that comes this many times in a row ends a step by itself, whatever came before


def period(stream: Sequence[Hashable], repeats: int = REPEATS) -> int | None:
    """The shortest period, seen `repeats` times, of at least the latter half of a stream; None if none."""
    backwards = list(reversed(stream))
    borders = [0] * len(backwards)  # the longest border of each prefix (Knuth, Morris and Pratt)
    for i in range(1, len(backwards)):
        k = borders[i - 1]
        while k and backwards[i] != backwards[k]:
            k = borders[k - 1]
        borders[i] = k + (backwards[i] == backwards[k])
    size = (len(backwards) + 1) // 2
    while 0 < size <= len(backwards):
        length = size - borders[size - 1]
        if length * repeats <= size:
            return length
        size = length * repeats
    return None


class Steps:
    """Finds which events (optimizers that stepped) end a step.

    Several optimizers, or several steps of one before another, make a longer period. It begins with the event
    that the program had first. A step ends with an event that occurs only once per period, so an event left
    out, for example by a gradient scaler, does no harm; if there is none, with the last one of a row. A new
    event triggers relearning: from the events that follow if a new training loop has begun, or from all
    events if an earlier event comes again, as with an optimizer that steps rarely. If optimizers alternate in
    long runs, each event is a step by itself once its run is long enough.
    """

    def __init__(self) -> None:
        self._seen: deque[Hashable] = deque(maxlen=LONGEST)
        self._loop: deque[Hashable] = deque(maxlen=LONGEST)
        """Events of this training loop; used if there was one before it."""
        self._known: dict[Hashable, int] = {}
        """Events in the order in which they came first."""
        self._earlier: frozenset[Hashable] = frozenset()
        """Events of the training loops before this one."""
        self._last: Hashable | None = None
        self._times = 1
        """How many times in a row it comes at the end of a step."""
        self._run = 0
        """How many times in a row the latest event has come."""
        self._looks = 0
        """Events of many optimizers without a period."""
        self.length: int | None = None

    @property
    def seen(self) -> bool:
        """Whether any event has come."""
        return bool(self._known)

    def repeat(self, event: Hashable, times: int) -> None:
        """Add an event that came `times` times in a row and ended a step each time."""
        self._count(event, times)
        self._seen.extend([event] * min(times, LONGEST))

    def ends_with(self, event: Hashable) -> bool:
        """Add an event; returns whether it ends a step. False until a period is found."""
        self._count(event, 1)
        self._seen.append(event)
        if event in self._earlier:
            self._earlier = frozenset()  # an earlier event came again: no new training loop has begun
        elif self.length is not None and event in self._known:
            if self._run != RUN or (event == self._last and self._times == 1):
                return self._ends(event)
        elif self.length is not None:
            self._earlier = frozenset(self._known)
            self._loop.clear()
        self._loop.append(event)
        self._known.setdefault(event, len(self._known))
        self.length = None
        stream = self._latest()
        found = period(stream) or (1 if self._run >= RUN else None)
        if found is None:
            return False
        self._last, self._times = self._end_of(stream[-found:], event)
        self.length = found
        return self._ends(event)

    def _latest(self) -> Sequence[Hashable]:
        """The latest events, in which to look for a period."""
        stream = self._loop if self._earlier else self._seen
        window = max(_WINDOW, REPEATS * (len(self._known) - len(self._earlier)))
        if window > _WINDOW:
            self._looks += 1
            # An odd event, so never the last of REPEATS periods: ranks with different numbers then agree.
            if self._looks % _LOOK_EVERY != 1:
                return (stream[-1],)
        return tuple(stream)[-window:]

    def _ends(self, event: Hashable) -> bool:
        return event == self._last and self._run % self._times == 0

    def _end_of(self, cycle: Sequence[Hashable], event: Hashable) -> tuple[Hashable, int]:
        """The event that ends a step, and how many times in a row it comes then; `event` if none is clear."""
        begin = min(range(len(cycle)), key=lambda i: (self._known[cycle[i]], cycle[i] == cycle[i - 1]))
        runs = [(e, len(list(same))) for e, same in groupby([*cycle[begin:], *cycle[:begin]])]
        clear = [run for run in reversed(runs) if run[1] == cycle.count(run[0])]
        return min(clear, key=lambda run: run[1] > 1, default=(event, 1))

    def _count(self, event: Hashable, times: int) -> None:
        before = self._run if self._seen and self._seen[-1] == event else 0
        self._run = before + times
