"""Setup for all tests."""

from __future__ import annotations

import signal
import socket

import pytest

# A shell starts background jobs with these signals ignored, and the programs of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGQUIT") and signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let pytest-rerunfailures report each test to its main process at once.

    Otherwise the second of two short messages waits up to 40 ms for the acknowledgement of the first.
    """
    told = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if told is not None:
        told.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
