"""Shared by the programs of this folder: their sizes, the times at which their steps end, and their turns.

STRANGER_TINY    sizes for a CPU
STRANGER_FOLDER  The program creates `stepping` there after a few steps, with its process id. It ends when
                 `stop` appears, and writes `times.json`: the times in seconds at which its steps ended, a
                 list per turn; and its memory use. A turn ends with the step in which `pause` appears, or
                 after the number of steps in `turn` when it began: the program waits until the device has
                 finished, stops its data loaders, and creates `paused`. The next turn begins when `pause` is
                 gone. `cores`: the cores of data loaders forked, and of threads started, from now on (the
                 next epoch's loader has a thread that copies its batches), or at the latest from the next
                 turn on; the program's own thread may have only one core.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STEPS = 20_000  # more than anybody waits for
FIRST_STEPS = 5
WAITING_S = 0.005  # between two checks of `pause`: the other process has the same cores
_folder = Path(os.environ.get("STRANGER_FOLDER", "."))
_stop, _pause = str(_folder / "stop"), str(_folder / "pause")
_turns: list[list[float]] = [[]]
_left = [STEPS * 1000]  # steps left in this turn


def pick(gpu: T, cpu: T) -> T:
    """A size for a GPU, or for a CPU."""
    return cpu if os.environ.get("STRANGER_TINY") else gpu


def stamp() -> None:
    """A step has ended, as far as the program can tell. No synchronization, except where a turn ends."""
    _turns[-1].append(time.perf_counter())
    if len(_turns) == 1:
        if len(_turns[0]) < FIRST_STEPS:
            return
        if len(_turns[0]) == FIRST_STEPS:
            _note_stepping()
    if os.path.exists(_stop):  # noqa: PTH110 (a third of the time, in every step)
        raise SystemExit(0)
    if len(_turns[-1]) > _left[0] or os.path.exists(_pause):  # noqa: PTH110
        _wait()


def _note_stepping() -> None:
    """Write which process is stepping; the file appears atomically."""
    written = _folder / "stepping.part"
    written.write_text(str(os.getpid()))
    written.rename(_folder / "stepping")


def _wait() -> None:
    """Wait while the other processes have their turns."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if len(_turns) > 1:
        _turns[-1][-1] = time.perf_counter()  # the turn's launches are counted until the device has finished
    _signal_loaders(signal.SIGSTOP)
    (_folder / "pause").touch()
    (_folder / "paused").touch()
    while (_folder / "pause").exists():
        time.sleep(WAITING_S)
    _signal_loaders(signal.SIGCONT)
    _spread_threads()
    if (_folder / "stop").exists():
        raise SystemExit(0)
    _left[0] = int((_folder / "turn").read_text())
    _turns.append([time.perf_counter()])


def _leave_core() -> None:
    """In a fork or a new thread: leave the single core of the thread that started it."""
    with suppress(OSError, ValueError):
        os.sched_setaffinity(0, json.loads((_folder / "cores").read_text()))


def _spread_threads() -> None:
    """Move threads that libraries have started since, such as NCCL's, off this thread's single core."""
    with suppress(OSError, ValueError):
        cores, own = json.loads((_folder / "cores").read_text()), os.sched_getaffinity(0)
        for task in os.listdir("/proc/self/task"):  # noqa: PTH208 (they may end meanwhile)
            thread = int(task)
            if thread != threading.get_native_id() and os.sched_getaffinity(thread) == own:
                os.sched_setaffinity(thread, cores)


def _signal_loaders(number: signal.Signals) -> None:
    for child in multiprocessing.active_children():
        if child.pid:
            with suppress(OSError):
                os.kill(child.pid, number)


def _memory() -> dict[str, float]:
    """The allocator's peak memory, and how often it called the driver, which may wait for the GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    found = torch.cuda.memory_stats()
    return {
        "reserved_gb": round(found.get("reserved_bytes.all.peak", 0) / 1e9, 2),
        "retries": found.get("num_alloc_retries", 0),
        "device_allocations": found.get("num_device_alloc", 0),
        "device_frees": found.get("num_device_free", 0),
    }


def _write() -> None:
    if os.environ.get("STRANGER_FOLDER") and os.environ.get("RANK", "0") == "0" and _turns[0]:
        (_folder / "times.json").write_text(json.dumps({"turns": _turns, "memory": _memory()}))


_run = threading.Thread.run


def _run_elsewhere(thread: threading.Thread) -> None:
    _leave_core()
    _run(thread)


atexit.register(_write)
os.register_at_fork(after_in_child=_leave_core)
threading.Thread.run = _run_elsewhere  # type: ignore[method-assign]
