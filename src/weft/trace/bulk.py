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
from typing import TYPE_CHECKING

from weft.trace import native, scan

if TYPE_CHECKING:
    from weft.trace.events import Collector

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_TAILS = (1 << 13, 1 << 17)
_MAX_HELD = 64
_MAX_LATER_BYTES = 4 << 20


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BulkScan:
    """Scans the events of one array. The scanner keeps what it found until `collector` is asked for."""

    def __init__(self, workers: int | None = None) -> None:
        self._workers = max(workers or cores(), 1)
        self._found: list[native.ScannedPart] = []
        self._later_bytes = 0
        self._collector: Collector | None = None

    @property
    def collector(self) -> Collector:
        """The columns of all that was scanned so far."""
        if self._collector is None:
            from weft.trace.events import (
                Collector,  # needs numpy, which loads while the first parts are scanned
            )

            self._collector = Collector()
        for part in self._found:
            self._collector.absorb(part.columns())
        self._found.clear()
        self._later_bytes = 0
        return self._collector

    def take(self, first: bytes, blocks: Iterator[bytes]) -> tuple[bytes, bool]:
        """Takes events from text that begins between two of them, until the array ends or something is odd.

        Returns the text that was read but not used, and whether the array was closed before it. What is odd,
        and an array that ends early, is left for the caller, at the start of an event.
        """
        parts = _Parts(first, blocks)
        carry = b""
        with _Ahead(parts, self._workers) as scanned:
            for text, cut, found in scanned:
                if carry:
                    text, cut = carry + text, len(carry) + cut
                    found = native.scan(text, cut)
                self._keep(found)
                carry = text[found.consumed : cut]
                if not carry.strip():
                    carry = b""
                if found.status != native.FED or len(carry) > scan.MAX_EVENT_BYTES:
                    rest = [carry, *scanned.unused(), parts.rest()]
                    return b"".join(rest), found.status == native.CLOSED
        return carry, False

    def _keep(self, part: native.ScannedPart) -> None:
        self._found.append(part)
        self._later_bytes += sum(map(len, part.later))
        if len(self._found) >= _MAX_HELD or self._later_bytes > _MAX_LATER_BYTES:
            _ = self.collector


class _Ahead:
    """Texts, their cuts and what was found in them, in order; several are scanned at once."""

    def __init__(self, parts: _Parts, workers: int) -> None:
        self._parts = parts
        self._workers = workers
        self._waiting: deque[tuple[bytes, int, Future[native.ScannedPart]]] = deque()
        self._pool = ThreadPoolExecutor(workers, "weft-scan") if workers > 1 else None

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._pool:
            self._pool.shutdown()

    def __iter__(self) -> Iterator[tuple[bytes, int, native.ScannedPart]]:
        if self._pool is None:
            for text, cut in self._parts:
                yield text, cut, native.scan(text, cut)
            return
        while True:
            while len(self._waiting) <= self._workers and (part := next(self._parts, None)) is not None:
                self._waiting.append((*part, self._pool.submit(native.scan, *part)))
            if not self._waiting:
                return
            text, cut, future = self._waiting.popleft()
            yield text, cut, future.result()

    def unused(self) -> list[bytes]:
        """Texts that were taken ahead of the last one that was given out."""
        return [text[:cut] for text, cut, _ in self._waiting]


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
