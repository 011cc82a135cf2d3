"""Writes files: a regular file is replaced atomically; a device or a pipe is written to."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from weft.errors import OutputError

# Errors after which a file may still be writable although it cannot be replaced: it lies in another user's
# folder, is a mount point, or there is no space for a second copy.
_IRREPLACEABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EBUSY,
    errno.EROFS,
    errno.EXDEV,
    errno.ENOSPC,
    errno.EDQUOT,
)
_DESCRIPTOR = re.compile(r"/proc/(self|thread-self|\d+)(?:/task/\d+)?/fd/(\d+)")
_MOST_LINKS = 40


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file so that no reader ever sees half of it; a failure leaves the old content.

    A symbolic link stays a link: its target is replaced. A device, a pipe, a socket or an open descriptor
    (`/dev/stdout`) is written to, never replaced. A file that is writable but cannot be replaced is
    overwritten in place, not atomically. Text is written as UTF-8; characters that cannot be encoded become
    question marks. Raises OutputError.
    """
    content = data.encode("utf-8", "replace") if isinstance(data, str) else data
    try:
        _write(path, content)
    except OSError as error:
        raise OutputError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from None


def why_not_writable(path: str | os.PathLike[str]) -> str:
    """Why `write_whole` cannot write this path; empty if it can. Writes nothing."""
    target = _behind_links(path)
    if _descriptor(target) is not None:
        return ""
    if target.is_dir():
        return "it is a folder; name a file"
    if target.exists() and os.access(target, os.W_OK):
        return ""
    if not target.parent.is_dir():
        return f"there is no folder {target.parent}; create it, or name another"
    if target.exists() and not target.is_file():
        return os.strerror(errno.EACCES)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        return f"the folder {target.parent} is not writable; name another"
    return ""


def open_regular(path: str | os.PathLike[str]) -> int:
    """Opens a regular file for reading; refuses a pipe (which would block), a symbolic link and a folder.

    Returns the descriptor. Raises OSError.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return number


def _write(path: str | os.PathLike[str], content: bytes) -> None:
    target = _behind_links(path)
    number = _descriptor(target)
    if number is not None:
        _write_all(number, content)  # at the descriptor's own position: nothing written before is lost
        return
    mode = _mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        _write_through(target, content)
        return
    try:
        _replace(target, content, mode)
    except OSError as error:
        if mode is None or error.errno not in _IRREPLACEABLE:
            raise
        _write_through(target, content)


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    partial = (
        target.parent / f".weft-{os.getpid()}-{secrets.token_hex(4)}"
    )  # short, because a longer name might exceed the limit
    try:
        with partial.open("xb") as file:
            file.write(content)
            if mode is not None:
                with suppress(OSError):
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _write_through(target: Path, content: bytes) -> None:
    number = os.open(target, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        regular = stat.S_ISREG(os.fstat(number).st_mode)
        _write_all(number, content)
        if regular:
            os.ftruncate(number, len(content))
    finally:
        os.close(number)


def _write_all(number: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(number, rest) :]


def _mode(target: Path) -> int | None:
    try:
        return target.stat().st_mode
    except FileNotFoundError:
        return None


def _behind_links(path: str | os.PathLike[str]) -> Path:
    """The file at the end of a chain of symbolic links; an entry of /proc/PID/fd is not followed."""
    target = Path(path)
    for _ in range(_MOST_LINKS):
        if target.name and target.parent != target:
            target = Path(os.path.realpath(target.parent), target.name)
        if _DESCRIPTOR.fullmatch(str(target)) or not target.is_symlink():
            return target
        target = target.parent / target.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _descriptor(target: Path) -> int | None:
    """The descriptor of this process that the path names; None if it names none."""
    match = _DESCRIPTOR.fullmatch(str(target))
    if match is None or match[1] not in ("self", "thread-self", str(os.getpid())):
        return None
    return int(match[2])
