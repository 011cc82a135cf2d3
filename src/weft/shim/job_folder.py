"""The folder of a job: created, protected from cleaners of temporary files, and removed, even after a crash.

Its owner holds a lock on the folder for as long as it lives. `systemd-tmpfiles` skips locked folders; older
cleaners go by age, so a long job touches its files. An unlocked folder belongs to a weft that was killed; the
next weft that starts removes it.

For `weft top` and `weft run --metrics`, `job.json` in the folder describes the job, and `outcome.json` holds
the final figures.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.files import open_regular

_log = logging.getLogger("weft.shim")

_PREFIX = "weft-job-"
_UNFINISHED = ".weft-job-"
_UNFINISHED_S = 3600.0
_SHARED_MEMORY = "/dev/shm"
_DESCRIPTION = "job.json"
OUTCOME = "outcome.json"
"""File name of the final figures; the file is empty until the job has ended."""


def create(control: bytes, description: dict[str, Any]) -> tuple[Path, int]:
    """Create a folder with this control file and description; returns the folder and its lock.

    The folder appears under its name only when it is complete. Raises OSError if no folder can be written.
    """
    problem: OSError | None = None
    for parent in _parents():
        _remove_leftovers(parent)
        try:
            return _create_in(parent, control, description)
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


def _create_in(parent: Path, control_image: bytes, description: dict[str, Any]) -> tuple[Path, int]:
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))  # not locked yet: this prefix protects it
    try:
        (made / "control").write_bytes(control_image)
        describe_job(made, description)
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        folder = made.with_name(_PREFIX + made.name.removeprefix(_UNFINISHED))
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return folder, lock


def in_memory(control_image: bytes) -> tuple[Path, int]:
    """A control file in memory, outside any file system, and its descriptor; there is no folder for counters.

    A file size limit (ulimit -f) also applies to memory files: if it cuts the file, the shim has no policy.
    """
    number = os.memfd_create("weft-control", os.MFD_CLOEXEC)
    with suppress(OSError):
        os.write(number, control_image)
    return Path(f"/proc/{os.getpid()}/fd/{number}"), number


def control(folder: Path) -> Path:
    """The control file of a job."""
    return folder / "control" if folder.is_dir() else folder


def describe_job(folder: Path, description: dict[str, Any]) -> None:
    """Write the job's description to its folder; if the disk is full, the job runs without one."""
    if not folder.is_dir():
        return
    try:
        (folder / _DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
        (folder / OUTCOME).touch()
    except OSError as error:
        _log.debug("no description of the job in %s: %s", folder, error)


def leave_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    """Write the job's final figures in place, for readers that keep the file open after the job ends."""
    try:
        with (folder / OUTCOME).open("r+", encoding="utf-8") as file:
            file.write(json.dumps(outcome))
    except OSError as error:
        _log.debug("no outcome of the job in %s: %s", folder, error)


def description(folder: Path) -> dict[str, Any]:
    """The description that `describe_job` wrote; empty if it cannot be read."""
    return read_object(folder / _DESCRIPTION)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a job's folder; empty if there is none or it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return parse_object(file.read())
    except OSError as error:
        _log.debug("%s cannot be read: %s", path, error)
        return {}


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; empty if it is not one."""
    try:
        found = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        _log.debug("not JSON: %s", error)
        return {}
    return found if isinstance(found, dict) else {}


def job_folders() -> Iterator[Path]:
    """Every job folder on this machine, of any user, whether in use or not."""
    for parent in _parents():
        try:
            names = sorted(entry.name for entry in os.scandir(parent) if entry.name.startswith(_PREFIX))
        except OSError as error:
            _log.debug("cannot look for jobs in %s: %s", parent, error)
            continue
        yield from (parent / name for name in names)


def in_use(folder: Path) -> bool:
    """Whether the weft that created this folder still runs, and therefore holds the folder's lock."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        _log.debug("no lock on %s: %s", folder, error)
        return True
    finally:
        os.close(number)
    return False


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
    """Remove this user's folders that no running weft has locked."""
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
