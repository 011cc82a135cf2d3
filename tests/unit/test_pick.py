"""The pick from sizes alone, against exhaustive search on shapes that no fit has seen."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from weft.errors import UsageError
from weft.ops import pick as module
from weft.ops.case import Case
from weft.ops.pick import estimates, pick
from weft.ops.schedule import OPERATIONS
from weft.ops.simulate import exhaustive
from weft.policy import SCHEDULES
from weft.sim.fabric import TOPOLOGIES


def cases(count: int) -> list[Case]:
    draw = random.Random("pick, unit tests")

    def size(high: int) -> int:
        return round(math.exp(draw.uniform(math.log(192), math.log(high))))

    found = []
    for i in range(count):
        topology = TOPOLOGIES[i % 4]
        found.append(
            Case(
                operation=OPERATIONS[i // 4 % 3],
                m=size(200_000),
                n=size(40_000),
                k=size(40_000),
                ranks=draw.choice([2, 3, 4, 6, 8]) if topology == "pcie" else draw.randint(2, 16),
                gpu=draw.choice(["h200", "a100-80gb", "a40", "mi250x", "mi300x", "b200"]),
                topology=topology,
            )
        )
    return found


def test_the_pick_is_close_to_the_best_and_never_loses_to_serial():
    regrets, against_serial = [], []
    for case in cases(36):
        times = {(r.name, r.engine): r.seconds for r in exhaustive(case)}
        found = pick(case.operation, case.m, case.n, case.k, case.ranks, case.dtype, case.gpu, case.topology)
        taken = times[found.schedule, found.engine]
        regrets.append(taken / min(times.values()) - 1)
        against_serial.append(taken / times["serial", "sm"] - 1)
    assert sum(r <= 0.02 for r in regrets) / len(regrets) >= 0.92
    assert sum(regrets) / len(regrets) <= 0.01
    assert max(against_serial) <= 0.005


def test_it_says_why_in_one_sentence():
    found = pick("all_gather_matmul", 131072, 2048, 16384, 8, "bf16", "mi300x", "mesh")
    assert found.schedule == "hetero-fused-1d"
    assert found.engine == "dma"
    for part in ("hetero-fused-1d on dma", "operations per byte", "7 links", "hides the first transfer"):
        assert part in found.why
    assert "\n" not in found.why
    assert ". " not in found.why


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_its_reason(name):
    case = Case(operation="matmul_reduce_scatter", m=8192, n=8192, k=8192, ranks=8, gpu="h100")
    of = {e.schedule: e for e in estimates(case)}
    assert module.why(case, of[name], of["serial"]).startswith(f"{name} on ")


def test_ranks_that_cannot_be_simulated_stay_serial(monkeypatch):
    """22 GPUs do not fill PCIe switches evenly."""
    monkeypatch.setattr(module, "seconds", lambda case, name, engine: 1.0 if name == "serial" else 0.5)
    module._pick.cache_clear()
    found = pick("all_gather_matmul", 4096, 4096, 4096, 22, gpu="h100", topology="pcie")
    module._pick.cache_clear()
    assert found.schedule == "serial"


def test_a_tiny_gemm_stays_serial():
    for operation in OPERATIONS:
        assert pick(operation, 64, 64, 64, 8).schedule == "serial"


def test_only_engines_that_are_there():
    for engine in ("dma", "sm"):
        assert pick("all_gather_matmul", 65536, 4096, 8192, 8, engines=(engine,)).engine == engine
    with pytest.raises(UsageError, match="no engine to pick from"):
        pick("all_gather_matmul", 64, 64, 64, 8, engines=())


def test_only_a_pick_in_doubt_is_simulated_and_the_same_call_is_remembered(monkeypatch):
    def refuse(*_):
        raise AssertionError("this pick must not simulate")

    monkeypatch.setattr("weft.ops.simulate.flow", refuse)
    module._pick.cache_clear()
    sizes = ("all_gather_matmul", 131072, 2048, 16384, 8, "bf16", "mi300x")
    assert pick("all_to_all_matmul", 128, 128, 128, 5, "fp16", "h200", "ring").schedule == "serial"
    alone = "hetero-fused-1d", "dma"
    monkeypatch.setattr(module, "seconds", lambda _, *found: 1 - 0.5 * (found == alone))
    module._pick.cache_clear()
    assert (pick(*sizes, "mesh").schedule, pick(*sizes, "mesh").engine) == alone
    assert pick(*sizes, "mesh") is pick(*sizes, "mesh")
    # A small gain, several close schedules, ranks that differ.
    for gain, most, topology in ((0.05, 1, "mesh"), (0.5, 2, "mesh"), (0.5, 1, "pcie")):
        close = [("hetero-fused-1d", "dma"), ("uniform-fused-1d", "dma")][:most]
        monkeypatch.setattr(module, "seconds", lambda _, *found, g=gain, c=close: 1 - g * (found in c))
        module._pick.cache_clear()
        with pytest.raises(AssertionError, match="must not simulate"):
            pick(*sizes[:4], 7, *sizes[5:], topology)
    module._pick.cache_clear()


def test_a_pick_that_the_simulator_does_not_confirm_stays_serial(monkeypatch):
    """An estimate that promises too much must not cost anything."""
    monkeypatch.setattr(module, "seconds", lambda case, name, engine: 1.0 if name == "serial" else 0.95)
    module._pick.cache_clear()
    case = Case(operation="all_gather_matmul", m=2703, n=4622, k=1614, ranks=14, gpu="h200", topology="pcie")
    times = {(r.name, r.engine): r.seconds for r in exhaustive(case)}
    found = pick(case.operation, case.m, case.n, case.k, case.ranks, case.dtype, case.gpu, case.topology)
    module._pick.cache_clear()
    assert times[found.schedule, found.engine] <= times["serial", "sm"]


def test_of_close_estimates_the_simulator_decides(monkeypatch):
    """Estimates in the wrong order by 8% cost nothing."""
    case = Case(
        operation="all_gather_matmul", m=65536, n=4096, k=8192, ranks=4, gpu="mi300x", topology="mesh"
    )
    times = {(r.name, r.engine): r.seconds for r in exhaustive(case)}
    best = min(times, key=lambda key: times[key])
    monkeypatch.setattr(module, "seconds", lambda _, *found: times[found] * (1.08 if found == best else 1.0))
    module._pick.cache_clear()
    found = pick(case.operation, case.m, case.n, case.k, case.ranks, case.dtype, case.gpu, case.topology)
    module._pick.cache_clear()
    assert times[found.schedule, found.engine] <= 1.002 * times[best]


def test_equal_times_go_to_dma_and_the_simpler_schedule(monkeypatch):
    monkeypatch.setattr(module, "seconds", lambda case, name, engine: 1.0 if name == "serial" else 0.5)
    same = SimpleNamespace(seconds=0.5)
    serial = SimpleNamespace(seconds=1.0)
    monkeypatch.setattr(
        "weft.ops.simulate.simulate", lambda case, name, engine: serial if name == "serial" else same
    )
    module._pick.cache_clear()
    found = pick("all_gather_matmul", 999, 999, 999, 3)
    module._pick.cache_clear()
    assert (found.schedule, found.engine) == ("shard", "dma")


def test_a_gain_within_the_margin_is_left_alone(monkeypatch):
    monkeypatch.setattr(module, "seconds", lambda case, name, engine: 1.0 if name == "serial" else 0.995)
    times = {True: SimpleNamespace(seconds=1.0), False: SimpleNamespace(seconds=0.995)}
    monkeypatch.setattr("weft.ops.simulate.simulate", lambda case, name, engine: times[name == "serial"])
    module._pick.cache_clear()
    found = pick("all_gather_matmul", 999, 999, 999, 3)
    module._pick.cache_clear()
    assert found.schedule == "serial"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("all_reduce", 64, 64, 64, 8), "operation 'all_reduce' is not known"),
        (("all_gather_matmul", 0, 64, 64, 8), "M = 0 is not valid"),
        (("all_gather_matmul", 64, 64, 64, 1), "ranks 1 is not valid"),
        (("all_gather_matmul", 64, 64, 64, 8, "bf16", "h900"), "no GPU preset"),
        (("all_gather_matmul", 64, 64, 64, 8, "bf16", "h100", "star"), "topology 'star'"),
    ],
)
def test_what_is_not_possible_is_named(words, said):
    with pytest.raises(UsageError, match=said):
        pick(*words)


def test_rows_that_must_be_permuted_are_in_the_estimate():
    """14 shards that differ below PCIe switches: a rank in the middle copies all of x once more."""
    case = Case(
        operation="matmul_reduce_scatter",
        m=41856,
        n=256,
        k=20480,
        ranks=14,
        dtype="fp16",
        gpu="a100-80gb",
        topology="pcie",
    )
    truth = {(r.name, r.engine): r.seconds for r in exhaustive(case)}["hetero-fused-1d", "dma"]
    (found,) = (e for e in estimates(case) if (e.schedule, e.engine) == ("hetero-fused-1d", "dma"))
    assert found.seconds == pytest.approx(truth, rel=0.05)
