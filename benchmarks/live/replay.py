"""How well does live tuning do on step times recorded by others? Runs its own search and watch on them.

python benchmarks/live/replay.py LOGS [--jobs 300] [--gain 5] [--out FILE]

LOGS: a folder, or a git repository without a work tree, with training logs whose lines have the form
`step:12/3000 … train_time:1234ms`, such as those of github.com/KellerJordan/modded-nanogpt (8 GPUs each, MIT
licence). The differences of successive times are the steps of a job, at most `--steps` of them. If there are
more jobs than logs, a log is reused from another step on. No policy changes anything; with `--gain`, one
takes that many percent less time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit"), str(ROOT / "benchmarks" / "live")]

from live_jobs import Life, lived  # noqa: E402
from live_kinds import Kind  # noqa: E402
from live_machines import Moment, StepTimes  # noqa: E402
from noise import commit, machine  # noqa: E402

from weft.tuning.live.tuned_job import final  # noqa: E402

LEAST = 400  # a log needs at least this many steps
_LINE = re.compile(r"^step:(\d+)/\d+ (?:\S+ )*?train_time:([\d.]+)ms", re.M)


def texts(logs: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each file of a folder or of a bare repository."""
    endings = (".txt", ".log")
    if not (logs / "objects").is_dir():
        for path in sorted(logs.rglob("*")):
            if path.suffix in endings and path.is_file():
                yield str(path.relative_to(logs)), path.read_text(errors="replace")
        return
    git = ["git", "-C", str(logs)]
    listed = subprocess.run([*git, "ls-tree", "-r", "HEAD", "--name-only"], capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if name.endswith(endings):
            shown = subprocess.run([*git, "show", f"HEAD:{name}"], capture_output=True, check=False)
            yield name, shown.stdout.decode(errors="replace")  # empty if a snapshot lacks the file


def steps_ms(text: str) -> list[float]:
    """Times of successive steps of a log."""
    rows = [(int(step), float(ms)) for step, ms in _LINE.findall(text)]
    return [b[1] - a[1] for a, b in pairwise(rows) if b[0] == a[0] + 1 and b[1] > a[1]]


def replayed(times: list[float], start: int) -> Kind:
    """A kind of job with these steps, from `start` on, wrapping around at the end."""
    usual = median(times)

    def job(_: random.Random) -> StepTimes:
        def step(now: Moment) -> float:
            return times[(start + now.number) % len(times)] * now.ms / usual

        return step

    return Kind(job, usual)


def summary(lives: list[Life], gain_pct: float) -> dict[str, Any]:
    claims = [life for life in lives if life.claims]
    extra = sorted(life.extra_pct for life in lives)
    ends = [final(life.status)["ci"] for life in claims]
    return {
        "jobs": len(lives),
        "gain_pct": gain_pct,
        "claims": len(claims),
        "interval_holds": sum(low <= gain_pct <= high for low, high in ends),
        "reverted": sum(bool(life.status.reverted) for life in lives),
        "extra_time_pct_median": round(median(extra), 2),
        "extra_time_pct_most": round(extra[-1], 2),
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--gain", type=float, nargs="+", default=[0.0, 5.0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {name: times for name, text in texts(args.logs) if len(times := steps_ms(text)) >= LEAST}
    names = sorted(found)
    random.Random(0).shuffle(names)
    rows = []
    for gain in args.gain:
        lives = []
        for number in range(args.jobs):
            times = found[names[number % len(names)]]
            start = 0 if number < len(names) else random.Random(number).randrange(len(times))
            kind = replayed(times, start)
            lives.append(lived(kind, number, gain / 100, min(len(times), args.steps)))
        rows.append(summary(lives, gain))
        print(json.dumps(rows[-1]), flush=True)
    document = {
        "simulated": True,
        "command": f"python benchmarks/live/replay.py LOGS --jobs {args.jobs} --gain {args.gain}",
        "machine": machine(),
        "commit": commit(),
        "logs": len(names),
        "recorded_steps": sum(map(len, found.values())),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
