"""How often FiCCO's rule picks the best finer schedule: both readings, and every rule of the published form.

Published are the quantities (operations per byte, traffic, M against K), not the thresholds and not which
schedule each test selects. `every_rule` tries them all: it shows what the published facts leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median

from weft.ops.case import Case
from weft.ops.explore import FINER
from weft.ops.ficco import RULE_READINGS, ficco_pick, gemm_traffic, machine_balance

NEAR_PCT = 0.1
"""Schedules this close to the best count as the best."""
CUT_ROWS = tuple(name for name in FINER if name.endswith("1d"))
CUT_COLUMNS = "uniform-fused-2d"
THRESHOLDS = 24
"""Thresholds that are tried of each quantity, evenly spread over the cases."""


@dataclass(frozen=True)
class RuleCase:
    """A case, and how much longer than the best finer schedule each of them takes, in percent."""

    case: Case
    lost_pct: dict[str, float]

    def right(self, schedule: str) -> bool:
        return self.lost_pct[schedule] <= NEAR_PCT


@dataclass(frozen=True)
class Accuracy:
    """Of a rule: percent of cases in which it names the best schedule, and the mean loss in the others."""

    right_pct: float
    lost_pct: float


@dataclass(frozen=True)
class EveryRule:
    """Percent of cases right over all rules of the published form."""

    rules: int
    least_pct: float
    median_pct: float
    most_pct: float


def accuracy(lost: Sequence[float]) -> Accuracy:
    """Of a rule whose choices take this many percent longer than the best finer schedule."""
    missed = [each for each in lost if each > NEAR_PCT]
    return Accuracy(100 * (1 - len(missed) / len(lost)), fmean(missed) if missed else 0.0)


def readings(cases: Sequence[RuleCase]) -> dict[str, Accuracy]:
    """Of both readings of the rule."""
    return {
        reading: accuracy([one.lost_pct[ficco_pick(one.case, reading).schedule] for one in cases])
        for reading in RULE_READINGS
    }


def every_rule(cases: Sequence[RuleCase]) -> EveryRule:
    """All rules with one threshold for operations per byte and one for traffic.

    Each of the four regions has one of the schedules that cut rows; where M < K, columns may be cut instead.
    """
    measures = [gemm_traffic(one.case) for one in cases]
    few_rows = [one.case.rows < one.case.k for one in cases]
    found = []
    for by_columns in (True, False):
        fixed = sum(
            one.right(CUT_COLUMNS) for one, few in zip(cases, few_rows, strict=True) if by_columns and few
        )
        rest = [i for i, few in enumerate(few_rows) if not (by_columns and few)]
        for intensity, traffic in product(*(_thresholds([m[i] for m in measures]) for i in (0, 1))):
            regions: list[list[int]] = [[], [], [], []]
            for i in rest:
                regions[2 * (measures[i][0] >= intensity) + (measures[i][1] >= traffic)].append(i)
            right = [{name: sum(cases[i].right(name) for i in each) for name in CUT_ROWS} for each in regions]
            found += [
                fixed + sum(counts[name] for counts, name in zip(right, names, strict=True))
                for names in product(CUT_ROWS, repeat=4)
            ]
    share = 100 / len(cases)
    return EveryRule(len(found), share * min(found), share * median(found), share * max(found))


def compute_bound(cases: Sequence[RuleCase]) -> int:
    """Cases with more operations per byte than the machine balance, which that test cannot separate."""
    return sum(gemm_traffic(one.case)[0] >= machine_balance(one.case) for one in cases)


def _thresholds(values: Sequence[float]) -> list[float]:
    ordered = sorted(set(values))
    step = max(1, len(ordered) // THRESHOLDS)
    return [*ordered[::step], ordered[-1] + 1.0]
