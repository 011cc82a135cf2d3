"""How often does the race find the best of 40 candidates, and how many measurements does it need?

    python benchmarks/race.py [--trials 100] [--out benchmarks/results/tune/race.json]

The full grid is the yardstick: every candidate measured n times, where n is the smallest number at which the
better of mean and median finds the best in at least 95% of trials of the same kind. The race may take a third
of those 40·n measurements, and is counted strictly: the best is the candidate with the smallest true time.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import weft
from weft.files import write_whole
from weft.measure.race import race

CANDIDATES = 40
NOISE = 0.05
WANTED = 0.95
NEAR = 0.01  # "as good as the best"

Times = Callable[[np.random.Generator], np.ndarray]
Draw = Callable[[np.random.Generator, int], np.ndarray]


def spaced(step: float) -> Times:
    return lambda rng: (1 + step) ** np.arange(CANDIDATES)


def uniform(rng: np.random.Generator) -> np.ndarray:
    return 1 + 0.3 * rng.random(CANDIDATES)


def ahead(gap: float, spread: float) -> Times:
    """One candidate is `gap` faster than the rest, which are spread evenly over `spread`."""
    return lambda rng: np.append(1.0, (1 + gap) * (1 + spread * rng.random(CANDIDATES - 1)))


def clusters(rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([base * (1 + 0.002 * np.arange(10)) for base in (1.0, 1.05, 1.1, 1.2)])


def normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return NOISE * rng.standard_normal(count)


def outliers(rng: np.random.Generator, count: int) -> np.ndarray:
    """5% noise, and one measurement in twenty takes 1.2 to 2 times as long."""
    slow = np.log(rng.uniform(1.2, 2.0, count)) * (rng.random(count) < 0.05)
    return normal(rng, count) + slow


def heavy(rng: np.random.Generator, count: int) -> np.ndarray:
    """Student's t with 3 degrees of freedom, scaled to 5%."""
    return NOISE / math.sqrt(3) * rng.standard_t(3, count)


@dataclass(frozen=True)
class Case:
    name: str
    times: Times
    draw: Draw = normal
    drift: bool = False
    """The machine's speed drifts by ±10% over about 150 measurements, and occasionally jumps by 5%."""


CASES = (
    Case("evenly 1% apart", spaced(0.01)),
    Case("evenly 2% apart", spaced(0.02)),
    Case("best 2% ahead, rest over 30%", ahead(0.02, 0.3)),
    Case("best 3% ahead, rest over 30%", ahead(0.03, 0.3)),
    Case("best 5% ahead, rest over 30%", ahead(0.05, 0.3)),
    Case("best 10% ahead, rest over 80%", ahead(0.1, 0.8)),
    Case("best 3% ahead, outliers", ahead(0.03, 0.3), outliers),
    Case("best 3% ahead, heavy tails", ahead(0.03, 0.3), heavy),
    Case("best 3% ahead, drift", ahead(0.03, 0.3), normal, True),
    Case("random over 30%", uniform),
    Case("4 clusters, 0.2% apart inside", clusters),
    Case("best 2% ahead of 39 equals", ahead(0.02, 0.0)),
    Case("best 5% ahead of 39 equals", ahead(0.05, 0.0)),
)


class Machine:
    """Generates measurements, thousands of draws at a time."""

    def __init__(self, case: Case, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 1])
        self.case = case
        times = case.times(np.random.default_rng([seed, 0]))
        self.times = np.random.default_rng([seed, 2]).permutation(times)
        self.best = int(self.times.argmin())
        self.count, self.level, self.drawn = 0, 0.0, iter(())
        self.phase = self.rng.uniform(0, 2 * math.pi)

    def __call__(self, candidate: int) -> float:
        value = next(self.drawn, None)
        if value is None:
            self.drawn = iter(self.case.draw(self.rng, 4096).tolist())
            value = next(self.drawn)
        if self.case.drift:
            self.count += 1
            if self.rng.random() < 0.005:
                self.level = self.rng.choice([-0.05, 0.0, 0.05])
            value += 0.1 * math.sin(self.phase + self.count * 2 * math.pi / 150) + self.level
        return float(self.times[candidate]) * math.exp(value)

    def near(self, candidate: int) -> bool:
        return bool(self.times[candidate] <= self.times[self.best] * (1 + NEAR))


def grid_finds(case: Case, repeats: int, trials: int, near: bool) -> float:
    """Fraction of trials in which the better of mean and median finds the best on a full grid."""
    found = np.zeros(2)
    for seed in range(trials):
        machine = Machine(case, 10**6 + seed)
        logs = np.log(machine.times)[:, None]
        if case.drift:
            samples = _drifting(machine, repeats)
            middles = [samples.mean(axis=1), np.median(samples, axis=1)]
        elif case.draw is normal and repeats > 30:  # their mean, drawn directly
            middles = [(logs[:, 0] + normal(machine.rng, CANDIDATES) / math.sqrt(repeats))] * 2
        else:
            samples = logs + case.draw(machine.rng, CANDIDATES * repeats).reshape(CANDIDATES, repeats)
            middles = [samples.mean(axis=1), np.median(samples, axis=1)]
        for way, middle in enumerate(middles):
            pick = int(middle.argmin())
            found[way] += machine.near(pick) if near else pick == machine.best
    return float(found.max()) / trials


def _drifting(machine: Machine, repeats: int) -> np.ndarray:
    """A full grid on a drifting machine: rounds in random order."""
    samples = np.empty((CANDIDATES, repeats))
    for number in range(repeats):
        for candidate in machine.rng.permutation(CANDIDATES):
            samples[candidate, number] = math.log(machine(int(candidate)))
    return samples


def grid_repeats(case: Case, near: bool, trials: int = 400, most: int = 1 << 11) -> int | None:
    """The smallest number of repeats that finds the best often enough; None above `most`."""
    low, high = 0, 1
    while grid_finds(case, high, trials, near) < WANTED:
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if grid_finds(case, middle, trials, near) >= WANTED else (middle, high)
    return high


def run(case: Case, trials: int, near: bool, first: int = 0) -> dict[str, object]:
    """One row of the table."""
    repeats = grid_repeats(case, near)
    row: dict[str, object] = {
        "case": case.name,
        "judged": "within 1%" if near else "exactly",
        "repeats": repeats,
    }
    if repeats is None:
        return row
    results = []
    for seed in range(first, first + trials):
        machine = Machine(case, seed)
        done = race(
            range(CANDIDATES), machine, rounds=repeats, confirm=0, seed=seed, tie=NEAR if near else 0.0
        )
        assert done.chosen is not None
        results.append((done.chosen == machine.best, machine.near(done.chosen), done.measurements))
    exact, close, used = (np.array(column) for column in zip(*results, strict=True))
    row |= {
        "grid": CANDIDATES * repeats,
        "exact": int(exact.sum()),
        "within_1pct": int(close.sum()),
        "trials": trials,
        "mean_measurements": float(used.mean()),
        "most_measurements": int(used.max()),
        "share_of_grid": float(used.mean()) / (CANDIDATES * repeats),
        "most_share_of_grid": float(used.max()) / (CANDIDATES * repeats),
    }
    return row


def false_gains(noise: float, trials: int) -> dict[str, object]:
    """How often a policy is recommended although 39 candidates and the baseline are equal."""
    policies, wrong, gains = [weft.Policy(max_ctas=n) for n in range(1, CANDIDATES)], 0, []
    for seed in range(trials):
        rng = np.random.default_rng([seed, 3])

        def measure(policy: weft.Policy, rng: np.random.Generator = rng) -> float:
            return float(math.exp(noise * rng.standard_normal()))

        tuned = weft.tune(lambda: None, measure=measure, candidates=policies, seed=seed)
        wrong += not tuned.leave
        gains += [] if tuned.leave else [tuned.gain_pct]
    return {"noise": noise, "trials": trials, "offered": wrong, "gains_pct": gains}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for case in CASES:
        if given.only not in case.name:
            continue
        for near in (False, True) if case.times in (uniform, clusters) else (False,):
            row = run(case, given.trials, near, given.first)
            rows.append(row)
            if row["repeats"] is None:
                print(
                    f"{case.name:32} {row['judged']:9} a full grid needs more than 2048 repeats", flush=True
                )
                continue
            print(
                f"{case.name:32} {row['judged']:9} n {row['repeats']:5}  exact {row['exact']:3}  "
                f"within 1% {row['within_1pct']:3} of {given.trials}  measurements "
                f"{row['mean_measurements']:7.0f} (most {row['most_measurements']}) of {row['grid']}: "
                f"{row['share_of_grid']:.2f} of the grid",
                flush=True,
            )
    alike = [false_gains(noise, given.trials) for noise in (0.003, 0.02, NOISE)] if not given.only else []
    for row in alike:
        print(f"all alike, noise {row['noise']}: a policy offered in {row['offered']} of {row['trials']}")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        command = f"python benchmarks/race.py --trials {given.trials}"
        document = {
            "command": command,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "rows": rows,
            "all_alike": alike,
        }
        write_whole(given.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
