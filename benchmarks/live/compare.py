"""Does `weft run --tune` find the best policy of a training job, and is the job ever slower for it?

    python benchmarks/live/compare.py --out DIR [--only NAME …] [--repeats 2] [--budget SECONDS] [--tiny]
    python benchmarks/live/compare.py --out DIR --levers [NAME …] [--only NAME …] [--budget SECONDS]

For each configuration: the job without weft and under `weft run --tune`, by turns, each in a process of its
own; then an exhaustive search in one process (search.py), where the tuner's policy is measured among all
others; with `--policy` also the job under `weft run --policy` with its best. With `--levers` there is
no search: each lever of levers.py is tried alone by `weft run --policy`, and the step without communication
is measured; levers.md has what each brought. Every process has a deadline. While one runs on the GPU the next
one starts up and waits. DIR has a line of JSON for each process as soon as it ends (a rerun goes on from
there), what the search found, and table.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs import BASELINE_CTAS, CONFIGS, ROOT, Config
from levers import levers_of, write_levers
from table import write_table

HERE = Path(__file__).resolve().parent
STEPS, TINY_STEPS = 260, 110
LEVER_STEPS = {"tune": 340, "without": 90, "lever": 60}  # with --levers; a search has more levers now
SIX = 6  # configurations of CONFIGS that --levers takes where none is named
TAIL = 60  # steps at the end of a job that are compared: tuning is over by then
DEADLINE_S, SEARCH_S = 90.0, 25.0


class Process:
    """A job in a process group of its own, waiting at its gate until it is let go."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.name, self.gate, self.log = name, folder / f"{name}.gate", folder / f"{name}.log"
        self.gate.unlink(missing_ok=True)
        self._log = self.log.open("w")
        self._process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def run(self, deadline_s: float) -> tuple[int | str, float]:
        """Let it go and wait for its end: the exit code, or that it took too long; and the seconds."""
        self.gate.touch()
        start = time.monotonic()
        try:
            return self._process.wait(timeout=deadline_s), time.monotonic() - start
        except subprocess.TimeoutExpired:
            return f"killed after {deadline_s:.0f} s", deadline_s
        finally:
            self.end()

    def end(self) -> None:
        """Nothing of it is left on the GPU when this returns."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        self.gate.unlink(missing_ok=True)


class Comparison:
    """All processes of one configuration, in order."""

    def __init__(self, config: Config, args: argparse.Namespace) -> None:
        self.config, self.args = config, args
        self.folder = args.out / config.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.best = self.folder / "best.json"
        wanted = args.levers or ["*"]
        self.levers = {
            name: policy
            for name, policy in levers_of(config).items()
            if any(fnmatch.fnmatch(name, only) for only in wanted)
        }
        for name, policy in self.levers.items():
            (self.folder / f"lever-{name}-0.policy.json").write_text(json.dumps(policy))

    def plan(self) -> list[tuple[str, str]]:
        """(way, name) of each process, less those that are done."""
        turns = [(way, f"{way}-{n}") for n in range(self.args.repeats) for way in ("without", "tune")]
        if self.args.levers is None:
            turns += [("search", "search")] + ([("policy", "policy-0")] if self.args.policy else [])
        else:
            levers = [("lever", f"lever-{name}-0") for name in self.levers]
            turns = [turns[0], *levers, ("floor", "floor"), *turns[1:]]
        done = {row["name"] for row in rows(self.args.out) if row["config"] == self.config.name and row["ok"]}
        return [turn for turn in turns if turn[1] not in done]

    def start(self, way: str, name: str) -> Process:
        """The process, up to its gate."""
        weft = [sys.executable, "-m", "weft", "run", "--stats", str(self.folder / f"{name}.stats.json")]
        gate = ["--gate", str(self.folder / f"{name}.gate")]
        if way == "search":
            search = [
                str(HERE / "search.py"),
                *gate,
                self.config.name,
                "--out",
                str(self.folder / "search.json"),
            ]
            for number in range(self.args.repeats):
                search += ["--also", str(self.folder / f"tune-{number}.policy.json")]
            search += ["--limit", str(self.args.search)]
            command = [*weft, "--", sys.executable, *search, *(["--tiny"] if self.args.tiny else [])]
        elif way == "floor":
            look = [str(HERE / "look.py"), *gate, self.config.name, *(["--tiny"] if self.args.tiny else [])]
            command = [*weft, "--", sys.executable, *look]
        else:
            steps = STEPS if self.args.levers is None else LEVER_STEPS[way]
            steps = TINY_STEPS if self.args.tiny else steps
            files = [f"--{kind}={self.folder / f'{name}.{kind}'}" for kind in ("losses", "times")]
            job = [sys.executable, str(HERE / "job.py"), *gate, *self.config.arguments(steps), *files]
            options = {
                "without": None,
                "tune": ["--tune"],
                "policy": ["--policy", str(self.best)],
                "lever": ["--policy", str(self.folder / f"{name}.policy.json")],
            }[way]
            command = job if options is None else [*weft, *options, "--", *job]
        return Process(name, command, environment(self.folder / f"{name}.store"), self.folder)

    def row(self, way: str, name: str, code: int | str, seconds: float) -> dict[str, Any]:
        """What one process showed."""
        row: dict[str, Any] = {"config": self.config.name, "way": way, "name": name, "ok": code == 0}
        row |= {"exit": code, "seconds": round(seconds, 1)}
        if code != 0:
            row["said"] = (self.folder / f"{name}.log").read_text(errors="replace")[-1500:]
        for kind in ("losses", "times"):
            path = self.folder / f"{name}.{kind}"
            if path.exists():
                row[kind] = path.read_text().split()
        row["times"] = [float(ms) for ms in row.get("times", [])]
        stats = self.folder / f"{name}.stats.json"
        if way == "tune" and stats.exists():
            row["tuning"] = json.loads(stats.read_text()).get("tuning")
            if row["tuning"] and row["tuning"].get("policy"):
                (self.folder / f"{name}.policy.json").write_text(json.dumps(row["tuning"]["policy"]))
        if way == "floor" and code == 0:
            printed = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
            row["floor"] = next((json.loads(line) for line in printed if line.startswith('{"config"')), {})
        if way == "search" and (self.folder / "search.json").exists():
            row["search"] = json.loads((self.folder / "search.json").read_text())
            if "best" in row["search"]:
                self.best.write_text(json.dumps(row["search"]["best"]["policy"]))
        return row


def environment(store: Path) -> dict[str, str]:
    """The baseline's CTAs, no memory of earlier tuning, compiled kernels kept between processes."""
    store.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {
        **os.environ,
        "PYTHONPATH": path,
        "WEFT_GHOST_CTAS": str(BASELINE_CTAS),
        "WEFT_STORE": str(store),
        **{name: str(Path(tempfile.gettempdir(), "weft-live", folder)) for name, folder in caches.items()},
    }


def rows(out: Path) -> list[dict[str, Any]]:
    """What earlier processes showed."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def expected_s(out: Path, config: str, way: str) -> float:
    """Seconds that the latest such process took, so that none is started only to be killed; 0: unknown."""
    took = [row["seconds"] for row in rows(out) if row["ok"] and (row["config"], row["way"]) == (config, way)]
    return float(took[-1]) if took else 0.0


def compare(args: argparse.Namespace) -> None:
    """Run what is to be run, one process at a time on the GPU."""
    until = time.monotonic() + args.budget
    names = args.only or (list(CONFIGS)[:SIX] if args.levers is not None else ["*"])
    chosen = [c for c in CONFIGS.values() if any(fnmatch.fnmatch(c.name, only) for only in names)]
    comparisons = [Comparison(c.tiny() if args.tiny else c, args) for c in chosen]
    turns = [(comparison, *turn) for comparison in comparisons for turn in comparison.plan()]
    waiting: Process | None = None
    try:
        for number, (comparison, way, name) in enumerate(turns):
            left = until - time.monotonic()
            if left < max(10 if args.tiny else 15, expected_s(args.out, comparison.config.name, way)):
                print(f"out of time: {len(turns) - number} processes left", flush=True)
                break
            process = waiting or comparison.start(way, name)
            following = turns[number + 1] if number + 1 < len(turns) else None
            # A policy is read when a process starts, so that one cannot start before the search has ended.
            waiting = following[0].start(*following[1:]) if following and following[1] != "policy" else None
            code, seconds = process.run(min(args.deadline, left))
            row = comparison.row(way, name, code, seconds)
            with (args.out / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            said = (row.get("tuning") or {}).get("text", "") if row["ok"] else row["said"][-300:]
            print(f"{comparison.config.name:22} {name:10} {row['exit']} {seconds:6.1f} s  {said}", flush=True)
            write_tables(args)
    finally:
        if waiting is not None:
            waiting.end()
        write_tables(args)


def write_tables(args: argparse.Namespace) -> None:
    """What is known so far."""
    write_table(args.out, rows(args.out), TAIL)
    if args.levers is not None:
        write_levers(args.out, rows(args.out))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], help="names of configurations, * and ? allowed")
    parser.add_argument("--levers", nargs="*", help="try levers one by one (of levers.py; none named: all)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--policy", action="store_true", help="also run the best policy by `weft run --policy`"
    )
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no process starts")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for one process")
    parser.add_argument("--search", type=float, default=SEARCH_S, help="seconds of measurements in a search")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does everything work?")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    compare(args)
    print((args.out / ("table.md" if args.levers is None else "levers.md")).read_text())
    for store in args.out.glob("*/*.store*"):
        shutil.rmtree(store) if store.is_dir() else store.unlink()


if __name__ == "__main__":
    main()
