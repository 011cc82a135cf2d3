"""The folder of a job: made, kept from cleaners, and removed, also after a weft that was killed.

Its owner holds a lock on the folder for as long as it lives. `systemd-tmpfiles` skips locked folders; older
cleaners go by age, so a long job touches its files. A folder without a lock belongs to a weft that was
killed: the next start removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("weft.shim")

_PREFIX = "weft-job-"
_UNFINISHED = ".weft-job-"
_UNFINISHED_S = 3600.0
_SHARED_MEMORY = "/dev/shm"


def create(control: bytes) -> tuple[Path, int]:
    """A new folder with this control file, and its lock. Raises OSError where no folder can be written."""
    problem: OSError | None = None
    for parent in _parents():
        _remove_leftovers(parent)
        try:
            return _create_in(parent, control)
        except OSError as error:
            problem = problem or error
            _log.debug("no job folder in %s: %s", parent, error)
    raise problem or FileNotFoundError(2, "no temporary folder")


def _parents() -> Iterator[Path]:
    seen = set()
    for name in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", _SHARED_MEMORY):
        folder = Path(name or "/tmp").absolute()
        if folder not in seen and folder.is_dir():
            seen.add(folder)
            yield folder


def _create_in(parent: Path, control_image: bytes) -> tuple[Path, int]:
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))  # no leftover yet: a name of its own
    try:
        (made / "control").write_bytes(control_image)
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        folder = made.with_name(_PREFIX + made.name.removeprefix(_UNFINISHED))
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return folder, lock


def in_memory(control_image: bytes) -> tuple[Path, int]:
    """A control file that is in no file system, and its descriptor; there is no folder for counters."""
    number = os.memfd_create("weft-control", os.MFD_CLOEXEC)
    os.write(number, control_image)
    return Path(f"/proc/{os.getpid()}/fd/{number}"), number


def control(folder: Path) -> Path:
    """The control file of a job."""
    return folder / "control" if folder.is_dir() else folder


def touch(folder: Path) -> None:
    """Make everything in the folder look recent."""
    if not folder.is_dir():
        return
    for path in (folder, *folder.iterdir()):
        with suppress(OSError):
            os.utime(path)


def remove(folder: Path, lock: int) -> None:
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    if lock >= 0:
        os.close(lock)


def _remove_leftovers(parent: Path) -> None:
    """Folders of this user that no living weft holds."""
    try:
        found = list(os.scandir(parent))
    except OSError as error:
        _log.debug("cannot look for leftovers in %s: %s", parent, error)
        return
    for entry in found:
        if entry.name.startswith((_PREFIX, _UNFINISHED)):
            with suppress(OSError):
                _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    facts = entry.stat(follow_symlinks=False)
    if facts.st_uid != os.getuid() or not entry.is_dir(follow_symlinks=False):
        return
    if entry.name.startswith(_UNFINISHED) and time.time() - facts.st_mtime < _UNFINISHED_S:
        return
    lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _log.debug("removing %s, left by a weft that was killed", entry.path)
        shutil.rmtree(entry.path, ignore_errors=True)
    except BlockingIOError:
        return  # in use
    finally:
        os.close(lock)
