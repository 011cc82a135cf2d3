"""Step times by input size: what sizes explain, and what they must not be credited with."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from weft.measure.copied_by_policy import CopiedByPolicy
from weft.measure.input_sizes import InputSizes, SizedStep
from weft.policy import Policy
from weft.tuning.live.trial import Record, Sample, Trial, ask

MB = 1e6


def learned(steps: list[SizedStep], *, settled: bool = True) -> InputSizes:
    sizes = InputSizes()
    for step in steps:
        sizes.outdated(step)
        sizes.note(step)
    if settled:
        sizes.settle()
    return sizes


def drawn(count: int, seed: int = 0, least: float = 0.8, most: float = 1.2) -> list[SizedStep]:
    """Steps of 100 ms per MB, with 1% scatter."""
    r = random.Random(seed)
    lengths = [r.uniform(least, most) for _ in range(count + 1)]
    return [
        SizedStep(100 * size * math.exp(r.gauss(0, 0.01)), MB * size, MB * before)
        for before, size in pairwise(lengths)
    ]


def scatter(sizes: InputSizes, steps: list[SizedStep]) -> float:
    return stdev(math.log(sizes.usual_ms(step)) for step in steps)


def test_what_a_size_explains_is_taken_out_of_later_steps():
    sizes, later = learned(drawn(16)), drawn(50, seed=1)
    assert sizes.matter
    assert stdev(math.log(step.ms) for step in later) > 0.1
    assert scatter(sizes, later) < 0.015


def test_inputs_that_are_copied_one_step_in_advance_explain_the_next_step():
    ahead = [SizedStep(step.ms, step.before, step.size) for step in drawn(66)]
    assert scatter(learned(ahead[:16]), ahead[16:]) < 0.015


def test_a_step_that_was_never_explained_keeps_its_time():
    """Before there are enough steps, where sizes are equal, and where they explain nothing."""
    r = random.Random(2)
    assert learned(drawn(7)).usual_ms(SizedStep(120, 1.2 * MB, MB)) == 120
    assert not learned([SizedStep(r.uniform(80, 120), MB, MB) for _ in range(64)]).matter
    assert not learned([SizedStep(100, r.uniform(0.5, 1.5) * MB, MB) for _ in range(64)]).matter


def test_inputs_that_are_suddenly_much_longer_are_seen():
    """A new sequence length is a new pace. It is not converted by a line that is not known to hold there."""
    twice = SizedStep(200, 2 * MB, 2 * MB)
    assert learned(drawn(16)).usual_ms(twice) == 200
    assert 130 < learned(drawn(16)).usual_ms(twice, beyond=True) < 200


def test_inputs_that_slowly_become_longer_do_not_make_times_jump():
    """A few lengths beyond the known range would look like stalls, and half of them like two paces."""
    sizes = learned(drawn(16))
    for growth in (1.0, 1.1, 1.2, 1.3):
        times = [
            sizes.usual_ms(SizedStep(step.ms * growth, step.size * growth, step.before * growth), beyond=True)
            for step in drawn(50, seed=7)
        ]
        assert stdev(map(math.log, times)) < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_sizes_that_have_nothing_to_do_with_the_times_do_not_matter(seed):
    r = random.Random(seed)
    steps = [SizedStep(100 * math.exp(r.gauss(0, 0.1)), r.uniform(0.5, 1.5) * MB, MB) for _ in range(64)]
    assert not learned(steps).matter


def test_a_warm_up_during_which_inputs_grow_is_no_reason_to_expect_less_time_for_more():
    steps = [SizedStep(100 + 50 * 0.8**i, MB * (1 + i / 20), MB) for i in range(16)]
    assert not learned(steps).matter


def test_some_stalls_do_not_change_what_is_learned():
    steps = [
        SizedStep(step.ms * (3 if i % 6 == 0 else 1), step.size, step.before)
        for i, step in enumerate(drawn(24))
    ]
    assert scatter(learned(steps), drawn(50, seed=3)) < 0.025


def test_times_stay_comparable_while_more_is_learned():
    steps = drawn(64)
    sizes = learned(steps[:16])
    usual = SizedStep(100, MB, MB)
    before = sizes.usual_ms(usual)
    for step in steps[16:]:
        sizes.note(step)
    assert sizes.usual_ms(usual) == pytest.approx(before, rel=0.005)


def test_a_job_that_gets_other_inputs_is_learned_anew():
    sizes, others = learned(drawn(32)), drawn(40, seed=4, least=2.0, most=3.0)
    assert not any(sizes.outdated(step) for step in drawn(32, seed=5))
    noticed = next(i for i, step in enumerate(others) if sizes.outdated(step))
    assert noticed < 10
    assert not sizes.matter
    for step in others[noticed:]:
        sizes.note(step)
    assert scatter(sizes, drawn(50, seed=6, least=2.0, most=3.0)) < 0.015


def test_inputs_that_explain_the_first_steps_only_are_not_used_later():
    """For example while the first epoch's files are not cached, or shapes are being compiled."""
    r, sizes = random.Random(0), InputSizes()
    later = []
    for number in range(200):
        size = r.uniform(0.8, 1.2)
        step = SizedStep((100 * size if number < 30 else 100) * math.exp(r.gauss(0, 0.01)), MB * size, MB)
        later.append(sizes.usual_ms(step))
        sizes.outdated(step)
        sizes.note(step)
    assert stdev(later[36:46]) > 5
    assert stdev(later[60:]) < 2


@pytest.mark.parametrize("constant", [40, 100, 1000])
def test_inputs_that_begin_to_vary_are_used(constant):
    r, sizes = random.Random(1), InputSizes()
    steps = [SizedStep(100 * math.exp(r.gauss(0, 0.01)), MB, MB) for _ in range(constant)]
    steps += drawn(300, seed=2)
    times = []
    for step in steps:
        times.append(sizes.usual_ms(step))
        sizes.outdated(step)
        sizes.note(step)
    assert stdev(math.log(ms) for ms in times[-100:]) < 0.02


def test_a_job_that_alternates_is_not_made_more_uneven():
    """Two models in turns: the input tells nothing of the second one's time."""
    for seed in range(10):
        r, sizes = random.Random(seed), InputSizes()
        for number in range(200):
            size = r.uniform(0.8, 1.2)
            ms, more = (100 * size, 1) if number % 2 else (200, 3)
            step = SizedStep(ms * math.exp(r.gauss(0, 0.01)), MB * more * size, MB)
            sizes.outdated(step)
            sizes.note(step, 0 if number < 16 else r.randrange(3))  # then other policies run in between
            assert not sizes.matter


# --- the steps of a job -------------------------------------------------------------------------------------


def asked(record: Record, samples: list[tuple[Trial, Sample]]) -> list[float]:
    """The step times that weft uses after accounting for sizes. The first 16 steps are a warm-up."""
    times = []
    for trial, sample in samples:
        if record.number >= 16:
            record.inputs.settle()
        asking = ask(trial, record, "warm-up")
        next(asking)
        with pytest.raises(StopIteration) as end:
            asking.send(sample)
        times.append(end.value.value.ms)
    return times


def of_ranks(
    count: int, *, light: bool = False, whole: bool = False, seed: int = 0
) -> list[tuple[Trial, Sample]]:
    """Steps whose time depends on the longest input of three ranks. A watch (`light`) knows only the first
    rank's, unless it knows the `whole`."""
    r, steps = random.Random(seed), []
    for _ in range(count):
        copied = tuple(MB * r.uniform(0.5, 1.5) for _ in range(3))
        sample = Sample(max(copied) / 1e4, copied=copied[:1] if light and not whole else copied)
        steps.append((Trial(Policy(), light=light), sample))
    return steps


def test_the_longest_input_of_all_ranks_counts():
    times = asked(Record(), of_ranks(60))
    assert stdev(times[:8]) > 5
    assert max(times[24:]) - min(times[24:]) < 1


def test_a_watch_does_not_take_the_first_ranks_input_for_the_longest():
    record = Record()
    asked(record, of_ranks(60))
    watched = of_ranks(60, light=True, seed=1)
    before = [math.log(sample.ms) for _, sample in watched]
    assert stdev(map(math.log, asked(record, watched))) < 1.05 * stdev(before)


def test_a_watch_that_knows_the_first_ranks_input_only_takes_as_long_as_what_was_measured_with_all():
    """The usual input of a search is that of its first steps: by it, no step may look slower or faster later."""
    for seed in range(5):
        record = Record()
        before = asked(record, of_ranks(200, seed=seed))[24:]
        watched = asked(record, of_ranks(400, light=True, seed=seed + 100))
        assert fmean(watched) == pytest.approx(fmean(before), rel=0.04)


def test_a_watch_asks_all_ranks_for_their_inputs_once_the_first_ranks_vary():
    record = Record()
    same = [(Trial(Policy()), Sample(100.0, copied=(MB, MB, MB)))] * 80
    asked(record, same)
    assert not record.inputs.of_all_ranks
    asked(record, [(Trial(Policy(), light=True), Sample(100.0, copied=(MB,)))] * 80)
    assert not record.inputs.of_all_ranks
    asked(record, of_ranks(200, light=True))
    assert record.inputs.of_all_ranks
    times = asked(record, of_ranks(300, light=True, whole=True))
    assert max(times[-50:]) - min(times[-50:]) < 1


def test_steps_that_were_timed_together_count_by_their_mean_input():
    record, r = Record(), random.Random(0)
    steps = [
        (Trial(Policy(), 4, light=True), Sample(100 * size, copied=(MB * size,)))
        for size in (r.uniform(0.8, 1.2) for _ in range(40))
    ]
    times = asked(record, steps)
    assert max(times[24:]) - min(times[24:]) < 0.1


def test_the_page_shows_steps_as_long_as_they_were():
    record = Record()
    samples = of_ranks(40)
    times = asked(record, samples)
    shown = [ms for _, ms, *_ in record.to_dict(["default"])["times"]]
    assert shown == [round(sample.ms, 4) for _, sample in samples]
    assert shown != times


def test_only_steps_under_one_policy_are_learned_from():
    """A policy that takes 10% less time must not become a property of the inputs it had."""
    record, r, taken = Record(), random.Random(0), []
    for number in range(120):
        other = number >= 20 and r.random() < 0.5
        size = r.uniform(0.8, 1.2)
        sample = Sample(100 * size * (0.9 if other else 1.0), copied=(MB * size,))
        (ms,) = asked(record, [(Trial(Policy(max_ctas=16) if other else Policy()), sample)])
        taken.append((other, ms))
    default, policy = ([ms for other, ms in taken[20:] if other == arm] for arm in (False, True))
    assert max(policy) / min(default) == pytest.approx(0.9, rel=0.01)


def test_what_a_policy_copies_itself_is_not_taken_for_a_larger_input():
    """For example parameters kept in host memory and gathered more often."""
    r, steps = random.Random(0), []
    for number in range(80):
        other = number >= 20 and number % 2
        copied = MB * r.uniform(0.8, 1.2) + (MB if other else 0)
        sample = Sample(100 * math.exp(r.gauss(0, 0.01)), copied=(copied,))
        steps.append((Trial(Policy(max_ctas=16) if other else Policy()), sample))
    by_input = [(one, replace(sample, ms=sample.copied[0] / MB * 100)) for one, sample in steps[:20]]
    record = Record()
    asked(record, by_input)
    assert record.inputs.matter
    times = asked(record, steps[20:])
    assert not record.inputs.matter
    assert times[-20:] == [sample.ms for _, sample in steps[-20:]]


# --- what a policy copies ------------------------------------------------------------------------------------


def told_apart(sizes: Iterable[float], seed: int, more: float = 0.0, hold: int = 1) -> int | None:
    """The step at which the second of two policies, each held for `hold` steps, is found to copy more."""
    r, by_policy, policy = random.Random(seed), CopiedByPolicy(), 0
    for number, size in enumerate(sizes):
        policy = r.randrange(2) if number % hold == 0 and number else policy
        if by_policy.add(size + more * policy, policy):
            return number
    return None


@pytest.mark.parametrize("hold", [1, 12])
@pytest.mark.parametrize("seed", range(10))
def test_equal_inputs_are_not_taken_for_different_ones(seed, hold):
    r = random.Random(seed)
    assert told_apart([r.choice((1.0, 1.5, 2.0)) for _ in range(600)], seed, hold=hold) is None
    assert told_apart([1.0] * 600, seed, hold=hold) is None


@pytest.mark.parametrize("hold", [1, 12])
@pytest.mark.parametrize("seed", range(10))
def test_inputs_that_become_longer_or_are_sorted_are_not_put_down_to_a_policy(seed, hold):
    """A policy's steps come later than those of the warm-up, or a block of them has the longest inputs."""
    r = random.Random(seed)
    assert told_apart([1 + number / 200 for number in range(600)], seed, hold=hold) is None
    stretches = [r.uniform(0.8, 1.2) for _ in range(60)]
    assert told_apart([stretches[number // 10] for number in range(600)], seed, hold=hold) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_policy_that_copies_more_is_told_apart(seed):
    r = random.Random(seed)
    noticed = told_apart([r.uniform(0.8, 1.2) for _ in range(300)], seed, more=0.4)
    assert noticed is not None
    assert noticed < 90


def test_inputs_that_only_grow_are_a_new_pace_each_time():
    steps = [SizedStep(100 * size, MB * size, MB * size) for size in [1.0] * 8 + [1.1] * 8 + [1.2] * 8]
    assert not learned(steps).matter
    assert learned([*steps, *steps]).matter
