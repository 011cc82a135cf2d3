"""Scans the events array in parallel: cuts it at likely ends of events and scans several parts at once.

A cut may be wrong (in a string, or in a nested array). The scan of the preceding part detects that: it must
end exactly at the cut. If it does not, its leftover text is prepended to the next part, which is scanned
again.
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
    """Scans the events of one array. Results stay in the compiled scanner until `collector` is read."""

    def __init__(self, workers: int | None = None) -> None:
        self._workers = max(workers or cores(), 1)
        self._found: list[native.ScannedPart] = []
        self._later_bytes = 0
        self._collector: Collector | None = None

    @property
    def collector(self) -> Collector:
        """The columns of everything scanned so far."""
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
        """Takes events from text that begins between two events, up to the array's end or malformed text.

        Returns the text that was read but not used, and whether the array was closed before it. Malformed or
        truncated text is left to the caller, from the start of an event.
        """
        parts = _Parts(first, blocks)
        carry = b""
        with _Ahead(parts, self._workers) as scanned:
            for text, low, high, found in scanned:
                if carry:
                    text = carry + text[low:high]
                    low, high = 0, len(text)
                    found = native.scan(text, low, high)
                self._keep(found)
                carry = text[found.consumed : high]
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
    """Yields each text, the range to read and what the scan found there, in order; scans several at once."""

    def __init__(self, parts: _Parts, workers: int) -> None:
        self._parts = parts
        self._workers = workers
        self._waiting: deque[tuple[bytes, int, int, Future[native.ScannedPart]]] = deque()
        self._pool = ThreadPoolExecutor(workers, "weft-scan") if workers > 1 else None

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._pool:
            self._pool.shutdown()

    def __iter__(self) -> Iterator[tuple[bytes, int, int, native.ScannedPart]]:
        if self._pool is None:
            for text, low, high in self._parts:
                yield text, low, high, native.scan(text, low, high)
            return
        while True:
            while len(self._waiting) <= self._workers and (part := next(self._parts, None)) is not None:
                self._waiting.append((*part, self._pool.submit(native.scan, *part)))
            if not self._waiting:
                return
            text, low, high, future = self._waiting.popleft()
            yield text, low, high, future.result()

    def unused(self) -> list[bytes]:
        """Texts that were taken but not yet yielded."""
        return [text[low:high] for text, low, high, _ in self._waiting]


class _Parts:
    """Yields texts with the range to read, cut where an event seems to end.

    An event that spans two blocks becomes a text of its own, so that whole blocks are not copied.
    """

    def __init__(self, first: bytes, blocks: Iterator[bytes]) -> None:
        self._held = first
        self._blocks = blocks
        self._block = b""
        """A block that was yielded only up to `_low`; empty if there is none."""
        self._low = 0

    def __iter__(self) -> _Parts:
        return self

    def __next__(self) -> tuple[bytes, int, int]:
        if self._block:
            return self._rest_of_block()
        while (block := next(self._blocks, None)) is not None:
            low = _first_between(block) if self._held else 0
            if low > 0:
                text = self._held + block[:low]
                self._held, self._block, self._low = b"", block, low
                return text, 0, len(text)
            self._block = self._held + block if self._held else block
            self._held, self._low = b"", 0
            text, low, high = self._rest_of_block()
            if high > low:
                return text, low, high
            if len(self._held) > scan.MAX_EVENT_BYTES:
                break
        text, self._held = self._held, b""
        if not text:
            raise StopIteration
        return text, 0, len(text)

    def _rest_of_block(self) -> tuple[bytes, int, int]:
        """The rest of the block up to its last event; the text after that is held back."""
        text, low, self._block = self._block, self._low, b""
        high = max(_last_between(text), low)
        self._held = text[high:]
        return text, low, high

    def rest(self) -> bytes:
        """Text that was taken from the blocks but not yielded."""
        rest, self._block, self._held = self._block[self._low :] or self._held, b"", b""
        return rest


def _first_between(text: bytes) -> int:
    """A likely end of an event near the start of a text, or -1."""
    found = _BETWEEN.search(text, 0, _TAILS[-1])
    return found.start() + 1 if found else -1


def _last_between(text: bytes) -> int:
    """A likely end of an event near the end of a text, or -1."""
    last = -1
    for tail in _TAILS:  # most events are short, some carry a call stack
        for found in _BETWEEN.finditer(text, max(len(text) - tail, 0)):
            last = found.start() + 1
        if last > 0:
            break
    return last
