"""What the programs of this folder share: their size, and the times at which their steps end.

STRANGER_TINY    sizes for a CPU
STRANGER_FOLDER  `stepping` appears there after a few steps, or after as many as the file `first_steps` there says;
                 the program ends when `stop` appears, and leaves the times of its steps, in seconds, in
                 `times.json`
"""

from __future__ import annotations

import atexit
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STEPS = 20_000  # more than anybody waits for
FIRST_STEPS = 5
_folder = Path(os.environ.get("STRANGER_FOLDER", "."))
_times: list[float] = []
_first = [FIRST_STEPS]


def pick(gpu: T, cpu: T) -> T:
    """A size for a GPU, or for a CPU."""
    return cpu if os.environ.get("STRANGER_TINY") else gpu


def stamp() -> None:
    """A step has ended, as far as the program can tell. No synchronization."""
    _times.append(time.perf_counter())
    if len(_times) == 1:
        with suppress(OSError, ValueError):
            _first[0] = int((_folder / "first_steps").read_text())
    if len(_times) == _first[0]:
        (_folder / "stepping").touch()
    if (_folder / "stop").exists():
        raise SystemExit(0)


def _write() -> None:
    if os.environ.get("STRANGER_FOLDER") and os.environ.get("RANK", "0") == "0" and _times:
        (_folder / "times.json").write_text(json.dumps(_times))


atexit.register(_write)
