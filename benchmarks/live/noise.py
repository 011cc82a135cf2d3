"""How often does live tuning claim a gain where there is none, and find one where there is? Simulated jobs.

python benchmarks/live/noise.py [--jobs 300] [--gains 60] [--only KIND …] [--out FILE]

For each kind of noise of tests/unit/live_noise.py: jobs in which no policy matters, and jobs in which one
policy takes 5% less time. Then jobs that are watched and drift (tests/unit/test_live_watch.py). FILE has what
is done so far; a rerun goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit")]

from live_noise import KINDS, tuned  # noqa: E402
from test_live_watch import DRIFTS, late  # noqa: E402

BARS = ("scatter 1%", "scatter 3%")  # as many jobs with a gain as without


def noise(name: str, jobs: int, gains: int) -> dict[str, Any]:
    """Shares over so many jobs of one kind in which no policy matters, and in which one does."""
    same = [tuned(KINDS[name], seed) for seed in range(jobs)]
    better = [tuned(KINDS[name], seed, 0.05) for seed in range(gains)]
    found = [outcome for outcome in better if outcome.kept]
    claimed = sorted(outcome.gain_pct for outcome in same if outcome.kept)
    return {
        "false_claims": len(claimed),
        "false_share": len(claimed) / jobs,
        "largest_false_claim_pct": round(claimed[-1], 2) if claimed else None,
        "jobs": jobs,
        "jobs_with_a_gain": gains,
        "gain_of_5_pct_found": len(found) / gains,
        "interval_holds_it": sum(o.ci_pct[0] <= 5 <= o.ci_pct[1] for o in found) / max(1, len(found)),
        "steps_mean": round(sum(o.steps for o in better) / gains, 1),
        "steps_most": max(o.steps for o in (*same, *better)),
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--jobs", type=int, default=300, help="jobs of each kind without a gain")
    parser.add_argument("--gains", type=int, default=60, help="jobs of each kind with a gain of 5%%")
    parser.add_argument("--drifts", type=int, default=1000, help="watched jobs of each kind of drift")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of kinds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = [name for name in KINDS if any(only in name for only in args.only)]
    command = (
        f"python benchmarks/live/noise.py --jobs {args.jobs} --gains {args.gains} --drifts {args.drifts}"
    )
    document: dict[str, Any] = {"simulated": True, "command": command, "kinds": {}, "drifts": {}}
    if args.out and args.out.exists():
        document |= json.loads(args.out.read_text())

    def save() -> None:
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n")

    for name in [name for name in chosen if name not in document["kinds"]]:
        row = document["kinds"][name] = noise(name, args.jobs, args.jobs if name in BARS else args.gains)
        shares = f"false {100 * row['false_share']:5.1f}%  found {100 * row['gain_of_5_pct_found']:5.1f}%"
        print(f"{name:36} {shares}  steps {row['steps_mean']:.0f}, at most {row['steps_most']}", flush=True)
        save()
    for name in [name for name in DRIFTS if name not in document["drifts"]]:
        back = sum(late(name, seed) == 0 for seed in range(args.drifts)) / args.drifts
        document["drifts"][name] = {"jobs": args.drifts, "back_within_50_steps": back}
        print(f"drift: {name:36} back to the default within 50 steps: {100 * back:.1f}%", flush=True)
        save()


if __name__ == "__main__":
    main()
