"""Which `weft run` a stored mark belongs to, and whether that process still runs."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

ELSEWHERE_S = 7 * 86400.0
"""How long a process of another machine, which cannot be asked, is taken to run."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_launcher() -> str:
    """This process, as a text without further meaning."""
    pid = os.getpid()
    return f"{_host()} {_boot()} {pid} {start_time(pid)} {time.time():.0f}"


def still_runs(launcher: str) -> bool:
    """Whether that process has not ended. A mark that cannot be read is of one that has."""
    try:
        host, boot, pid, start, since = launcher.split()
        if host != _host():
            return time.time() - float(since) < ELSEWHERE_S
        return boot == _boot() and start_time(int(pid)) == start
    except ValueError:
        return False


def start_time(pid: int) -> str:
    """When a process started, in ticks: with its number, this identifies it. Empty: it has ended."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def _host() -> str:
    return "-".join(socket.gethostname().split()) or "unnamed"


def _boot() -> str:
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return "unknown"
