"""Waits for new files in jobs' folders (inotify), so that short-lived files are opened in time."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("weft.monitor")

_IN_MOVED_TO, _IN_CREATE = 0x80, 0x100
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_BETWEEN_S = 0.005  # a folder that gets many files is read no more often than this


class FolderEvents:
    """Waits for new files in any of the watched folders. Without inotify, a wait lasts its full time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._number: int = self._libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        except AttributeError:
            self._number = -1
        if self._number < 0:
            _log.debug("no inotify: errno %d", ctypes.get_errno())

    def watch_folder(self, folder: Path) -> None:
        if self._number >= 0:
            done = self._libc.inotify_add_watch(
                self._number, os.fsencode(folder), ctypes.c_uint32(_IN_CREATE | _IN_MOVED_TO)
            )
            if done < 0:
                _log.debug("%s is not watched: errno %d", folder, ctypes.get_errno())

    def wait(self, seconds: float, also: Sequence[int] = ()) -> bool:
        """Wait for a new file, input on `also`, or until the time has passed. True if a file may be new."""
        numbers = [*also, *([self._number] if self._number >= 0 else [])]
        ready, _, _ = select.select(numbers, [], [], max(0.0, seconds))
        if self._number not in ready:
            return False
        time.sleep(min(_BETWEEN_S, max(0.0, seconds)))
        with suppress(BlockingIOError):  # the event is gone already: not input on `also`
            os.read(self._number, 1 << 16)
        return True

    def close(self) -> None:
        if self._number >= 0:
            os.close(self._number)
