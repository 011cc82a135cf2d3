"""Reads many trace files at once.

The compiled scanner releases the GIL, so threads are enough; without it, helper processes read the files.

A helper takes zero-terminated paths on its standard input and answers with pickled results. Unlike
`multiprocessing` this neither forks a threaded program nor runs its main module again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Union

from weft.errors import InputError, WeftError
from weft.trace import native
from weft.trace.bulk import cores
from weft.trace.files import shown

if TYPE_CHECKING:
    from weft.trace.record import Trace

WORTH_BYTES = 4 << 20
"""With fewer bytes to read than this, starting helpers costs more than they save."""

MAX_HELPERS = 15

_SERVE = "from weft.trace.parallel import serve; serve()"

_Outcome = Union["list[Trace]", WeftError]
Done = Callable[[Path], None]
Progress = Callable[[str, int, int], None]
"""Called with the path, how many files are done, and how many there are."""


@contextlib.contextmanager
def helpers_for(files: list[Path], comm: str | None) -> Iterator[list[Helper]]:
    """Starts as many helpers as the work justifies. They load while the caller loads its own modules."""
    helpers = [Helper(comm) for _ in range(_helper_count(files))]
    try:
        yield helpers
    finally:
        for helper in helpers:
            helper.close()


def read_files(
    files: list[Path],
    comm: str | None,
    helpers: list[Helper],
    progress: Progress | None,
    names: Mapping[Path, str],
) -> list[_Outcome]:
    """Reads each file and reports it to `progress`. `names`: the user's names of files with another path."""
    read: list[Path] = []

    def done(file: Path) -> None:
        read.append(file)
        if progress:
            progress(names.get(file, str(file)), len(read), len(files))

    outcomes = read_all(files, comm, helpers, done)
    return [
        _renamed(outcome, file, names[file]) if file in names else outcome
        for file, outcome in zip(files, outcomes, strict=True)
    ]


def read_all(
    files: list[Path], comm: str | None, helpers: list[Helper], done: Done | None = None
) -> list[_Outcome]:
    """Reads each file, here and in the helpers. A file that fails has its error as outcome.

    `done` is called after each file.
    """
    outcomes: list[_Outcome] = [InputError(f"{file}: was not read") for file in files]
    left = iter(range(len(files)))
    lock = threading.Lock()

    def work(read: Callable[[Path], _Outcome]) -> None:
        while True:
            with lock:
                at = next(left, None)
            if at is None:
                return
            outcomes[at] = read(files[at])
            if done:
                done(files[at])

    own = min(len(files), cores()) if native.library() is not None else 1
    here = _reader(comm, max(cores() // own, 1))
    readers = [*(helper.read for helper in helpers), *[here] * (own - 1)]
    threads = [threading.Thread(target=work, args=(read,), daemon=True) for read in readers]
    for thread in threads:
        thread.start()
    work(here)
    for thread in threads:
        thread.join()
    return outcomes


def _helper_count(files: list[Path]) -> int:
    size = sum(file.stat().st_size for file in files if file.exists())
    if size < WORTH_BYTES:
        return 0
    if native.library() is not None:
        return 0  # its threads do the work
    return max(0, min(len(files), cores(), MAX_HELPERS + 1) - 1)


def _reader(comm: str | None, workers: int = 1) -> Callable[[Path], _Outcome]:
    from weft.trace import formats
    from weft.trace.custom import comm_matcher

    is_comm = comm_matcher(comm)

    def read(path: Path) -> _Outcome:
        try:
            return formats.read(path, is_comm, workers=workers)
        except WeftError as error:
            return error

    return read


class Helper:
    """A process that reads files for this one."""

    def __init__(self, comm: str | None) -> None:
        import subprocess

        source = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, *([] if comm is None else [comm])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )

    def read(self, path: Path) -> _Outcome:
        import pickle

        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(os.fsencode(path.absolute()) + b"\0")
            self._process.stdin.flush()
            outcome: _Outcome = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return InputError(f"{path}: the process that read it died; is there enough memory?")
        return _renamed(outcome, path, shown(path))

    def close(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(OSError):  # requests that were not sent
                    stream.close()
        self._process.wait()


def _renamed(outcome: _Outcome, path: Path, name: str) -> _Outcome:
    """The outcome under the user's name: a helper gets the absolute path, and `-` is a temporary file."""
    if isinstance(outcome, WeftError):
        return type(outcome)(str(outcome).replace(str(path.absolute()), name))
    return [replace(trace, path=name) for trace in outcome]


def _requests(stream: BinaryIO) -> Iterator[Path]:
    name = b""
    while byte := stream.read(1):
        if byte == b"\0":
            yield Path(os.fsdecode(name))
            name = b""
        else:
            name += byte


def serve() -> None:
    """The main loop of a helper: reads each requested file until standard input is closed."""
    import pickle

    read = _reader(sys.argv[1] if len(sys.argv) > 1 else None)
    for path in _requests(sys.stdin.buffer):
        pickle.dump(read(path), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
