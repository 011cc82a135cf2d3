"""Step: where one step of a program ends and the next begins, from what it repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

REPEATS = 3
REPEATS_OF_ONE = 4  # one optimizer alone; a few steps of it may also be the start of a longer pattern
LONGEST = 512  # events within which a period must be found
RUN = 128  # times in a row that an event comes until it ends a step by itself, whatever came before


def period(stream: Sequence[Hashable], repeats: int = REPEATS) -> int | None:
    """The shortest period of the latter half of a stream, seen `repeats` times; None: there is none."""
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
    """Tells from a stream of events (optimizers that stepped) which of them end a step.

    Several optimizers, or several steps of one of them before another, make a longer period. A step ends with
    an event that a period has only once, so that one left out, as by a gradient scaler, does no harm. An
    event never seen before makes it learn again: from the events that follow, if it begins another training
    loop, or from all of them, if an earlier event comes again, as with an optimizer that steps rarely. Where
    optimizers alternate in long runs, each is a step by itself once its run is long.
    """

    def __init__(self) -> None:
        self._seen: deque[Hashable] = deque(maxlen=LONGEST)
        self._loop: deque[Hashable] = deque(maxlen=LONGEST)
        """The events of this training loop, if there was one before."""
        self._known: set[Hashable] = set()
        self._earlier: frozenset[Hashable] = frozenset()
        """Events of the training loops before this one."""
        self._last: Hashable | None = None
        self._run = 0
        """How many times in a row the latest event came."""
        self.length: int | None = None

    @property
    def seen(self) -> bool:
        """Whether there was any event."""
        return bool(self._known)

    def repeat(self, event: Hashable, times: int) -> None:
        """Note an event that came so many times in a row, each of which ended a step."""
        self._count(event, times)
        self._seen.extend([event] * min(times, LONGEST))

    def ends_with(self, event: Hashable) -> bool:
        """Note an event; whether a step has ended with it. Never before a period was found."""
        self._count(event, 1)
        self._seen.append(event)
        if event in self._earlier:
            self._earlier = frozenset()  # no other training loop has begun
        elif self.length is not None and event in self._known:
            if event == self._last or self._run != RUN:
                return event == self._last
        elif self.length is not None:
            self._earlier = frozenset(self._known)
            self._loop.clear()
        self._loop.append(event)
        self._known.add(event)
        self.length = None
        stream = tuple(self._loop if self._earlier else self._seen)
        found = period(stream) or (1 if self._run >= RUN else None)
        if found is None or (found == 1 and len(stream) < REPEATS_OF_ONE):
            return False
        cycle = stream[-found:]
        self._last = next((e for e in reversed(cycle) if cycle.count(e) == 1), event)
        self.length = found
        return event == self._last

    def _count(self, event: Hashable, times: int) -> None:
        before = self._run if self._seen and self._seen[-1] == event else 0
        self._run = before + times
