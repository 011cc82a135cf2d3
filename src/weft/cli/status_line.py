"""An animated status line on stderr while a command works."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

_QUIET_S = 2.0
"""The line is shown only if the work takes longer than this."""


@contextmanager
def status_line(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show `text` once the work has taken _QUIET_S seconds; yields a function that replaces the text.

    Nothing is shown if `quiet`, or if stderr is not a terminal.
    """
    latest = text
    shown: list[Status] = []

    def start() -> None:
        from rich.console import Console

        shown.append(Console(stderr=True).status(latest))
        shown[0].start()

    def update(now: str) -> None:
        nonlocal latest
        latest = now
        for status in shown:
            status.update(now)

    timer = threading.Timer(_QUIET_S, start)
    timer.daemon = True
    if not quiet and sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield update
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        for status in shown:
            status.stop()
