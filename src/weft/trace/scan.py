"""Cuts a stream of trace JSON into pieces that a decoder can take whole, in bounded memory.

The events array is cut at places that look like the end of one event and the start of the next. The decoder
detects a wrong cut (in a string or a nested array): text from the true start of an event up to it leaves a
string or a bracket open and cannot be decoded. Then an exact, slower scan finds the cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from weft.errors import InputError

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions from decoding malformed, badly encoded or too deeply nested JSON."""

CHUNK_BYTES = 1 << 20
"""Bytes of the events array decoded at a time."""

MAX_EVENT_BYTES = 64 << 20
"""A single event or metadata value larger than this is refused."""

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_CLOSING = re.compile(rb"\}\s*\]")
_CLOSING_TRIES = 4
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]|"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n,]*")
_SCALAR_END = re.compile(rb"[,}\]\s]")
_OPEN, _CLOSE = b"[]"
_TAIL_BYTES = 1 << 17

Take = Callable[[bytearray, int, int], bool]
"""Takes whole events, a JSON array at [low, high) of a buffer, and says whether it could be decoded."""


class Source(Protocol):
    """An iterator of byte blocks that may know why it ended early."""

    truncated: str | None

    def __iter__(self) -> Iterator[bytes]: ...


class Bulk(Protocol):
    """Takes events from text and blocks; returns the text left over and whether the array was closed."""

    def take(self, first: bytes, blocks: Iterator[bytes]) -> tuple[bytes, bool]: ...


class Scanner:
    """Walks the top level of one trace. Passes whole events to `take`, and metadata values to `keep`."""

    def __init__(self, source: Source, name: str) -> None:
        self._blocks = iter(source)
        self._source = source
        self._name = name
        # A spare byte always precedes the unread text, so that `_give` can put a bracket there.
        self._buffer = bytearray(b" ")
        self._at = 1
        self._ended = False
        self.truncated: str | None = None
        self.found_events = False
        self._bulk: Bulk | None = None

    def run(
        self, take: Take, salvage: Take, keep: Callable[[str, bytes], None], bulk: Bulk | None = None
    ) -> None:
        """Reads to the end. `salvage` gets the events that `take` rejected although they were cut exactly.

        `bulk`, if given, takes the events array first; `take` and `salvage` get what it leaves.
        """
        self._bulk = bulk
        first = self._peek()
        if first == b"":
            raise InputError(f"{self._name}: the file is empty; expected a profiler trace")
        if self._buffer.startswith(b"\xef\xbb\xbf", self._at):
            self._at += 3
            first = self._peek()
        if first == b"[":
            self._at += 1
            self._array(take, salvage)
        elif first == b"{":
            self._at += 1
            self._object(take, salvage, keep)
        else:
            begins = first.decode("latin-1")
            raise InputError(f"{self._name}: not JSON (it starts with {begins!r}); expected a profiler trace")
        self.truncated = self.truncated or self._source.truncated

    def _object(self, take: Take, salvage: Take, keep: Callable[[str, bytes], None]) -> None:
        while True:
            mark = self._peek()
            if mark == b"}":
                return
            key = self._value() if mark == b'"' else None
            if key is None or self._peek() != b":":
                self._stop(
                    "the file ends early" if self._peek() == b"" else "malformed JSON between its keys"
                )
                return
            self._at += 1
            name = key[1:-1].decode("utf-8", "replace")
            if name == "traceEvents" and self._peek() == b"[":
                self._at += 1
                if not self._array(take, salvage):
                    return
                continue
            value = self._value()
            if value is None:
                self._stop("the file ends early")
                return
            keep(name, value)

    def _array(self, take: Take, salvage: Take) -> bool:
        """Passes on the events of an array whose bracket was just read. Returns whether its end was found."""
        self.found_events = True
        if self._bulk is not None and self._in_bulk(self._bulk):
            return True
        while True:
            self._fill(CHUNK_BYTES)
            self._peek()
            if self._ended and self._at >= len(self._buffer):
                self._stop("the file ends early")
                return False
            if self._ended and self._take_last(take):
                return True
            cut = -1 if self._ended else self._guess()
            if cut > 0 and self._give(take, cut):
                self._at = cut
                continue
            cut, closed = self._exact()
            if cut > self._at:
                if not self._give(take, cut):
                    self._give(salvage, cut)
                self._at = cut
            if closed:
                self._peek()
                self._at += 1
                return True
            if self._ended:
                self._stop("the file ends early")
                return False
            if cut <= self._at:
                self._grow()

    def _in_bulk(self, bulk: Bulk) -> bool:
        """Hands the array to `bulk`, takes back what it left, and says whether the array is over."""
        rest, closed = bulk.take(bytes(memoryview(self._buffer)[self._at :]), self._blocks)
        self._buffer, self._at = bytearray(b" " + rest), 1
        return closed

    def _give(self, take: Take, cut: int) -> bool:
        """Passes the events up to the cut to `take` as an array: brackets replace the bytes around them."""
        if cut == len(self._buffer):
            self._buffer = self._buffer + b" "
        buffer, low = self._buffer, self._at - 1
        before, after = buffer[low], buffer[cut]
        buffer[low], buffer[cut] = _OPEN, _CLOSE
        try:
            return take(buffer, low, cut + 1)
        finally:
            buffer[low], buffer[cut] = before, after

    def _guess(self) -> int:
        """A likely end of an event near the end of the buffer, or -1."""
        last = -1
        for tail in (_TAIL_BYTES // 16, _TAIL_BYTES):  # most events are short, some carry a call stack
            low = max(self._at, len(self._buffer) - tail)
            for found in _BETWEEN.finditer(self._buffer, low):
                last = found.start() + 1
            if last > 0:
                break
        return last

    def _take_last(self, take: Take) -> bool:
        """Takes the rest of the array if one of the last brackets of the file closes it."""
        low = max(self._at, len(self._buffer) - _TAIL_BYTES)
        for found in list(_CLOSING.finditer(self._buffer, low))[: -_CLOSING_TRIES - 1 : -1]:
            if self._give(take, found.start() + 1):
                self._at = found.end()
                return True
        return False

    def _exact(self) -> tuple[int, bool]:
        """The end of the last whole element in the buffer, and whether the array closes right after it."""
        depth, cut = 0, self._at
        for token in _TOKEN.finditer(self._buffer, self._at):
            mark = token.group()
            if mark in (b"{", b"["):
                depth += 1
            elif mark in (b"}", b"]"):
                if depth == 0:
                    return max(cut, self._scalars_end(cut, token.start())), True
                depth -= 1
                if depth == 0:
                    cut = token.end()
            elif mark == b'"':
                break  # the string does not end in this buffer
        return cut, False

    def _scalars_end(self, low: int, high: int) -> int:
        """Extends the cut over stray numbers or strings before the closing bracket."""
        return high if self._buffer[low:high].strip(b" \t\r\n,") else low

    def _peek(self) -> bytes:
        """The next byte that is not white space or a comma; empty at the end of the file."""
        while True:
            found = _SPACE.match(self._buffer, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._buffer):
                return bytes(self._buffer[self._at : self._at + 1])
            if not self._fill(1):
                return b""

    def _value(self) -> bytes | None:
        """The text of the next JSON value; None if the file ends within it."""
        self._peek()
        wanted = 1 << 12
        while True:
            enough = self._fill(wanted)
            end = self._value_end()
            if end is not None:
                text = bytes(self._buffer[self._at : end])
                self._at = end
                return text
            if not enough:
                return None
            wanted *= 4
            if wanted > 4 * MAX_EVENT_BYTES:
                raise InputError(
                    f"{self._name}: a value of more than {MAX_EVENT_BYTES} bytes; not a profiler trace"
                )

    def _value_end(self) -> int | None:
        first = bytes(self._buffer[self._at : self._at + 1])
        if first not in (b"{", b"[", b'"'):
            found = _SCALAR_END.search(self._buffer, self._at)
            return found.start() if found else None
        depth = 0
        for token in _TOKEN.finditer(self._buffer, self._at):
            mark = token.group()
            if mark == b'"':
                return None
            depth += (mark in (b"{", b"[")) - (mark in (b"}", b"]"))
            if depth <= 0:
                return token.end()
        return None

    def _grow(self) -> None:
        """Doubles the unread text if it holds no whole event, up to the size limit of one event."""
        held = len(self._buffer) - self._at
        if held > MAX_EVENT_BYTES:
            raise InputError(
                f"{self._name}: an event of more than {MAX_EVENT_BYTES} bytes; not a profiler trace"
            )
        self._fill(2 * max(held, CHUNK_BYTES))

    def _fill(self, wanted: int) -> bool:
        """Fills the buffer to at least `wanted` unread bytes. False if the file has fewer."""
        held = len(self._buffer) - self._at
        if held >= wanted:
            return True
        parts: list[bytes | bytearray] = [b" ", self._buffer[self._at :]]
        while held < wanted and not self._ended:
            block = next(self._blocks, None)
            if block is None:
                self._ended = True
            else:
                parts.append(block)
                held += len(block)
        self._buffer, self._at = bytearray().join(parts), 1
        return held >= wanted

    def _stop(self, why: str) -> None:
        self.truncated = self._source.truncated or why


def split_chunks(text: bytes) -> Iterator[bytes]:
    """The objects in comma-separated JSON text that was cut exactly."""
    depth = start = 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in (b"{", b"["):
            if depth == 0:
                start = token.start()
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                yield text[start : token.end()]
