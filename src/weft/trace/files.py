"""Finds trace files and reads their bytes, plain, gzip or zstd, within limits."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import InputError

READ_BYTES = 1 << 18
"""Compressed bytes read from disk at a time."""

BLOCK_BYTES = 1 << 21
"""Upper limit of the bytes unpacked at a time, whatever the compression ratio."""

MAX_WINDOW_BYTES = 1 << 27
"""Largest window that a zstd file may request."""

MAX_TRACE_BYTES = 64 << 30
"""A trace that unpacks to more than this is refused."""

MAX_EXPANSION = 400
"""Profiler JSON compresses 10 to 40 times, deflate up to 1032. More than this, past FREE_BYTES, is a bomb."""

FREE_BYTES = 128 << 20
"""Up to this unpacked size, a file may expand by any factor."""

_SUFFIXES = (".json", ".json.gz", ".json.zst", ".sqlite", ".xplane.pb", "_kernel_trace.csv")
_MAX_DEPTH = 4
"""JAX writes LOGDIR/plugins/profile/TIME/HOST.xplane.pb."""
_QUEUED_BLOCKS = 4


def find_traces(path: Path) -> list[Path]:
    """The trace files at a path: the file itself, or the files in a folder of ranks, in natural order."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; give a profiler trace or a folder of traces")
    if not path.is_dir():
        raise InputError(f"{path}: neither a file nor a folder; give a profiler trace")
    for depth in range(_MAX_DEPTH):
        found = [p for p in path.glob("/".join(["*"] * (depth + 1))) if _looks_like_trace(p)]
        if found:
            return sorted(found, key=lambda p: natural_key(str(p)))
    raise InputError(f"{path}: this folder has no trace; expected files ending in {', '.join(_SUFFIXES)}")


@contextlib.contextmanager
def standard_input() -> Iterator[Path]:
    """Copies standard input to a file: readers read its start twice, and databases need a file."""
    if sys.stdin is None or sys.stdin.buffer.isatty():
        raise InputError("-: standard input is a terminal; pipe a trace into it")
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        path = Path(folder) / "standard-input"
        try:
            with path.open("xb") as file:
                while block := sys.stdin.buffer.read(BLOCK_BYTES):
                    if file.tell() > MAX_TRACE_BYTES:
                        raise InputError(f"-: more than {MAX_TRACE_BYTES} bytes on standard input")
                    file.write(block)
        except OSError as error:
            raise InputError(f"-: standard input cannot be kept: {error.strerror or error}") from None
        yield path


def _looks_like_trace(path: Path) -> bool:
    return path.name.endswith(_SUFFIXES) and not path.name.startswith(".") and path.is_file()


def shown(path: Path) -> str:
    """A path as printable text, even if its bytes are not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts rank2 before rank10."""
    parts = re.split(r"([0-9]+)", text)
    return tuple((1, int(p), "") if i % 2 else (0, 0, p) for i, p in enumerate(parts))


class Blocks:
    """The unpacked bytes of a file, block by block. A thread unpacks ahead: zlib and zstd release the GIL.

    After the last block `truncated` says why the data ended early, or is None if it did not.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_TRACE_BYTES, max_expansion: int = MAX_EXPANSION
    ) -> None:
        self.path = path
        self.truncated: str | None = None
        self._max_bytes = max_bytes
        self._max_expansion = max_expansion
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_QUEUED_BLOCKS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weft-unpack", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[bytes]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stops the thread, even if the data was not read to its end."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _work(self) -> None:
        try:
            for block in self._unpack():
                self._put(block)
            self._put(None)
        except _StoppedError:
            pass
        except OSError as error:
            self._put_last(InputError(f"{self.path}: cannot be read: {error.strerror or error}"))
        except BaseException as error:
            self._put_last(error)

    def _put(self, item: bytes | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
        raise _StoppedError

    def _put_last(self, error: BaseException) -> None:
        with contextlib.suppress(_StoppedError):
            self._put(error)

    def _unpack(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic[:2] == b"\x1f\x8b":
                yield from self._gzip(file)
            elif magic == b"\x28\xb5\x2f\xfd":
                yield from self._zstd(file)
            else:
                yield from iter(lambda: file.read(BLOCK_BYTES), b"")

    def _gzip(self, file: BinaryIO) -> Iterator[bytes]:
        """Unpacks all members of a gzip file in bounded blocks, large enough to run long without the GIL."""
        inflate, damaged = _inflate()
        unpacker = inflate(wbits=31)
        taken = given = 0
        while data := file.read(READ_BYTES):
            taken += len(data)
            while data:
                if unpacker.eof:
                    if not data.strip(b"\0"):
                        break  # padding after the last member, as tapes and block devices leave it
                    unpacker = inflate(wbits=31)
                try:
                    block = unpacker.decompress(data, BLOCK_BYTES)
                except damaged as error:
                    self.truncated = f"the gzip data is damaged after {given} bytes ({error})"
                    return
                data = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
                given += len(block)
                self._check(taken, given)
                yield block
        if not unpacker.eof:
            self.truncated = f"the gzip data ends early, after {given} bytes"

    def _zstd(self, file: BinaryIO) -> Iterator[bytes]:
        """Unpacks all frames of a zstd file. A truncated file is only noticed as truncated JSON."""
        import zstandard  # few traces need it

        given = 0
        unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        with unpacker.stream_reader(file, read_across_frames=True, closefd=False) as reader:
            while True:
                try:
                    block = reader.read(BLOCK_BYTES)
                except zstandard.ZstdError as error:
                    self.truncated = f"the zstd data is damaged after {given} bytes ({error})"
                    return
                if not block:
                    return
                given += len(block)
                self._check(file.tell(), given)
                yield block

    def _check(self, taken: int, given: int) -> None:
        if given > self._max_bytes:
            raise InputError(
                f"{self.path}: unpacks to more than {self._max_bytes} bytes, which is the limit; "
                "profile fewer steps, or split the trace"
            )
        if given > FREE_BYTES and given > self._max_expansion * taken:
            raise InputError(
                f"{self.path}: expands more than {self._max_expansion} times, which no profiler trace does "
                "(a decompression bomb?); if it is yours, unpack it and pass the .json"
            )


def _inflate() -> tuple[Callable[..., Any], type[Exception]]:
    """The fastest inflate that is installed: ISA-L, zlib-ng, or Python's own."""
    for package, module in (("isal", "isal_zlib"), ("zlib_ng", "zlib_ng")):
        try:
            found = importlib.import_module(f"{package}.{module}")
        except ImportError:
            continue
        return found.decompressobj, found.error
    return zlib.decompressobj, zlib.error


class _StoppedError(Exception):
    """The reader no longer wants data."""
