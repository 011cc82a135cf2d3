"""The status line of a long command, shown only on a terminal."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from weft.cli.status_line import status_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Immediate(threading.Timer):
    """A timer that fires at once, on the thread that starts it."""

    def start(self) -> None:
        self.function()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(threading, "Timer", Immediate)
    monkeypatch.setenv("TERM", "xterm")


def shown(monkeypatch, stderr, *, quiet=False):
    monkeypatch.setattr(sys, "stderr", stderr)
    with status_line("begun", quiet=quiet) as update:
        update("half done")
    return stderr.getvalue()


def test_a_terminal_shows_the_latest_text(monkeypatch):
    assert "half done" in shown(monkeypatch, Terminal())


@pytest.mark.parametrize(("stderr", "quiet"), [(Terminal(), True), (io.StringIO(), False)])
def test_nothing_is_shown_without_a_terminal_or_if_it_is_not_wanted(monkeypatch, stderr, quiet):
    assert shown(monkeypatch, stderr, quiet=quiet) == ""


def test_a_closed_stderr_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with status_line("begun") as update:
        update("half done")
