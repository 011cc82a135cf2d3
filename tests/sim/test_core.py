"""Properties of the block scheduler that hold for any program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_building import MACHINE, SMALL, kernel, program

from weft.sim.core import DeadlockError, NeverFitsError, simulate_launches
from weft.sim.launches import Footprint, Launch, LaunchKind, Speed

SEEDS = range(60)


def finished(launches):
    """The outcome, or None for a random program whose collectives deadlock."""
    try:
        return simulate_launches(MACHINE, launches, log=True)
    except DeadlockError:
        return None


def test_most_random_programs_end():
    assert sum(finished(program(seed)) is not None for seed in SEEDS) > 40


@pytest.mark.parametrize("seed", SEEDS)
def test_no_resource_is_over_subscribed(seed):
    launches = program(seed)
    outcome = finished(launches)
    if outcome is None:
        return
    used = np.zeros((MACHINE.sms, 4))
    room = (
        MACHINE.warps_per_sm,
        MACHINE.blocks_per_sm,
        MACHINE.registers_per_sm,
        MACHINE.shared_bytes_per_sm,
    )
    for change in outcome.changes:
        foot = launches[change["launch"]].footprint
        used[change["sm"]] += change["change"] * np.array([foot.warps, 1, foot.registers, foot.shared_bytes])
        assert (used[change["sm"]] <= room).all()
        assert (used >= 0).all()
    assert not used.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_block_runs_once_and_after_its_dependencies(seed):
    launches = program(seed)
    outcome = finished(launches)
    if outcome is None:
        return
    assert (np.diff(outcome.changes["time"]) >= 0).all()
    for i, launch in enumerate(launches):
        mine = outcome.changes[outcome.changes["launch"] == i]
        assert mine["change"][mine["change"] > 0].sum() == launch.blocks
        assert mine["change"].sum() == 0
        assert outcome.end_s[i] >= outcome.start_s[i]
        for before, latency in launch.after:
            assert outcome.start_s[i] >= outcome.end_s[before] + latency - 1e-15


@pytest.mark.parametrize(("in_order", "ends_s"), [(False, 10e-6), (True, 20e-6)])
def test_two_small_launches_share_sms_only_where_each_starts_at_the_first(in_order, ends_s):
    both = [kernel(2, stream=0), kernel(2, stream=1)]
    outcome = simulate_launches(replace(MACHINE, in_order=in_order), both, log=True)
    sms = [set(outcome.changes["sm"][outcome.changes["launch"] == i]) for i in (0, 1)]
    assert sms == ([{0, 1}, {0, 1}] if in_order else [{0, 1}, {2, 3}])
    assert outcome.total_s == pytest.approx(ends_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_simulation_is_deterministic(seed):
    launches = program(seed)
    first, second = finished(launches), finished(launches)
    if first is not None:
        assert first.total_s == second.total_s
        assert (first.end_s == second.end_s).all()


@pytest.mark.parametrize("residents", [1, 2, 4])
def test_work_is_conserved(residents):
    # However many blocks share an SM, it works at its own rate: 40 blocks of 1 MB at 4 x 100 GB/s.
    foot = Footprint(warps=16 // residents, registers=0, shared_bytes=0)
    outcome = simulate_launches(MACHINE, [kernel(40, footprint=foot)])
    assert outcome.total_s == pytest.approx(40 * 1e6 / 4e11)
    assert outcome.block_events == 40


def test_a_block_alone_is_as_fast_as_its_window_allows():
    alone = kernel(1, speed=Speed(sm_rate=1e11, window_bytes=5e4))
    assert simulate_launches(MACHINE, [alone]).total_s == pytest.approx(1e6 / (5e4 / 1e-6))


def test_beyond_saturation_the_cache_is_shared_by_bytes_in_flight():
    machine = replace(MACHINE, cache_bytes_per_s=1e11)
    heavy = kernel(4, speed=Speed(block_rate=1e11, window_bytes=1e5))
    light = kernel(4, speed=Speed(block_rate=1e11, window_bytes=5e4), name="light")
    outcome = simulate_launches(machine, [heavy, light])
    # 6e5 bytes in flight at 1e11 B/s: heavy gets 2/3 until it ends, then light the rest.
    assert outcome.end_s[0] == pytest.approx(4e6 / (2e11 / 3))
    assert outcome.total_s == pytest.approx(8e6 / 1e11)


def test_device_memory_limits_what_misses_the_cache():
    machine = replace(MACHINE, memory_bytes_per_s=1e11)
    outcome = simulate_launches(machine, [kernel(8, speed=Speed(block_rate=1e11, miss=0.5))])
    assert outcome.total_s == pytest.approx(8e6 * 0.5 / 1e11)


def test_slack_absorbs_a_slow_memory_up_to_its_factor():
    machine = replace(MACHINE, cache_bytes_per_s=1e18, memory_bytes_per_s=2e11)
    greedy = kernel(8, speed=Speed(block_rate=1e11, miss=0.5))

    def slowed(spare):
        mover = kernel(1, speed=Speed(block_rate=1e9, miss=0.5, spare=spare), name="mover")
        alone = simulate_launches(machine, [mover]).total_s
        return simulate_launches(machine, [replace(greedy, runs=((8, 1e9),)), mover]).end_s[1] / alone

    assert slowed(1.0) > 1.5
    assert slowed(1.0) / slowed(1.2) == pytest.approx(1.2, rel=0.02)
    assert slowed(8.0) == pytest.approx(1.0, rel=1e-6)


def test_short_requests_take_more_of_the_cache_only_where_it_is_the_limit():
    def seconds(weight, cache):
        machine = replace(MACHINE, cache_bytes_per_s=cache)
        return simulate_launches(
            machine, [kernel(8, speed=Speed(block_rate=1e11, window_bytes=1e5, weight=weight))]
        ).total_s

    assert seconds(1.1, 1e18) == seconds(1.0, 1e18)
    assert seconds(1.1, 1e11) / seconds(1.0, 1e11) == pytest.approx(1.1, rel=0.01)


def test_priority_orders_pending_blocks_without_preemption():
    full = kernel(32)
    urgent = kernel(4, name="urgent", priority=1, footprint=replace(SMALL, shared_bytes=100_000))
    late = replace(urgent, priority=0)
    delay = Launch(name="wait", kind=LaunchKind.DELAY, seconds=1e-6)

    def start(launch):
        return simulate_launches(MACHINE, [full, delay, replace(launch, after=((1, 0.0),))]).start_s[2]

    # 16 blocks are resident and take 40 µs together; nothing is preempted.
    assert start(urgent) == pytest.approx(40e-6)
    assert start(late) == pytest.approx(80e-6)


def test_a_pool_keeps_its_sms_until_its_work_is_done():
    pool = Launch(
        name="pool",
        kind=LaunchKind.POOL,
        runs=((4, 0.0),),
        units=40,
        unit_bytes=1e6,
        footprint=replace(SMALL, shared_bytes=90_000),
        speed=Speed(sm_rate=1e11),
    )
    delay = Launch(name="wait", kind=LaunchKind.DELAY, seconds=1e-6)
    urgent = kernel(1, name="urgent", priority=1, after=((1, 0.0),))
    outcome = simulate_launches(MACHINE, [pool, delay, urgent])
    assert outcome.end_s[0] == pytest.approx(100e-6)
    assert outcome.start_s[2] == pytest.approx(100e-6)


def test_a_channel_moves_bytes_once_every_rank_is_resident():
    delay = Launch(name="wait", kind=LaunchKind.DELAY, seconds=7e-6)
    rank = Launch(name="c", comm=True, runs=((2, 1e6),), footprint=SMALL, speed=Speed(block_rate=1e11))
    outcome = simulate_launches(
        MACHINE, [delay, replace(rank, group=1), replace(rank, group=1, after=((0, 0.0),))]
    )
    assert outcome.start_s[1] == 0
    assert outcome.end_s[1] == pytest.approx(17e-6)


def test_reserved_sms_stay_free():
    outcome = simulate_launches(MACHINE, [kernel(40, first_sm=3)], log=True)
    assert set(outcome.changes["sm"]) == {3}


@pytest.mark.parametrize("more", range(1, 40))
def test_time_never_falls_when_a_kernel_grows(more):
    for sizes in ((more, more + 1), (7 * more, 7 * more + 3)):
        first, second = (simulate_launches(MACHINE, [kernel(n), kernel(n, after=((0, 0.0),))]) for n in sizes)
        assert second.total_s >= first.total_s - 1e-15


def test_a_kernel_that_fits_no_sm_is_named():
    with pytest.raises(NeverFitsError, match="k: no block fits on an SM of toy"):
        simulate_launches(MACHINE, [kernel(footprint=replace(SMALL, shared_bytes=200_000))])


def test_a_collective_that_can_never_be_resident_is_a_deadlock():
    rank = Launch(name="c", comm=True, runs=((4, 1e6),), footprint=replace(SMALL, shared_bytes=90_000))
    with pytest.raises(DeadlockError, match="c: its blocks can never all be resident on toy"):
        simulate_launches(MACHINE, [replace(rank, group=0), replace(rank, group=0)])


def test_cost_grows_no_faster_than_the_blocks():
    few, many = (simulate_launches(MACHINE, [kernel(n)]).block_events for n in (1000, 100_000))
    assert (few, many) == (1000, 100_000)
