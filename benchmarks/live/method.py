"""How often does live tuning find the best policy? On the simulated jobs of tests/unit/test_live_search.py.

python benchmarks/live/method.py [--jobs 2000] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from document import show

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit")]

from test_live_search import Job, play, watched  # noqa: E402


def study(jobs: int, noise: float | None) -> dict[str, float]:
    """Shares and percentages over so many jobs; `noise`: scatter of a step, None: 0.5 to 1%, drawn."""
    behind, slower, steps, kept = [], [], [], 0
    for seed in range(jobs):
        job = Job(seed, **({} if noise is None else {"noise": noise}))
        outcome = play(job, seed=seed)
        steps.append(outcome.steps)
        outcome = watched(job, outcome) if outcome.still_open else outcome
        behind.append(100 * (job.ms(outcome.policy) / job.best_ms - 1))
        slower.append(100 * (job.ms(outcome.policy) / 40 - 1))
        kept += outcome.kept
    return {
        "jobs": jobs,
        "within_1_pct": round(sum(b <= 1 for b in behind) / jobs, 4),
        "behind_best_pct_mean": round(statistics.fmean(behind), 3),
        "behind_best_pct_worst": round(max(behind), 2),
        "slower_than_default_pct_worst": round(max(slower), 2),
        "gain_pct_mean": round(-statistics.fmean(slower), 2),
        "changed": round(kept / jobs, 3),
        "steps_mean": round(statistics.fmean(steps), 1),
        "steps_most": max(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"0.5 to 1%": study(args.jobs, None)}
    found |= {f"{100 * noise:g}%": study(args.jobs, noise) for noise in (0.0025, 0.005, 0.01, 0.02)}
    document = {
        "simulated": True,
        "command": f"python benchmarks/live/method.py --jobs {args.jobs}",
        "scatter of a step": found,
    }
    show(document, args.out)


if __name__ == "__main__":
    main()
