"""`weft top` in a real terminal: what a person sees, a window that changes its size, and how it ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from test_nccl_routes import fake_nccl  # noqa: F401 (a fixture)
from test_top import BUSY, MANY, Running, start, until  # noqa: F401 (a fixture)

pyte = pytest.importorskip("pyte")


class Terminal:
    """`weft top` in a pseudo-terminal, as a screen of characters."""

    def __init__(self, job: Running, *words: str, size: tuple[int, int] = (100, 30)) -> None:
        self.master, slave = pty.openpty()
        self.screen = pyte.Screen(*size)
        self.stream, self.raw = pyte.ByteStream(self.screen), b""
        self._set_size(slave, *size)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weft", "top", *words],
            env={**job.env, "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )

    def _set_size(self, number: int, columns: int, lines: int) -> None:
        fcntl.ioctl(number, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self._set_size(self.slave, columns, lines)
        self.screen.resize(lines, columns)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read(self) -> None:
        while select.select([self.master], [], [], 0.05)[0]:
            data = os.read(self.master, 1 << 16)
            self.raw += data
            self.stream.feed(data)

    @property
    def text(self) -> str:
        self.read()
        return "\n".join(line.rstrip() for line in self.screen.display)

    def shows(self, what: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while what not in self.text:
            assert time.monotonic() < end, f"{what!r} is not on the screen:\n{self.text}"

    def ends(self) -> int:
        end = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            self.read()
        self.read()
        error = self.process.stderr.read().decode()
        assert "Traceback" not in error, error
        return self.process.wait(5)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    opened: list[Terminal] = []

    def open_terminal(*arguments, **options) -> Terminal:
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_a_person_sees_the_job_and_leaves_with_q(start, terminal):  # noqa: F811
    job = start(BUSY, "--priority", "high")
    top = terminal(job, job.name)
    top.shows("collectives/s")
    top.shows("policy priority")
    first, title, *_ = top.text.splitlines()
    assert first.startswith("weft top  1 job")
    assert first.endswith("arrows scroll")
    assert re.match(rf"{job.name}  running \d+:\d\d:\d\d", title)
    assert "\x1b[?1049h" in top.raw.decode()
    top.press(b"q")
    assert top.ends() == 0
    assert top.raw.decode().rstrip().endswith("\x1b[?1049l")  # the screen that was there before is back
    assert termios.tcgetattr(top.slave) == top.before
    job.stop()


@pytest.mark.parametrize("size", [(40, 10), (200, 60), (20, 4), (8, 2)])
def test_a_window_of_another_size_is_filled_and_not_overfilled(start, terminal, size):  # noqa: F811
    job = start()
    top = terminal(job, job.name)
    top.shows("launches/s")
    top.raw = b""
    top.resize(*size)
    expected = ["weft top"[: size[0]], job.name[: size[0]]][: 2 if size[1] > 3 else 1]

    def fits() -> bool:
        """After a whole frame nothing has scrolled; one that was begun before the new size may have."""
        shown = top.text.splitlines()
        return top.raw.endswith(b"\x1b[J") and all(map(str.startswith, shown, expected))

    until(fits)
    top.press(b"\x03")
    assert top.ends() == 0
    assert termios.tcgetattr(top.slave) == top.before
    job.stop()


def test_the_last_figures_stay_on_the_screen_when_the_job_dies(start, terminal):  # noqa: F811
    job = start()
    top = terminal(job, job.name)
    top.shows("launches/s")
    job.process.send_signal(signal.SIGKILL)
    assert top.ends() == 0
    assert "killed" in top.text
    assert termios.tcgetattr(top.slave) == top.before


def test_all_jobs_are_watched_until_the_user_leaves(start, terminal):  # noqa: F811
    job = start()
    top = terminal(job, size=(100, 300))  # jobs of other tests may be running
    top.shows(job.name)
    job.stop()
    top.shows("ended")
    top.press(b"q")
    assert top.ends() == 0


def test_64_ranks_fit_by_scrolling(start, terminal):  # noqa: F811
    job = start(MANY)
    until(lambda: len(list(job.folder.glob("ready.*"))) == 64, 60)
    top = terminal(job, job.name, size=(100, 24))
    top.shows("of 65")
    assert " 63 " not in top.text
    top.press(b"\x1b[6~" * 7)
    top.shows(" 63 ")
    assert top.text.splitlines()[0].startswith("weft top")
    top.process.terminate()
    assert top.ends() == 0
    job.stop()


def test_ctrl_z_gives_the_terminal_back_and_a_continued_top_draws_again(start, terminal):  # noqa: F811
    job = start()
    top = terminal(job, job.name)
    top.shows("launches/s")
    top.press(b"\x1a")
    stat = Path(f"/proc/{top.process.pid}/stat")
    until(lambda: top.read() or stat.read_text().rpartition(")")[2].split()[0] == "T")
    top.read()  # output between the last read and the stop
    assert termios.tcgetattr(top.slave) == top.before
    assert top.raw.decode().rstrip().endswith("\x1b[?1049l")
    top.raw = b""
    top.process.send_signal(signal.SIGCONT)
    top.shows("launches/s")
    assert "\x1b[?1049h" in top.raw.decode()
    top.press(b"q")
    assert top.ends() == 0
    job.stop()
