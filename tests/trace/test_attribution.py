"""Runs with a known cause: that cause gets the time. On every trace the causes add up to the exposed time."""

from __future__ import annotations

import pytest
from trace_building import BASE_NS
from trace_programs import comm, compute, host, run, wait

import weft
from weft.trace.attribute import CAUSES

US = 1_000
CLOCKS = [BASE_NS, BASE_NS + 3_000_000_000]  # hosts three seconds apart


def analyzed(tmp_path, programs, clocks=CLOCKS):
    for trace in run(programs, clocks):
        trace.write(tmp_path / f"rank{trace.rank}.json.gz")
    return weft.analyze(tmp_path)


def shares(analysis, ranks=(0, 1)):
    exposed = sum(analysis.ranks[r].figures.exposed_ns for r in ranks)
    assert exposed > 0
    totals = [analysis.ranks[r].attribution.totals() for r in ranks]
    assert sum(sum(t.values()) for t in totals) == exposed
    return {cause: sum(t[cause] for t in totals) / exposed for cause in CAUSES}


def ahead(*ops):
    """The CPU runs ahead of the GPU: a long kernel first, so that every launch is early."""
    return [compute(3_000 * US), *ops]


def test_a_collective_that_the_next_compute_needs_has_nothing_to_hide_behind(tmp_path):
    step = [compute(200 * US), comm(150 * US), wait()]
    found = shares(analyzed(tmp_path, [ahead(*step * 20), ahead(*step * 20)]))
    assert found["nothing_to_hide_behind"] >= 0.95


def test_the_last_collective_has_nothing_to_hide_behind(tmp_path):
    step = [compute(200 * US), comm(150 * US)]
    found = shares(analyzed(tmp_path, [ahead(*step * 3), ahead(*step * 3)]))
    assert found["nothing_to_hide_behind"] >= 0.95


def test_communication_that_outlasts_compute_has_nothing_to_hide_behind(tmp_path):
    """Back-to-back collectives: each waits for the one before, which has no avoidable cause."""
    step = [compute(100 * US), comm(400 * US)]
    found = shares(analyzed(tmp_path, [ahead(*step * 10), ahead(*step * 10)]))
    assert found["nothing_to_hide_behind"] >= 0.95


@pytest.mark.parametrize("long_us", [300, 800])
def test_a_collective_starved_by_compute_waited_behind_it(tmp_path, long_us):
    step = [compute(100 * US), comm(150 * US), compute(long_us * US, greedy=True), wait()]
    found = shares(analyzed(tmp_path, [ahead(*step * 10), ahead(*step * 10)]))
    assert found["behind_compute"] >= 0.95


def test_a_starved_collective_holds_up_the_next_one(tmp_path):
    """Both wait for the greedy kernel; the second does so because the first runs late."""
    step = [compute(50 * US), comm(100 * US), comm(100 * US), compute(400 * US, greedy=True)]
    found = shares(analyzed(tmp_path, [ahead(*[*step, wait()] * 8)] * 2))
    assert found["behind_compute"] >= 0.95


def test_a_late_launch_on_an_idle_gpu(tmp_path):
    """The CPU is slow before each collective and after it; nothing runs meanwhile."""
    step = [compute(200 * US), host(900 * US), comm(150 * US), host(600 * US)]
    found = shares(analyzed(tmp_path, [step * 10, step * 10]))
    assert found["launched_late"] >= 0.95


def test_a_late_launch_although_the_data_was_ready_long_ago(tmp_path):
    """The collective needs only the first kernel, as a recorded event says; the second could have hidden it."""
    step = []
    for i in range(10):
        step += [compute(100 * US), compute(400 * US), host(560 * US), comm(150 * US, after=2 * i), wait()]
    found = shares(analyzed(tmp_path, [step, step]))
    assert found["launched_late"] >= 0.95


def test_a_launch_that_comes_just_when_compute_has_run_out(tmp_path):
    """Little is lost before the collective, but the CPU launches nothing for it to hide behind either."""
    step = [compute(200 * US), host(210 * US), comm(150 * US), host(600 * US)]
    found = shares(analyzed(tmp_path, [step * 10, step * 10]))
    assert found["launched_late"] >= 0.9  # the last collective is a tail


def test_a_cpu_that_waits_for_the_gpu_is_not_late(tmp_path):
    step = [compute(200 * US), host(210 * US), comm(150 * US), host(600 * US)]
    traces = run([step * 10, step * 10], CLOCKS)
    for trace in traces:
        for event in [e for e in trace.events if "nccl" in e["name"]]:
            waiting = {**event, "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "args": {}}
            trace.events.append(waiting)
        trace.write(tmp_path / f"rank{trace.rank}.json")
    assert shares(weft.analyze(tmp_path))["nothing_to_hide_behind"] >= 0.8


def test_compute_launched_late_beside_a_collective(tmp_path):
    """The collective starts at once, but the CPU takes long to launch the compute that overlaps with it."""
    step = [compute(50 * US), comm(1_000 * US), host(700 * US), compute(500 * US), host(900 * US)]
    found = shares(analyzed(tmp_path, [step * 10, step * 10]))
    assert found["launched_late"] >= 0.95


def test_a_rank_that_waits_for_a_slower_one(tmp_path):
    quick = [compute(100 * US), comm(20 * US), wait()]
    slow = [compute(1_100 * US), comm(20 * US), wait()]
    analysis = analyzed(tmp_path, [ahead(*quick * 20), ahead(*slow * 20)])
    assert shares(analysis, ranks=(0,))["slower_rank"] >= 0.95
    assert shares(analysis, ranks=(1,))["slower_rank"] == 0  # the slow rank waits for nobody


def test_the_slower_rank_may_change_from_call_to_call(tmp_path):
    first, second = [], []
    for i in range(20):
        for program, slow in ((first, i % 2), (second, not i % 2)):
            program += [compute((2_000 if slow else 100) * US), comm(30 * US), wait()]
    assert shares(analyzed(tmp_path, [ahead(*first), ahead(*second)]))["slower_rank"] >= 0.95


def test_clocks_are_laid_over_each_other_by_the_ends(tmp_path):
    step = [compute(200 * US), comm(150 * US), wait()]
    analysis = analyzed(tmp_path, [ahead(*step * 20), ahead(*step * 20)])
    assert analysis.ranks[1].matched.offset_ns == 3_000_000_000
    assert analysis.ranks[1].matched.matched.all()


def test_profilers_that_started_one_collective_apart_still_match(tmp_path):
    """Rank 1's trace begins one call later, so the n-th call of one is the n-1st of the other."""
    steps = [op for i in range(20) for op in (compute((200 + 13 * i) * US), comm(150 * US), wait())]
    traces = run([ahead(*steps), ahead(*steps)], CLOCKS)
    first = min((e for e in traces[1].events if "nccl" in e["name"]), key=lambda e: e["ts"])
    traces[1].events.remove(first)
    for trace in traces:
        trace.write(tmp_path / f"rank{trace.rank}.json")
    analysis = weft.analyze(tmp_path)
    assert analysis.ranks[1].matched.offset_ns == 3_000_000_000
    assert shares(analysis)["slower_rank"] == 0


def test_one_rank_alone_blames_no_other(tmp_path):
    quick = [compute(100 * US), comm(20 * US), wait()]
    slow = [compute(1_100 * US), comm(20 * US), wait()]
    traces = run([ahead(*quick * 20), ahead(*slow * 20)], CLOCKS)
    analysis = weft.analyze(traces[0].write(tmp_path / "rank0.json"))
    assert shares(analysis, ranks=(0,))["slower_rank"] == 0


def test_per_collective_causes_add_up_to_the_ranks(tmp_path):
    step = [compute(100 * US), comm(150 * US), compute(300 * US, greedy=True), wait()]
    document = analyzed(tmp_path, [ahead(*step * 10), ahead(*step * 10)]).to_json()
    for rank in document["ranks"]:
        assert sum(rank["attribution"].values()) == pytest.approx(rank["exposed_comm_us"], abs=1e-6)
        assert sum(c["exposed_us"] for c in rank["collectives"]) == pytest.approx(
            rank["exposed_comm_us"], abs=1e-6
        )
