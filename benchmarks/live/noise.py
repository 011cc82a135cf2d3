"""How well does live tuning do under every kind of noise? Runs its own search and watch on simulated jobs.

python benchmarks/live/noise.py [--jobs 100] [--kind PART …] [--gain 5] [--drift] [--out FILE]

For each kind of tests/unit/live_kinds.py:
- false claims in jobs in which no policy matters;
- gains found in jobs in which one policy takes `--gain` percent less time, and whether the claim's interval
  contains the share of the job's total time that is saved;
- wrong reverts in watched jobs whose policy stays that much faster;
- the cost of search and watch, in percent of a whole job with nothing to gain, and whether the interval
  stated at the end of a job with a gain contains the truth.
With `--drift`, also the jobs of tests/unit/test_live_watch.py whose policy becomes slower than the default,
and for each kind the share of jobs that leave such a policy within 50 steps.

FILE holds the results so far; a rerun continues from there, and `--cpu-s` ends a run early. `--seed` is the
first seed of the jobs.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit")]

from live_jobs import Life, lived, reverted, steps_after_drift, total_gain_pct, tuned  # noqa: E402
from live_kinds import JOBS, Kind  # noqa: E402
from test_live_watch import DRIFTS, late  # noqa: E402

from weft.tuning.live.tuned_job import TunedJob, final  # noqa: E402

BARS = ("scatter 1%", "scatter 3%")  # these kinds get as many jobs with a gain as without
ALLOWED = 0.02  # share of jobs with a false claim
WITHIN = 50  # steps after a drift
LATEST = 200  # steps played after a drift
LONGEST = 30_000  # steps of a whole job
Row = dict[str, Any]


def claims(kind: Kind, seeds: Iterable[int]) -> Row:
    """Results of jobs in which no policy matters."""
    same = [tuned(kind, seed) for seed in seeds]
    claimed = [outcome.gain_pct for outcome in same if outcome.kept]
    return {
        "jobs": len(same),
        "false_claims": len(claimed),
        "largest_false_claim_pct": round(max(claimed), 2) if claimed else None,
        "steps_most": max(outcome.steps for outcome in same),
    }


def gains(kind: Kind, seeds: Iterable[int], share: float) -> Row:
    """Results of jobs in which one policy takes `share` less time."""
    truth = total_gain_pct(kind, share)
    better = [tuned(kind, seed, share) for seed in seeds]
    found = [outcome for outcome in better if outcome.kept]
    return {
        "jobs_with_a_gain": len(better),
        "gain_pct": 100 * share,
        "gain_of_the_whole_pct": round(truth, 2),
        "found": len(found),
        "claimed_pct_median": round(median(o.gain_pct for o in found), 2) if found else None,
        "interval_holds_a_step": sum(_holds(o, 100 * share) for o in found),
        "interval_holds_the_whole": sum(_holds(o, truth) for o in found),
        "steps_mean": round(fmean(outcome.steps for outcome in better), 1),
    }


def _holds(outcome: TunedJob, pct: float) -> bool:
    low, high = outcome.ci_pct
    return low <= pct <= high


def stays(kind: Kind, seeds: Iterable[int], share: float, steps: int) -> Row:
    """Results of watched jobs whose policy stays faster."""
    lost = [reverted(kind, seed, share, steps) for seed in seeds]
    return {"watched": len(lost), "watched_steps": steps, "wrongly_reverted": sum(lost)}


def costs(kind: Kind, seeds: Iterable[int], share: float, steps: int) -> Row:
    """Results of whole jobs, with nothing to gain and with a gain."""
    seeds = list(seeds)
    same = [lived(kind, seed, 0.0, steps) for seed in seeds]
    better = [life for seed in seeds if (life := lived(kind, seed, share, steps)).claims]
    truth = total_gain_pct(kind, share)
    ends = [final(life.status)["ci"] for life in better]
    return {
        "lives": len(same),
        "life_steps": steps,
        "false_claims_at_the_end": sum(life.claims for life in same),
        **_extra(same),
        "further_searches": sum(life.status.searches for life in same),
        "claims_at_the_end": len(better),
        "last_interval_holds_the_whole": sum(low <= truth <= high for low, high in ends),
        "last_interval_width_pct": round(median(high - low for low, high in ends), 2) if ends else None,
    }


def _extra(lives: list[Life]) -> Row:
    extra = [life.extra_pct for life in lives]
    return {
        "extra_time_pct_mean": round(fmean(extra), 3),
        "extra_time_pct_most": round(max(extra), 2),
        "extra_ms_mean": round(fmean(life.extra_ms for life in lives), 1),
    }


def drifts(kind: Kind, seeds: Iterable[int]) -> Row:
    """Results of watched jobs whose policy turns from 8% faster to 5% slower than the default."""
    last = sorted(steps_after_drift(kind, seed, LATEST) for seed in seeds)
    return {
        "drifting": len(last),
        "left_within_50_steps": sum(step <= WITHIN for step in last),
        "last_step_median": last[len(last) // 2],
    }


def life(kind: Kind, steps: int) -> int:
    """Steps of a whole job: a minute's, if that is more, so that the first search does not dominate."""
    return max(steps, min(LONGEST, round(60e3 / kind.step_ms)))


def shown(name: str, row: Row) -> str:
    """A row in one line, with figures above their bar marked."""
    parts = [f"{name:42}"]
    if "jobs" in row:
        parts.append(f"false {row['false_claims']}/{row['jobs']}")
    if "found" in row:
        held = f"{row['interval_holds_the_whole']}/{row['found']}"
        parts.append(f"found {row['found']}/{row['jobs_with_a_gain']}, held {held}")
    if "watched" in row:
        parts.append(f"reverted {row['wrongly_reverted']}/{row['watched']}")
    if "lives" in row:
        held = f"{row['last_interval_holds_the_whole']}/{row['claims_at_the_end']}"
        parts.append(f"cost {row['extra_time_pct_mean']:+.2f}%, at the end {held} held")
    if "drifting" in row:
        parts.append(f"left in time {row['left_within_50_steps']}/{row['drifting']}")
    many = row.get("false_claims", 0) > ALLOWED * row.get("jobs", 0)
    costly = row.get("extra_time_pct_mean", 0.0) > 1
    return "  ".join(parts) + ("  <-- false claims" if many else "") + ("  <-- cost" if costly else "")


def machine() -> str:
    """The machine that ran the simulations; only their speed depends on it."""
    return f"{platform.machine()}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that was run, with a + if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def parsed() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--jobs", type=int, default=100, help="jobs of each kind without a gain")
    parser.add_argument("--gains", type=int, default=40, help="jobs of each kind with a gain")
    parser.add_argument("--watched", type=int, default=20, help="watched jobs of each kind, 0: none")
    parser.add_argument("--lives", type=int, default=10, help="whole jobs of each kind, 0: none")
    parser.add_argument("--steps", type=int, default=3000, help="steps of watched and of whole jobs")
    parser.add_argument("--gain", type=float, default=5.0, help="percent less time")
    parser.add_argument("--drift", action="store_true", help="also jobs that drift")
    parser.add_argument("--drifts", type=int, default=1000, help="jobs of each drift of the test")
    parser.add_argument("--kind", nargs="+", default=[""], help="parts of the names of kinds")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--cpu-s", type=float, default=math.inf, help="CPU time after which no kind is begun")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def parts(args: argparse.Namespace) -> dict[str, Callable[[str], Row]]:
    """The parts measured for each kind, in order."""

    def seeds(count: int) -> range:
        return range(args.seed, args.seed + count)

    share, steps = args.gain / 100, args.steps
    return {
        "claims": lambda name: claims(JOBS[name], seeds(args.jobs)) if args.jobs else {},
        "gains": lambda name: (
            gains(JOBS[name], seeds(args.jobs if name in BARS else args.gains), share) if args.gains else {}
        ),
        "stays": lambda name: stays(JOBS[name], seeds(args.watched), share, steps) if args.watched else {},
        "costs": lambda name: (
            costs(JOBS[name], seeds(args.lives), share, life(JOBS[name], steps)) if args.lives else {}
        ),
        "drifts": lambda name: drifts(JOBS[name], seeds(args.watched)) if args.drift and args.watched else {},
    }


def main() -> None:
    args = parsed()
    document: Row = {
        "simulated": True,
        "command": " ".join(["python benchmarks/live/noise.py", *sys.argv[1:]]),
        "machine": machine(),
        "commit": commit(),
        "kinds": {},
        "drifts": {},
    }
    if args.out and args.out.exists():
        document |= json.loads(args.out.read_text())

    def save() -> None:
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n")

    measured = parts(args)
    for name in [name for name in JOBS if any(part in name for part in args.kind)]:
        if name not in document["kinds"] and time.process_time() < args.cpu_s:
            row = {key: value for part in measured.values() for key, value in part(name).items()}
            document["kinds"][name] = row
            print(shown(name, row), flush=True)
            save()
    for name in [name for name in DRIFTS if args.drift and name not in document["drifts"]]:
        if time.process_time() >= args.cpu_s:
            break
        back = sum(late(name, seed) == 0 for seed in range(args.seed, args.seed + args.drifts))
        document["drifts"][name] = {"jobs": args.drifts, "back_within_50_steps": back}
        print(f"drift: {name:36} back to the default within 50 steps: {back}/{args.drifts}", flush=True)
        save()


if __name__ == "__main__":
    main()
