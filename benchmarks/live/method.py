"""How often does live tuning find the best policy? On `--jobs` simulated jobs of
tests/unit/test_live_search.py and `--levers` jobs of tests/unit/test_live_levers.py, in which every lever may
matter.

python benchmarks/live/method.py [--jobs 2000] [--levers 100] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from document import show

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit")]

from test_live_levers import FullJob, found_5_percent  # noqa: E402
from test_live_levers import play as play_levers  # noqa: E402
from test_live_search import Job, play, steps_to_proof, watched  # noqa: E402


def study(jobs: int, noise: float | None) -> dict[str, float]:
    """Shares and percentages over `jobs` jobs. `noise`: scatter of a step; None: drawn from 0.5 to 1%."""
    behind, slower, steps, kept = [], [], [], 0
    for seed in range(jobs):
        job = Job(seed, **({} if noise is None else {"noise": noise}))
        outcome = play(job, seed=seed)
        steps.append(steps_to_proof(outcome))
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
        "steps_to_proof_mean": round(statistics.fmean(steps), 1),
        "steps_to_proof_most": max(steps),
    }


def levers(jobs: int, noise: float) -> dict[str, float]:
    """The same for jobs in which every lever may matter, none does, or one change gains 5%."""
    behind, steps, claims, found = [], [], 0, 0
    for seed in range(jobs):
        job = FullJob(seed, noise=noise)
        outcome = play_levers(job)
        steps.append(steps_to_proof(outcome))
        outcome = watched(job, outcome) if outcome.still_open else outcome
        behind.append(100 * (job.ms(outcome.policy) / job.best_ms - 1))
        claims += play_levers(FullJob(seed, noise=noise, matters=False)).kept
        found += found_5_percent(seed, noise)
    return {
        "jobs": jobs,
        "within_1_pct": round(sum(b <= 1 for b in behind) / jobs, 4),
        "within_2_pct": round(sum(b <= 2 for b in behind) / jobs, 4),
        "steps_to_proof_mean": round(statistics.fmean(steps), 1),
        "claims_where_none_matters": claims,
        "found_5_pct": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--levers", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"0.5 to 1%": study(args.jobs, None)}
    found |= {f"{100 * noise:g}%": study(args.jobs, noise) for noise in (0.0025, 0.005, 0.01, 0.02)}
    document = {
        "simulated": True,
        "command": f"python benchmarks/live/method.py --jobs {args.jobs} --levers {args.levers}",
        "scatter of a step": found,
        "all levers": {f"{100 * noise:g}%": levers(args.levers, noise) for noise in (0.005, 0.01, 0.03)},
    }
    show(document, args.out)


if __name__ == "__main__":
    main()
