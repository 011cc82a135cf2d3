"""The terminal of `weft top`: the alternate screen, keys, and a size that may change at any time."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.monitor.jobs import RunningJob

REFRESH_S = 1.0
_SHARE = 0.01
"""Share of a core that refreshes may use: after a more expensive refresh, the next one comes later."""
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_SCROLL = {b"\x1b[A": -1, b"k": -1, b"\x1b[B": 1, b"j": 1, b"\x1b[5~": -10, b"\x1b[6~": 10}


def show_top(only: RunningJob | None, samples: int | None) -> None:
    """Draw until the user quits or the job ends; without a terminal, print one frame as plain text."""
    from weft.monitor.watch_jobs import JobsWatch
    from weft.report.top import Screen, top_frame

    watch = JobsWatch(only)
    try:
        if sys.stdout is None or not sys.stdout.isatty():
            watch.sample()
            watch.wait(REFRESH_S)  # rates need two samples
            print("\n".join(top_frame(watch.sample(), Screen(100, 10_000))))
            return
        with _terminal() as (woken, suspend_if_asked):
            last = _draw_until_quit(watch, samples, woken, suspend_if_asked)
        if watch.over:
            size = os.get_terminal_size(sys.stdout.fileno())
            print("\n".join(top_frame(last, Screen(size.columns, 10_000, _coloured()))))
    except KeyboardInterrupt:
        return
    finally:
        watch.close()


def _draw_until_quit(
    watch: Any, samples: int | None, woken: int, suspend_if_asked: Callable[[], None]
) -> Any:
    from weft.report.top import LINES_OF_A_JOB, Screen, top_frame

    offset, drawn, keys = 0, 0, _keyboard()
    sample, due = None, time.monotonic()
    while True:
        started = time.process_time()
        if sample is None or time.monotonic() >= due:
            sample = watch.sample()
            drawn += 1
            due = time.monotonic() + REFRESH_S
        size = os.get_terminal_size(sys.stdout.fileno())
        screen = Screen(max(1, size.columns), max(1, size.lines), _coloured(), offset)
        _write(top_frame(sample, screen))
        if watch.over or drawn == samples:
            return sample
        cost_s = time.process_time() - started
        due = max(due, time.monotonic() + min(10.0, cost_s / _SHARE))
        if watch.wait(due - time.monotonic(), [woken, *([keys] if keys is not None else [])]):
            pressed = _pressed(woken, keys)
            suspend_if_asked()
            if b"q" in pressed or b"\x03" in pressed:
                return sample
            ranks = max((len(job.ranks) for job in sample.jobs), default=0)
            most = max(ranks, LINES_OF_A_JOB * len(sample.jobs))
            offset = max(0, min(most, offset + sum(_SCROLL.get(key, 0) for key in pressed)))


def _write(lines: list[str]) -> None:
    body = f"{_CLEAR_LINE}\r\n".join(lines)
    sys.stdout.write(f"{_HOME}{body}{_CLEAR_LINE}{_CLEAR_BELOW}")
    sys.stdout.flush()


def _coloured() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _pressed(woken: int, keys: int | None) -> list[bytes]:
    """Keys pressed since the last call. A resize ends the wait, but is no key."""
    with suppress(BlockingIOError):
        os.read(woken, 4096)
    if keys is None or not select.select([keys], [], [], 0)[0]:
        return []
    data, found = os.read(keys, 4096), []
    if not data:
        return [b"q"]  # the terminal is gone
    while data:
        key = next((name for name in _SCROLL if data.startswith(name)), data[:1])
        found.append(key)
        data = data[len(key) :]
    return found


def _keyboard() -> int | None:
    """The descriptor that keys are read from; None where standard input is closed or no terminal."""
    return sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None


@contextmanager
def _terminal() -> Iterator[tuple[int, Callable[[], None]]]:
    """Switches to the alternate screen and to reading single keys.

    Yields a descriptor that becomes readable when the size changes or Ctrl-Z is pressed, and a function to
    call then.
    """
    reader, writer = os.pipe()
    for number in (reader, writer):
        os.set_blocking(number, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    keys = _keyboard()
    before = termios.tcgetattr(keys) if keys is not None else None

    def enter() -> None:
        if keys is not None:
            tty.setcbreak(keys)
        sys.stdout.write(_ENTER)

    def leave() -> None:
        with suppress(OSError):
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
        if keys is not None and before is not None:
            with suppress(termios.error):
                termios.tcsetattr(keys, termios.TCSADRAIN, before)

    def suspend() -> None:
        """After Ctrl-Z: gives the terminal back to the shell, until `fg` restores the screen."""
        if asked:
            asked.clear()
            leave()
            os.kill(os.getpid(), signal.SIGSTOP)
            enter()

    def ask(number: int, frame: Any) -> None:
        asked.append(number)  # only noted: the signal may arrive in the middle of a write to the terminal

    asked: list[int] = []
    handlers = {signal.SIGWINCH: _awake, signal.SIGTERM: _interrupt, signal.SIGTSTP: ask}
    handled = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        enter()
        yield reader, suspend
    finally:
        leave()
        for number, handler in handled.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(reader)
        os.close(writer)


def _awake(number: int, frame: Any) -> None:
    """Does nothing itself: Python writes the signal to the wake-up pipe, which ends the wait for a redraw."""


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
