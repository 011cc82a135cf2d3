"""What holds for all tests."""

from __future__ import annotations

import signal
import socket

import pytest

# A shell starts what runs in the background with these ignored, and every program of a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGQUIT") and signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let pytest-rerunfailures tell its main process of each test at once.

    Otherwise the second of two short messages waits for the acknowledgement of the first, up to 40 ms at each test.
    """
    told = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if told is not None:
        told.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
