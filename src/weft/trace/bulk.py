"""The events array in parts: cuts it at likely ends of events and scans several parts at once.

A cut may be wrong (in a string, or in a nested array). The scan of the part before it tells: it must end
exactly there. If it does not, what it left over goes in front of the next part, which is scanned again.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from weft.trace import native, scan
from weft.trace.events import Collector

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_TAILS = (1 << 13, 1 << 17)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Bulk:
    """Feeds a collector with the events of one array."""

    def __init__(self, collector: Collector, workers: int | None = None) -> None:
        self._collector = collector
        self._workers = max(workers or cores(), 1)

    def take(self, first: bytes, blocks: Iterator[bytes]) -> tuple[bytes, bool]:
        """Takes events from text that begins between two of them, until the array ends or something is odd.

        Returns the text that was read but not used, and whether the array was closed before it. What is odd,
        and an array that ends early, is left for the caller, at the start of an event.
        """
        waiting: deque[tuple[bytes, int, Future[native.Scanned]]] = deque()
        parts = _Parts(first, blocks)
        carry = b""
        with ThreadPoolExecutor(self._workers, thread_name_prefix="weft-scan") as pool:
            while True:
                while len(waiting) <= self._workers and (part := next(parts, None)) is not None:
                    waiting.append((*part, pool.submit(native.scan, *part)))
                if not waiting:
                    return carry, False
                text, cut, future = waiting.popleft()
                found = future.result()
                if carry:
                    text, cut = carry + text, len(carry) + cut
                    found = native.scan(text, cut)
                self._collector.absorb(found)
                carry = text[found.consumed : cut]
                if not carry.strip():
                    carry = b""
                if found.status != native.FED or len(carry) > scan.MAX_EVENT_BYTES:
                    rest = [carry, *(text[:cut] for text, cut, _ in waiting), parts.rest()]
                    return b"".join(rest), found.status == native.CLOSED


class _Parts:
    """Pairs of a text and where to cut it; what is behind the cut starts the next text."""

    def __init__(self, first: bytes, blocks: Iterator[bytes]) -> None:
        self._held = first
        self._blocks = blocks
        self._ended = False

    def __iter__(self) -> _Parts:
        return self

    def __next__(self) -> tuple[bytes, int]:
        while not self._ended:
            block = next(self._blocks, None)
            if block is None:
                self._ended = True
                text, self._held = self._held, b""
                if text:
                    return text, len(text)
                break
            text = self._held + block if self._held else block
            cut = _last_between(text)
            self._held = text[cut:] if cut > 0 else text
            if cut > 0:
                return text, cut
            if len(text) > scan.MAX_EVENT_BYTES:
                self._held = b""
                return text, len(text)
        raise StopIteration

    def rest(self) -> bytes:
        """What was taken from the blocks and not given out."""
        held, self._held = self._held, b""
        return held


def _last_between(text: bytes) -> int:
    """A likely end of an event near the end of a text, or -1."""
    last = -1
    for tail in _TAILS:  # most events are short, some carry a call stack
        for found in _BETWEEN.finditer(text, max(len(text) - tail, 0)):
            last = found.start() + 1
        if last > 0:
            break
    return last
