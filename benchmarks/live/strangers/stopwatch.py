"""What the programs of this folder share: their size, and the times at which their steps end.

STRANGER_STEPS  how many steps; STRANGER_TINY: sizes for a CPU; STRANGER_TIMES: the file for the times, in s
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STEPS = int(os.environ.get("STRANGER_STEPS", "200"))
_times: list[float] = []


def pick(gpu: T, cpu: T) -> T:
    """A size for a GPU, or for a CPU."""
    return cpu if os.environ.get("STRANGER_TINY") else gpu


def stamp() -> None:
    """A step has ended, as far as the program can tell. No synchronization."""
    _times.append(time.perf_counter())


def count() -> int:
    """How many steps have ended."""
    return len(_times)


def _write() -> None:
    path = os.environ.get("STRANGER_TIMES")
    if path and os.environ.get("RANK", "0") == "0" and _times:
        Path(path).write_text(json.dumps(_times))


atexit.register(_write)
