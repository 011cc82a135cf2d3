"""The committed lab results as cases for the simulator: one half for the fit, the other for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from weft.bench.results import load_results
from weft.policy import Policy
from weft.workload import Workload

LAB = Path(__file__).parents[1] / "results" / "lab"
SUITES = ("paper", "modern", "quick", "quick_again")
SEED = 2606


@dataclass(frozen=True)
class Case:
    """One measured candidate of one workload; `ms`: time of the pipeline."""

    suite: str
    cell: str
    label: str
    workload: Workload
    policy: Policy
    mode: str
    ctas: int
    ms: float


def cases() -> list[Case]:
    """Every measured candidate, plus compute alone and the collective alone for every cell."""
    found = []
    for suite in SUITES:
        seen = set()
        for row in load_results(LAB / f"{suite}.jsonl")[1]:
            if row["ms"] is None:
                continue
            workload, ctas = Workload.from_dict(row["workload"]), row["baseline_ctas"]
            policy = Policy.from_dict(row["policy"])
            common = (suite, row["cell"])
            found.append(Case(*common, row["candidate"], workload, policy, row["mode"], ctas, row["ms"]))
            if row["cell"] not in seen and row.get("compute_ms"):
                seen.add(row["cell"])
                plain = Policy()
                found.append(Case(*common, "compute", workload, plain, "compute", ctas, row["compute_ms"]))
                found.append(Case(*common, "comm", workload, plain, "comm", ctas, row["comm_ms"]))
    return found


def halves(found: list[Case]) -> tuple[list[Case], list[Case]]:
    """The cases to fit and to test, split by workload: all candidates of one are in the same half."""
    names = sorted({case.cell for case in found})
    random.Random(SEED).shuffle(names)
    fit = set(names[: len(names) // 2])
    return [c for c in found if c.cell in fit], [c for c in found if c.cell not in fit]
