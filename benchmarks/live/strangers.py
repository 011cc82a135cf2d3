"""Is an unmodified program ever slower under `weft run --tune`, and do its claims hold outside?

    python benchmarks/live/strangers.py --out DIR [--public FOLDER] [--only NAME …] [--repeats 3] [--tiny]

Each program of strangers/catalog.py runs without weft and under `weft run --tune`, by turns, each time in a
process of its own, as rank 0 of two with a ghost rank. A stopwatch that is not weft's notes when each step
ends (strangers/watched.py); the mean of the last seconds is compared. The next process imports its libraries
on cores of its own while one is measured, and waits. DIR/rows.jsonl has a line for each process as soon as it
ends, and a rerun goes on from there, so that the table may grow over several sessions. DIR/table.md is the
table.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import BASELINE_CTAS, RANKS, ROOT
from strangers.catalog import CATALOG, HERE, PAUSE, Program, prepare

SETTLE_S = {"without": 3.0, "tune": 1.0}  # after the first steps; after the search
TAIL_S = 5.0  # seconds that are compared: the search is over by then
DEADLINE_S = 75.0
MOST_FIRST_STEPS = 400
WAYS = ("without", "tune")
YES_NO = ("yes", "no")
TOLD = ("state", "text", "gain_pct", "ci", "steps", "warm_up_steps", "noise_pct", "policy", "watch")


@dataclass
class Process:
    """A process that has imported what it needs and waits for its turn."""

    program: Program
    way: str
    repeat: int
    folder: Path
    popen: subprocess.Popen[bytes]
    tiny: bool

    def run(self, limit_s: float, first_steps: int | None) -> dict[str, Any]:
        """Let it go, to its end or to its deadline. Nothing of it is left on the GPU when this returns.

        `first_steps`: steps before the last seconds; None: a few.
        """
        if first_steps is not None:
            (self.folder / "first_steps").write_text(str(first_steps))
        began, stolen = time.monotonic(), stolen_s()
        pin(self.popen.pid, running_cores())
        (self.folder / "gate").touch()
        code, since = self.watch(began + limit_s)
        row: dict[str, Any] = {"program": self.program.name, "way": self.way, "repeat": self.repeat}
        row |= {"ok": code == 0, "exit": code, "seconds": round(time.monotonic() - began, 1)}
        row["steal_pct"] = round(100 * (stolen_s() - stolen) / max(0.1, time.monotonic() - began), 1)
        self.end()
        times, stats = self.folder / "times.json", self.folder / "stats.json"
        if times.exists():
            stamps = json.loads(times.read_text())
            row["times_ms"] = [round(1e3 * (b - a), 3) for a, b in itertools.pairwise(stamps)]
            row["tail"] = tail = sum(stamp >= since for stamp in stamps[:-1])
            if tail:
                row["step_ms"] = statistics.fmean(row["times_ms"][-tail:])
                row["median_ms"] = statistics.median(row["times_ms"][-tail:])
        if stats.exists():
            tuning = json.loads(stats.read_text()).get("tuning") or {}
            row["tuning"] = {name: tuning.get(name) for name in TOLD}
        if code != 0 or self.way == "tune":
            row["said"] = (self.folder / "log").read_text(errors="replace")[-1500:]
        shutil.rmtree(self.folder, ignore_errors=True)
        return row

    def watch(self, until: float) -> tuple[int | str, float]:
        """Exit code, and when the last seconds began: the search was over, and the steps had settled."""
        since = math.inf
        while self.popen.poll() is None:
            now = time.monotonic()
            if now > until:
                return "killed at its deadline", since
            if since == math.inf and (self.folder / "stepping").exists() and self.settled():
                since = now + SETTLE_S[self.way]
            if now > since + TAIL_S:
                (self.folder / "stop").touch()
            time.sleep(0.1)
        return self.popen.returncode, since

    def settled(self) -> bool:
        """Whether no search goes on."""
        if self.way == "without" or self.tiny:
            return True
        return "tuning is over" in (self.folder / "log").read_text(errors="replace")

    def end(self) -> None:
        """Kill it with everything that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def start(program: Program, way: str, repeat: int, args: argparse.Namespace) -> Process:
    """Start a process; it waits at its gate."""
    folder = Path(tempfile.mkdtemp(prefix="weft-strangers-"))
    command = [sys.executable, "-m", "weft.comm.ghost", "--ranks", str(RANKS), str(HERE / "watched.py")]
    command += program.arguments(args.public)
    if way == "tune":
        stats = str(folder / "stats.json")
        command = [sys.executable, "-m", "weft", "run", "--tune", "--stats", stats, "--", *command]
    with (folder / "log").open("w") as log:
        popen = subprocess.Popen(
            command,
            env=environment(program, folder, args),
            cwd=program.root(args.public),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    pin(popen.pid, waiting_cores())
    return Process(program, way, repeat, folder, popen, args.tiny)


def stolen_s() -> float:
    """Seconds of all cores that the hypervisor gave to somebody else."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(first[8]) / os.sysconf("SC_CLK_TCK")


def waiting_cores() -> set[int]:
    """A quarter of the cores, for the process that gets ready."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[len(cores) * 3 // 4 :])


def running_cores() -> set[int]:
    """The other cores, for the process that is measured; all of them where there are few."""
    cores = os.sched_getaffinity(0)
    return cores - waiting_cores() if len(cores) >= 8 else cores


def pin(root: int, cores: set[int]) -> None:
    """Move a process, its children and all their threads to some cores."""
    for process in family(root):
        with suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):
                    os.sched_setaffinity(int(thread.name), cores)


def family(root: int) -> list[int]:
    """A process that leads a session, and everything that it started."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = []
    for number in numbers:
        with suppress(OSError):
            if os.getsid(number) == root:
                found.append(number)
    return found


def environment(program: Program, folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """The baseline's CTAs, no memory of earlier tuning."""
    paths = (str(ROOT / "src"), str(HERE), str(args.public / "stubs"), os.environ.get("PYTHONPATH"))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "WEFT_GHOST_CTAS": str(BASELINE_CTAS),
        "WEFT_STORE": str(folder / "store.sqlite"),
        "STRANGER_FOLDER": str(folder),
        "STRANGER_STEP": program.step,
        "STRANGER_IMPORTS": ",".join(program.imports),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**env, "STRANGER_TINY": "1"} if args.tiny else env


def rows(out: Path) -> list[dict[str, Any]]:
    """What earlier processes showed."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan(out: Path, chosen: list[Program], repeats: int) -> list[tuple[Program, str, int]]:
    """What is still to be run, by turns; what failed twice is not tried again."""
    known = rows(out)
    done = {(row["program"], row["way"], row["repeat"]) for row in known if row["ok"]}
    failed = [(row["program"], row["way"], row["repeat"]) for row in known if not row["ok"]]
    order = random.Random(len(known))
    turns = []
    for repeat in range(repeats):
        for program in chosen:
            # Where an epoch ends now and then, the second process is compared at the same step as the first.
            ways = order.sample(WAYS, len(WAYS)) if not program.pauses else ["tune", "without"]
            for way in ways:
                key = (program.name, way, repeat)
                if key not in done and failed.count(key) < 2:
                    turns.append((program, way, repeat))
    return turns


def first_steps(out: Path, current: Process) -> int | None:
    """Steps that the tuned process of this pair had before its last seconds, where the stretch matters."""
    if not current.program.pauses or current.way == "tune":
        return None
    done = [row for row in rows(out) if row["ok"] and row.get("tail") and row["way"] == "tune"]
    own = [r for r in done if (r["program"], r["repeat"]) == (current.program.name, current.repeat)]
    return min(len(own[-1]["times_ms"]) - own[-1]["tail"], MOST_FIRST_STEPS) if own else None


def measure(args: argparse.Namespace) -> None:
    """Run what is to be run, one process at a time; the next one gets ready meanwhile."""
    until = time.monotonic() + args.budget
    chosen = [p for p in CATALOG.values() if any(fnmatch.fnmatch(p.name, only) for only in args.only)]
    if any(program.folder for program in chosen):
        prepare(args.public)
    turns = plan(args.out, chosen, args.repeats)
    following = start(*turns[0], args) if turns else None
    for number in range(len(turns)):
        current, following = following, None
        left = until - time.monotonic()
        if current is None or left < args.least:
            print(f"out of time: {len(turns) - number} processes left", flush=True)
            if current:
                current.end()
            break
        if number + 1 < len(turns):
            following = start(*turns[number + 1], args)
        row = current.run(min(args.deadline, left), first_steps(args.out, current))
        with (args.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = (row.get("tuning") or {}).get("text", "") if row["ok"] else row["said"][-600:]
        ms = f"{row['step_ms']:8.2f} ms" if "step_ms" in row else " " * 11
        name = f"{row['program']:20} {row['way']:8} {row['repeat']}"
        print(f"{name} {row['exit']} {row['seconds']:5.1f} s {ms}  {said}", flush=True)
    write_table(args.out)


def step_ms(program: Program, row: dict[str, Any]) -> float:
    """Mean of the last steps, less the program's own pauses where it is known to make some."""
    times: list[float] = row["times_ms"][-row["tail"] :]
    most = PAUSE * statistics.median(times) if program.pauses else math.inf
    return statistics.fmean(ms for ms in times if ms <= most)


def write_table(out: Path) -> None:
    """A line for each program: its times, their ratio with its range, the claims and whether they hold."""
    lines = [
        "| program | runs | without weft, ms | after `--tune`, ms | ratio (range) | a program against itself "
        "| claimed | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for program in CATALOG.values():
        found = [
            row for row in rows(out) if row["program"] == program.name and row["ok"] and "step_ms" in row
        ]
        without, tuned = ([row for row in found if row["way"] == way] for way in WAYS)
        if not without or not tuned:
            continue
        base, after = ([step_ms(program, row) for row in some] for some in (without, tuned))
        ratio = statistics.median(after) / statistics.median(base)
        low, high = min(after) / max(base), max(after) / min(base)
        scatter = 100 * (max(base) / min(base) - 1)
        claims = [(row["tuning"]["gain_pct"], row["tuning"]["ci"]) for row in tuned if row.get("tuning")]
        made = [claim for claim in claims if claim[0]]
        told = ", ".join(f"{gain:.1f}% ({a:.1f} to {b:.1f})" for gain, (a, b) in made) or "left alone"
        inside = all(100 * (1 - high) <= gain <= 100 * (1 - low) for gain, _ in made)
        known = min(len(base), len(after)) > 1 or not made
        holds = YES_NO[not inside] if known else "one run each: not known"
        lines.append(
            f"| {program.name}: {program.about} | {len(without)} + {len(tuned)} "
            f"| {statistics.median(base):.2f} | {statistics.median(after):.2f} "
            f"| {ratio:.3f} ({low:.3f} to {high:.3f}) | {scatter:.1f}% | {told} | {holds} |"
        )
    (out / "table.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    default = ROOT / ".local" / "public"
    parser.add_argument("--public", type=Path, default=default, help="checkouts: see strangers/catalog.py")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of programs, * and ? allowed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=440.0, help="seconds after which no process starts")
    parser.add_argument("--least", type=float, default=40.0, help="seconds that a process must have left")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for one process")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does everything work?")
    args = parser.parse_args()
    args.out, args.public = args.out.resolve(), args.public.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args)
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
