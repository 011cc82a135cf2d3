"""Marks that identify a `weft run` process in the store, and whether that process still runs."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

ELSEWHERE_S = 7 * 86400.0
"""How long a process on another host, which cannot be checked, is assumed to run."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_launcher() -> str:
    """A mark that identifies this process; treat it as opaque."""
    pid = os.getpid()
    return f"{_host()} {_boot()} {pid} {start_time(pid)} {time.time():.0f}"


def still_runs(launcher: str) -> bool:
    """Whether the marked process still runs. An unreadable mark counts as ended."""
    try:
        host, boot, pid, start, since = launcher.split()
        if host != _host():
            return time.time() - float(since) < ELSEWHERE_S
        return boot == _boot() and start_time(int(pid)) == start
    except ValueError:
        return False


def start_time(pid: int) -> str:
    """When a process started, in clock ticks; with the pid, this identifies it. Empty if it has ended."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def _host() -> str:
    return "-".join(socket.gethostname().split()) or "unnamed"


def _boot() -> str:
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return "unknown"
