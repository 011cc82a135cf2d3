"""A few of the fuzzer's programs, from fixed seeds: benchmarks/shim/fuzz.py runs many."""

from __future__ import annotations

import sys

import pytest
from building import ROOT
from test_nccl_routes import fake_nccl  # noqa: F401 (a fixture)

sys.path.append(str(ROOT / "benchmarks/shim"))
import fuzz
from fuzz import Batch, Tally

from weft.policy import Policy
from weft.rules import CommRule


@pytest.fixture
def batches(fake_driver, fake_nccl):  # noqa: F811
    rules, reserve = (
        Policy(comm_rules=(CommRule(ctas=2),)),
        Policy(residency=2, head_start="placed", sm_reserve=8),
    )
    nccl, driver = fuzz.environment(fake_nccl, fake_driver), fuzz.environment(fake_driver)
    return {
        "nccl": Batch("nccl", 1, 8, nccl, "NCCL", (("rules", rules, ()),)),
        "driver": Batch("driver", 1, 4, driver, "driver", (("reserve", reserve, ("trace",)),)),
    }


@pytest.mark.parametrize("what", ["nccl", "driver"])
def test_random_programs_run_as_natively(batches, what):
    tally = Tally()
    fuzz.fuzz(batches[what], tally)
    assert tally.differences == []
    assert tally.programs[what] == tally.compared == batches[what].count
    assert tally.calls[what] > 50 * batches[what].count


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("nccl", lambda program: program["results"].pop()),
        ("nccl", lambda program: program["reached"].update(ncclAllReduce=99)),
        ("driver", lambda program: program["launches"].pop()),
        ("driver", lambda program: program.update({"unsafe calls": 1})),
    ],
)
def test_a_difference_is_found(what, change):
    made = {
        "nccl": lambda: {"results": [["ncclAllReduce", 0, None]], "reached": {"ncclAllReduce": 1}},
        "driver": lambda: {
            "results": [["plain", 0]],
            "launches": [["gemm", 1, 128, 0]],
            "unsafe calls": 0,
            "calls of a dead context": 0,
            "broken programmatic": 0,
        },
    }[what]
    native, under = made(), made()
    assert fuzz.COMPARE[what](native, under, False) is None
    change(under)
    assert fuzz.COMPARE[what](native, under, False)
