"""Step: where one step of a program ends and the next begins, from what it repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

REPEATS = 3
REPEATS_OF_ONE = 4  # one optimizer alone; a few steps of it may also be the start of a longer pattern
_KEPT = 64  # events before one never seen before, which may be the first of a longer period
LONGEST = 512  # events within which a period must be found


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
    event never seen before, as of an optimizer that steps rarely, makes it learn again. So does the optimizer
    of another training loop: most of the events before it are then forgotten, as they do not come again.
    """

    def __init__(self) -> None:
        self._seen: deque[Hashable] = deque(maxlen=LONGEST)
        self._known: set[Hashable] = set()
        self._last: Hashable | None = None
        self.length: int | None = None

    @property
    def seen(self) -> bool:
        """Whether there was any event."""
        return bool(self._known)

    def ends_with(self, event: Hashable) -> bool:
        """Note an event; whether a step has ended with it. Never before a period was found."""
        self._seen.append(event)
        if self.length is not None and event in self._known:
            return event == self._last
        self._known.add(event)
        if self.length is not None:
            self.length = None
            self._seen = deque(list(self._seen)[-_KEPT:], maxlen=LONGEST)
        found = period(tuple(self._seen))
        if found is None or (found == 1 and len(self._seen) < REPEATS_OF_ONE):
            return False
        cycle = list(self._seen)[-found:]
        self._last = next((e for e in reversed(cycle) if cycle.count(e) == 1), event)
        self.length = found
        return event == self._last
