"""How often FiCCO's rule picks the best finer schedule: both readings, and every rule of the published form.

The paper gives the quantities that are tested (operations per byte, traffic, M against K), but neither the
thresholds nor the schedule that each test selects. `every_rule` tries all of them, and so shows how much the
published facts leave open.
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
"""A schedule that is at most this many percent slower than the best counts as the best."""
CUT_ROWS = tuple(name for name in FINER if name.endswith("1d"))
CUT_COLUMNS = "uniform-fused-2d"
THRESHOLDS = 24
"""Number of thresholds tried per quantity, about evenly spread over the cases."""


@dataclass(frozen=True)
class RuleCase:
    """A case, and how much longer each finer schedule takes than the best one, in percent."""

    case: Case
    lost_pct: dict[str, float]

    def right(self, schedule: str) -> bool:
        return self.lost_pct[schedule] <= NEAR_PCT


@dataclass(frozen=True)
class Accuracy:
    """Percent of cases in which a rule names the best schedule, and its mean loss (%) in the others."""

    right_pct: float
    lost_pct: float


@dataclass(frozen=True)
class EveryRule:
    """Number of rules of the published form, and the percent of cases in which they are right."""

    rules: int
    least_pct: float
    median_pct: float
    most_pct: float


def accuracy(lost: Sequence[float]) -> Accuracy:
    """The accuracy of a rule. `lost`: percent by which each choice is slower than the best finer schedule."""
    missed = [each for each in lost if each > NEAR_PCT]
    return Accuracy(100 * (1 - len(missed) / len(lost)), fmean(missed) if missed else 0.0)


def readings(cases: Sequence[RuleCase]) -> dict[str, Accuracy]:
    """The accuracy of both readings of the rule."""
    return {
        reading: accuracy([one.lost_pct[ficco_pick(one.case, reading).schedule] for one in cases])
        for reading in RULE_READINGS
    }


def every_rule(cases: Sequence[RuleCase]) -> EveryRule:
    """Evaluate all rules with one threshold for operations per byte and one for traffic.

    A rule assigns one of the schedules that cut rows to each of the four regions. Half of the rules cut
    columns instead where M < K.
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
    """Number of cases above the machine balance in operations per byte, which that test cannot separate."""
    return sum(gemm_traffic(one.case)[0] >= machine_balance(one.case) for one in cases)


def _thresholds(values: Sequence[float]) -> list[float]:
    ordered = sorted(set(values))
    step = max(1, len(ordered) // THRESHOLDS)
    return [*ordered[::step], ordered[-1] + 1.0]
