"""A program in its own process, without weft or under `weft run --tune`, that alternately runs and waits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs import BASELINE_CTAS, RANKS, ROOT

from strangers.catalog import HERE, Program

STEPS = 10**9  # more than any turn has
WAYS = ("without", "again", "tune")
"""Two processes without weft show how much equal processes differ."""
SHIM = "shim"  # an optional way: under `weft run`, with nothing to do
TOLD = (
    "state",
    "text",
    "gain_pct",
    "ci",
    "default_ms",
    "best_ms",
    "noise_pct",
    "steps",
    "warm_up_steps",
    "cost_ms",
)
TOLD += ("policy", "candidates", "watch")


class EndedError(Exception):
    """The process has ended, or its time is over."""


@dataclass
class Process:
    """A process that has imported what it needs and waits for its turn (see stopwatch.py, watched.py)."""

    program: Program
    way: str
    folder: Path
    popen: subprocess.Popen[bytes]
    problem: str = ""
    log: str = ""
    tuning: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    def ready(self) -> bool:
        """Whether it has imported what it needs, or has ended."""
        return (self.folder / "ready").exists() or self.ended()

    def begin(self) -> None:
        """Start its first turn, which ends after a few steps."""
        pin(self.popen.pid, running_cores())
        (self.folder / "pause").touch()
        (self.folder / "gate").touch()

    def wait(self, until: float, condition: Callable[[], bool]) -> None:
        """Wait until this process meets a condition."""
        while not condition():
            if self.popen.poll() is not None:
                raise EndedError(f"{self.way}: exit {self.popen.returncode}")
            if time.monotonic() > until:
                raise EndedError(f"{self.way}: killed at its deadline")
            time.sleep(0.005)

    def made_first_steps(self, until: float) -> None:
        """Wait for the end of its first turn."""
        self.wait(until, (self.folder / "paused").exists)

    def hold(self) -> None:
        """Pin each thread that launches kernels to one core, the same in all processes of a run."""
        rank = int((self.folder / "stepping").read_text())
        cores = sorted(running_cores())
        if len(cores) < 8:
            return
        main, backward, others = {cores[0]}, {cores[1]}, set(cores[2:])
        (self.folder / "cores").write_text(json.dumps(sorted(others)))
        for thread, name in threads(self.popen.pid):
            pin_thread(thread, main if thread == rank else backward if name == "pt_autograd_0" else others)

    def tuned(self) -> bool:
        """Whether no search is running."""
        return "tuning is over" in self._log()

    def still_open(self) -> bool:
        """Whether a proof may still be open: a policy was best, but its gain is not proven."""
        return "is not proven" in self._log() and "proven in further steps" not in self._log()

    def changed(self) -> bool:
        """Whether the search has found a policy."""
        return "less time per step" in self._log()

    def go_on(self) -> None:
        """Start its next turn, which ends with `pause`."""
        self._begin_turn(STEPS)

    def pause(self, until: float) -> None:
        """End its turn."""
        (self.folder / "pause").touch()
        self.wait(until, (self.folder / "paused").exists)

    def turn(self, steps: int, until: float) -> float:
        """Run `steps` steps; returns the seconds that they took."""
        self._begin_turn(steps)
        began = time.monotonic()
        self.wait(until, (self.folder / "paused").exists)
        return time.monotonic() - began

    def _begin_turn(self, steps: int) -> None:
        (self.folder / "turn").write_text(str(steps))
        (self.folder / "paused").unlink()
        (self.folder / "pause").unlink()

    def stop(self) -> None:
        """Ask it to end by itself, like a program that is done."""
        (self.folder / "stop").touch()
        (self.folder / "pause").unlink(missing_ok=True)

    def ended(self) -> bool:
        return self.popen.poll() is not None

    def close(self) -> list[list[float]]:
        """Kill what is left of it. Returns the times at which its steps ended, by turn."""
        code = self.popen.poll()
        self.problem = "" if code == 0 else "killed" if code is None else f"exit {code}"
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for process in family(self.popen.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        self.popen.wait()
        self.log = self._log()
        times, stats = self.folder / "times.json", self.folder / "stats.json"
        found = json.loads(times.read_text()) if times.exists() else {"turns": [], "memory": {}}
        self.memory = found["memory"]
        if stats.exists():
            tuning = json.loads(stats.read_text()).get("tuning") or {}
            self.tuning = {name: tuning.get(name) for name in TOLD}
        shutil.rmtree(self.folder, ignore_errors=True)
        turns: list[list[float]] = found["turns"]
        return turns

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def start(program: Program, way: str, public: Path, tiny: bool, node: str | None) -> Process:
    """Start a process as one of two ranks or as rank 0 of a node; it waits at its gate."""
    folder = Path(tempfile.mkdtemp(prefix="weft-strangers-"))
    ranks = ["--ranks", str(RANKS)] if node is None else ["--node", node]
    command = [sys.executable, "-m", "weft.comm.ghost", *ranks, str(HERE / "watched.py")]
    command += program.arguments(public, tiny)
    if way in ("tune", SHIM):
        options = ["--tune", "--stats", str(folder / "stats.json")] if way == "tune" else []
        command = [sys.executable, "-m", "weft", "run", *options, "--", *command]
    with (folder / "log").open("w") as log:
        popen = subprocess.Popen(
            command,
            env=environment(program, folder, public, tiny, node),
            cwd=program.root(public),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    pin(popen.pid, waiting_cores())
    return Process(program, way, folder, popen)


def environment(program: Program, folder: Path, public: Path, tiny: bool, node: str | None) -> dict[str, str]:
    """The baseline's CTAs (on a node NCCL's own number), no memory of earlier tuning."""
    paths = (str(ROOT / "src"), str(HERE), str(public / "stubs"), os.environ.get("PYTHONPATH"))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **({"WEFT_GHOST_CTAS": str(BASELINE_CTAS)} if node is None else {}),
        "WEFT_STORE": str(folder / "store.sqlite"),
        "STRANGER_FOLDER": str(folder),
        "STRANGER_STEP": program.step,
        "STRANGER_IMPORTS": ",".join(program.imports),
        "OMP_NUM_THREADS": "1",  # as torchrun sets it
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**env, "STRANGER_TINY": "1"} if tiny else env


# --- cores -------------------------------------------------------------------------------------------------


def waiting_cores() -> set[int]:
    """A quarter of the cores, for processes that are getting ready."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[len(cores) * 3 // 4 :])


def running_cores() -> set[int]:
    """The other cores, for the processes that are measured; all of them where there are few."""
    cores = os.sched_getaffinity(0)
    return cores - waiting_cores() if len(cores) >= 8 else cores


def pin(root: int, cores: set[int]) -> None:
    """Move a process, its children and all their threads to some cores."""
    for thread, _ in threads(root):
        pin_thread(thread, cores)


def pin_thread(thread: int, cores: set[int]) -> None:
    """Move a thread to some cores, if it still exists."""
    with suppress(OSError):
        os.sched_setaffinity(thread, cores)


def threads(root: int) -> list[tuple[int, str]]:
    """Id and name of each thread of a session leader and of all its descendants."""
    found = []
    for process in family(root):
        with suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):
                    found.append((int(thread.name), (thread / "comm").read_text().strip()))
    return found


def family(root: int) -> list[int]:
    """A session leader and all its descendants."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = []
    for number in numbers:
        with suppress(OSError):
            if os.getsid(number) == root:
                found.append(number)
    return found
