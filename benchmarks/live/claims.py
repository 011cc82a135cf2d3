"""How far is the claim of a proven policy from the truth? Runs the search's own proof on simulated steps.

    python benchmarks/live/claims.py [--jobs 100] [--out FILE]

For policies that can change at any step and for those that need a meeting of all ranks: how often a gain is
proven; the bias and root mean square error of its claim and the width of its interval, in percentage points;
and how often the interval contains the truth. Steps scatter independently or, as on a busy host, with a pace
that changes all the time. No GPU is needed; 100 jobs take five minutes.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from document import show

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.measure.sequential import Step
from weft.policy import Policy
from weft.tuning.live.proof import LEVEL, PROOF_STEPS, Claim, Proof, prove
from weft.tuning.live.trial import Record, Sample

POLICIES = {"any step": Policy(max_ctas=16), "meetings": Policy(bucket_mb=400.0)}
SCATTERS, EFFECTS = (0.01, 0.03, 0.08), (0.03, 0.06, 0.1, 0.2)
BEFORE, STEP_MS = 32, 40.0
HOST, HOST_MS, HOST_SCATTER = 0.08, 250.0, 0.04  # scatter and duration of the pace; scatter of a step


def noise_of(order: random.Random, scatter: float, host: float) -> Iterator[float]:
    """The logarithm of each step's noise factor. `host`: scatter of a pace that lasts about HOST_MS."""
    pace, kept = order.gauss(0, host), math.exp(-STEP_MS / HOST_MS)
    while True:
        pace = kept * pace + math.sqrt(1 - kept**2) * order.gauss(0, host)
        yield pace + order.gauss(0, scatter)


def claim_of(policy: Policy, scatter: float, effect: float, seed: int, host: float) -> tuple[Claim, int]:
    """A job's claim, and the steps that it took."""
    order, record = random.Random(seed), Record()
    noise = noise_of(order, scatter, host)
    record.number = BEFORE
    before = [Step(math.log(STEP_MS) + next(noise), 0, 0.0, n) for n in range(BEFORE)]
    lead = effect * order.uniform(0.7, 1.5)  # the gain that the comparison of candidates showed
    proof = Proof(Policy(), policy, LEVEL, lead, math.hypot(scatter, host), (1,), before)
    playing = prove(proof, PROOF_STEPS[1], random.Random(f"order {seed}"), record)
    try:
        trial = next(playing)
        while True:
            less = effect if trial.policy == policy else 0.0
            trial = playing.send(Sample(STEP_MS * math.exp(next(noise) - less)))
    except StopIteration:
        return proof.claim(), record.number - BEFORE


def study(
    policy: Policy, scatter: float, effect: float, jobs: int, first: int, host: float = 0.0
) -> dict[str, Any]:
    """Results over `jobs` jobs with this gain."""
    found = [claim_of(policy, scatter, effect, seed, host) for seed in range(first, first + jobs)]
    proven = [claim for claim, _ in found if claim.proven]
    row: dict[str, Any] = {"proven": len(proven), "steps": round(statistics.fmean(n for _, n in found))}
    if proven:
        errors = [claim.effect - effect for claim in proven]
        widths = [claim.ends[1] - claim.ends[0] for claim in proven]
        row |= {
            "bias": round(100 * statistics.fmean(errors), 2),
            "error": round(100 * math.sqrt(statistics.fmean(error**2 for error in errors)), 2),
            "width": round(100 * statistics.fmean(widths), 1),
            "held": sum(claim.ends[0] <= effect <= claim.ends[1] for claim in proven),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="begins the seeds of the jobs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = {
        "simulated": True,
        "command": f"python benchmarks/live/claims.py --jobs {args.jobs} --seed {args.seed}",
    }
    for name, policy in POLICIES.items():
        document[name] = {
            f"scatter {scatter:.0%}, effect {effect:.0%}": study(
                policy, scatter, effect, args.jobs, args.seed
            )
            for scatter in SCATTERS
            for effect in EFFECTS
        } | {
            f"host {HOST:.0%}, effect {effect:.0%}": study(
                policy, HOST_SCATTER, effect, args.jobs, args.seed, HOST
            )
            for effect in EFFECTS
        }
    show(document, args.out)


if __name__ == "__main__":
    main()
