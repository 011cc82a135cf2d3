"""Does live tuning claim gains in jobs with noise that nobody has thought of?

    python benchmarks/live/compositions.py [--seconds 300] [--seed 0] [--out FILE]

Each kind multiplies two random kinds of noise from tests/unit/live_noise.py. Its copies from the host reveal
one of the two, both, those of the previous step, nothing, or something unrelated. In 20 jobs of a kind no
policy matters; in 4, one policy takes 5% less time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit")]

from document import show  # noqa: E402
from live_inputs import TOKEN  # noqa: E402
from live_jobs import tuned  # noqa: E402
from live_kinds import Kind  # noqa: E402
from live_machines import Moment  # noqa: E402
from live_noise import KINDS  # noqa: E402
from noise import commit, machine  # noqa: E402

TOLD = ("first", "second", "both", "before", "other", "nothing")
MOST = 1e4  # limit of a step, as a multiple of the usual one
SAME, BETTER, GAIN = 20, 4, 0.05  # jobs per kind without and with a gain; the gain


class Steps:
    """Steps of a composed kind."""

    def __init__(self, r: random.Random, names: tuple[str, str], told: str) -> None:
        first, second = (KINDS[name](random.Random(r.random())) for name in names)
        self._factors: Iterator[tuple[float, float]] = zip(first, second, strict=False)
        self._r, self._told, self._before = r, told, 1.0
        self.copied: tuple[float, ...] = ()

    def __call__(self, now: Moment) -> float:
        first, second = next(self._factors)
        both = min(first * second, MOST)
        tells = {
            "first": first,
            "second": second,
            "both": both,
            "before": self._before,
            "other": self._r.uniform(0.7, 1.3),
            "nothing": 0.0,
        }
        self._before = both
        self.copied = (TOKEN * min(tells[self._told], MOST),)
        return now.ms * both


def play(draws: random.Random, seconds: float) -> dict[str, Any]:
    """Play as many kinds as time allows."""
    end = time.monotonic() + seconds
    kinds = found = false = 0
    claimed = []
    while time.monotonic() < end:
        names, told = (draws.choice(list(KINDS)), draws.choice(list(KINDS))), draws.choice(TOLD)
        kind = Kind(lambda r, names=names, told=told: Steps(r, names, told))
        claims = sum(tuned(kind, draws.random()).kept for _ in range(SAME))
        found += sum(tuned(kind, draws.random(), GAIN).kept for _ in range(BETTER))
        kinds, false = kinds + 1, false + claims
        if claims:
            claimed.append([*names, told, claims])
    return {
        "kinds": kinds,
        "jobs": SAME * kinds,
        "false_claims": false,
        "most_in_a_kind": max((row[-1] for row in claimed), default=0),
        "jobs_with_a_gain": BETTER * kinds,
        "found": found,
        "kinds_with_a_claim": claimed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = f"python benchmarks/live/compositions.py --seconds {args.seconds:g} --seed {args.seed}"
    head = {"simulated": True, "command": command, "machine": machine(), "commit": commit()}
    show({**head, **play(random.Random(args.seed), args.seconds)}, args.out)


if __name__ == "__main__":
    main()
