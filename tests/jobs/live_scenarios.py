"""The jobs that the tests of live tuning ask for, and what they leave behind. `live_zoo` plays them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weft

HERE = Path(__file__).parent
HOME = str(Path(weft.__file__).parent.parent)
EFFECTS = {
    "ctas6": 1.8,
    "ctas16": 0.5,
    "ctas24": 0.8,
    "ctas32": 0.9,
    "head5": 1.1,
    "priority": 1.1,
    "res3": 1.2,
    "res2": 1.25,
}
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("WEFT", "TORCH", "PYTHONPATH"))
}
PATIENT = {"WEFT_TUNE_STALL_S": "60", "WEFT_TUNE_DEADLINE_S": "60"}
"""Step times are simulated, so a process that gets no CPU for seconds is neither a stall nor a lost rank."""
BASE = {
    "EFFECTS": json.dumps(EFFECTS),
    "WEFT_TUNE": "1",
    "WEFT_TUNE_CONTROLS": "live_job:FakeControls",
    **PATIENT,
}


@dataclass
class Played:
    """What one job left behind."""

    folder: Path

    @property
    def codes(self) -> list[int]:
        return json.loads((self.folder / "codes.json").read_text())

    @property
    def ranks(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def tuning(self, rank: int = 0) -> dict:
        return json.loads((self.folder / f"tuning.{rank}.json").read_text())

    def error(self, rank: int = 0) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def in_step(self) -> list[str]:
        """The policy of each step, which must be the same on all ranks."""
        first, *others = (rank["policies"] for rank in self.ranks)
        assert all(other == first for other in others)
        return first

    def ends_with(self) -> str:
        """The policy of the last steps, ignoring single steps of the watch."""
        return Counter(self.in_step()[-9:]).most_common(1)[0][0]


def scenarios(folder: Path) -> dict[str, dict[str, Any]]:
    """Every job by its name. `after`: the job whose stored results this one finds."""
    store, broken = str(folder / "store.sqlite"), str(folder / "broken.sqlite")
    Path(broken).write_bytes(b"this was a database once " * 400)
    jobs: dict[str, dict[str, Any]] = {}

    def job(
        name: str, ranks: int = 2, weft: bool = True, after: str = "", lock: bool = False, **env: str
    ) -> None:
        env = {**BASE, "WEFT_STORE": str(folder / f"{name}.sqlite"), **env}
        jobs[name] = {"ranks": ranks, "weft": weft, "after": after, "lock": lock, "env": env}

    slower_later = {**EFFECTS, "ctas16": 0.9, "ctas24": 1.1, "ctas32": 1.1}
    drift = {"DRIFT_AT": "280", "DRIFT": json.dumps({**slower_later, "ctas16": 1.06})}
    stall = {"EFFECTS": json.dumps({**EFFECTS, "ctas24": 1000}), "WEFT_TUNE_STALL_S": "4"}
    job("tuned", 4, STEPS="260", WEFT_STORE=store)
    job("drift", 3, STEPS="360", EFFECTS=json.dumps(slower_later), **drift)
    job("once", 2, STEPS="260", WEFT_TUNE_BUDGET="0")
    job("without", 4, weft=False, STEPS="260")
    job("restarted", 4, after="tuned", STEPS="45", WEFT_STORE=store)
    job("killed", 4, DIE="20@2", STEPS="60")
    job("killed without weft", 4, weft=False, DIE="20@2", STEPS="60")
    job("killed in the watch", 3, DIE="280@1", STEPS="310")
    job("killed late without weft", 3, weft=False, DIE="280@1", STEPS="310")
    job("paused in the watch", 3, PAUSE="280@1", STEPS="310")
    job("leader paused in the watch", 2, PAUSE="280@0", STEPS="310")
    job("stalled", 4, STEPS="90", **stall)
    job("refused", 3, STEPS="90", REFUSE="16@1")
    job("two optimizers", STEPS="90", OPTIMIZERS="sgd,adam")
    job("no optimizer", STEPS="20", OPTIMIZERS="")
    job("short", STEPS="18")
    job("a new group", STEPS="60", AGAIN="25")
    job("uneven", STEPS="340", EFFECTS="{}", UNEVEN="1")
    job("lengths", 3, STEPS="420", EFFECTS=json.dumps({"ctas16": 0.95}), LENGTHS="1")
    job("broken store", STEPS="90", WEFT_STORE=broken)
    job("locked store", after="tuned", lock=True, STEPS="45", WEFT_STORE=store)
    job("no group", 1, STEPS="10", NO_GROUP="1")
    return jobs


class Zoo:
    """Plays jobs in a process that has imported torch, each when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._player = folder, None
        self._jobs: dict[int, dict[str, dict[str, Any]]] = {}

    def __enter__(self) -> Zoo:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def play(self, name: str, run: int = 1) -> Played:
        """What this job left behind. A rerun of a failed test (`run` 2) plays its jobs again."""
        at = self._folder / f"run{run}"
        if run not in self._jobs:
            at.mkdir()
            self._jobs[run] = scenarios(at)
        job, folder = self._jobs[run][name], at / name
        if job["after"]:
            self.play(job["after"], run)
        if not (folder / "codes.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a job that was cut short
            self._ask({**job, "folder": str(folder)})
        played = Played(folder)
        if any(played.codes):
            errors = "".join(played.error(rank) for rank in range(job["ranks"]))
            print(f"{name}: {played.codes}\n{errors}")
        return played

    def _ask(self, job: dict[str, Any]) -> None:
        if self._player is None:
            self._player = self._start()
        try:
            self._player.stdin.write(json.dumps(job) + "\n")
            self._player.stdin.flush()
            assert self._player.stdout.readline() == "played\n", (self._folder / "player.err").read_text()
        except BaseException:  # pytest's timeout, too: the next job needs another player
            self._end()
            raise

    def _start(self) -> subprocess.Popen[str]:
        with (self._folder / "player.err").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, str(HERE / "live_zoo.py")],
                env={**CLEAN, "PYTHONPATH": f"{HOME}:{HERE}", "OMP_NUM_THREADS": "1", "WEFT_TUNE_HOME": HOME},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def _end(self) -> None:
        player, self._player = self._player, None
        if player is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(player.pid, signal.SIGKILL)  # and its ranks
            player.communicate()
