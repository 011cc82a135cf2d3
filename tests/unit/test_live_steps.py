"""Where a step ends: one optimizer, several, several steps of one, an optimizer that is left out now and then."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

from weft.tuning.live import optimizer_steps, watchdog
from weft.tuning.live.steps import REPEATS, RUN, Steps, period
from weft.tuning.live.watchdog import Guard


@pytest.mark.parametrize(
    ("stream", "length"),
    [
        ("aaaa", 1),
        ("aaa", None),
        ("xabababab", 2),
        ("abcabcabc", None),
        ("abcabcabcabc", 3),
        ("aab" * 4, 3),
        ("aabaabaab", None),
        ("", None),
        ("warmup" + "fffrrr" * 4, 6),
    ],
)
def test_the_shortest_period_that_is_seen_four_times(stream, length):
    assert period(stream) == length


def test_a_long_stream_of_calls_has_its_period_found():
    some = random.Random(1)
    cycle, noise = [some.randrange(3) for _ in range(200)], [some.randrange(9) for _ in range(90)]
    assert period(noise + cycle * 12, 12) == 200
    assert period([some.random() for _ in range(3000)], 12) is None


def ends(stream: str) -> str:
    steps = Steps()
    return "".join("|" if steps.ends_with(event) else "." for event in stream)


def test_one_optimizer_ends_every_step():
    assert ends("aaaaaa") == "...|||"


def test_of_two_optimizers_the_second_ends_the_step():
    assert ends("ababababab") == ".......|.|"


def test_ranks_with_different_numbers_of_optimizers_agree_on_the_first_step():
    """For example the stages of a pipeline, of which only some have parameters for a second optimizer."""
    stages = ("a", "ab", "abc", "aab", "abcdefghijklm")
    found = [ends(step * 8)[len(step) - 1 :: len(step)] for step in stages]
    assert set(found) == {"...|||||"}


@pytest.mark.parametrize("step", ["aabb", "aabbb", "a" * 80 + "b" * 80])
def test_several_steps_of_each_optimizer_in_a_row_end_one_step_of_the_job(step):
    """For example some steps of the policy, then some of the value function."""
    assert ends(step * 10).endswith(("." * (len(step) - 1) + "|") * 5)


def test_an_optimizer_that_goes_on_alone_after_several_in_a_row_ends_each_step():
    assert ends("aabb" * 9 + "b" * 200).endswith("|" * 60)


@pytest.mark.parametrize(("count", "first"), [(180, 4), (181, 5), (320, 5), (723, 5)])
def test_an_optimizer_for_each_parameter_of_a_large_model_is_part_of_a_step(count, first):
    """That is, optimizers that step in the backward pass."""
    steps = Steps()
    found = [[steps.ends_with(event) for event in range(count)] for _ in range(8)]
    assert [sum(step) for step in found] == (first - 1) * [0] + (9 - first) * [1]
    assert all(step[-1] for step in found[first - 1 :])


def test_a_step_begins_with_the_optimizer_that_stepped_first():
    """For example if the discriminator is trained alone at first, or if a gradient is missing at first."""
    assert ends("a" * 41 + "ab" * 60).endswith(".|" * 20)
    assert ends("abd" + "abcd" * 20).endswith("...|" * 10)


def test_one_left_out_does_no_harm():
    found = ends("ab" * 4 + "b" + "ab" * 2)
    assert found[-5:] == "|.|.|"


def test_a_rare_optimizer_makes_it_learn_again():
    found = ends("aaaaab" * 5)
    assert found.endswith("|.....|")
    assert found.count("|") < 8


def test_the_steps_of_another_training_loop_are_found_as_soon_as_those_of_the_first():
    assert ends("a" * 700 + "b" * 9 + "c" * 9) == "..." + "|" * 697 + 2 * ("..." + "|" * 6)
    assert ends("ab" * 300 + "cd" * 5).endswith(".......|.|")


def test_an_optimizer_that_steps_seldom_begins_no_other_loop():
    assert ends("a" * 100 + ("b" + "a" * 9) * 40).endswith("|.........")


@pytest.mark.parametrize("run", [200, 700])
def test_optimizers_that_alternate_in_long_runs_are_steps_each(run):
    """For example in reinforcement learning: steps of the policy, then as many of the value function."""
    found = ends(("a" * run + "b" * run) * 3)
    assert found[2 * run :] == ("." * (RUN - 1) + "|" * (run - RUN + 1)) * 4


def test_a_long_run_that_is_part_of_a_period_stays_part_of_it():
    assert ends(("a" * 40 + "b") * 20).endswith("|" + ("." * 40 + "|") * 8)


def test_an_optimizer_is_not_taken_for_one_that_is_gone(monkeypatch):
    """Otherwise a rank on which it has the same id would count steps that other ranks do not."""

    class Optimizer: ...

    monkeypatch.setattr(optimizer_steps, "id", lambda optimizer: 7, raising=False)
    numbers, first = optimizer_steps.OptimizerNumbers(), Optimizer()
    assert [numbers.of(first) for _ in range(3)] == [1, 1, 1]
    del first
    second = Optimizer()
    assert [numbers.of(second) for _ in range(3)] == [2, 2, 2]


class Parts:
    """Steps one part after the other, as DeepSpeed's ZeRO has an optimizer do for a step of the job."""

    def __init__(self, parts: int) -> None:
        self.parts = [Parameter() for _ in range(parts)]
        self.param_groups = [{"params": []}, {"params": []}]

    def step(self, part: int) -> Parts:
        self.param_groups[part % 2]["params"] = [self.parts[part]]
        self.param_groups[1 - part % 2]["params"] = []
        return self


class Parameter: ...


@pytest.mark.parametrize("parts", [2, 3, 13])
def test_a_step_of_the_job_ends_with_the_last_part_that_an_optimizer_steps(parts):
    optimizer, numbers, steps = Parts(parts), optimizer_steps.OptimizerNumbers(), Steps()
    numbers.of(optimizer.step(0))  # as some versions do to create the optimizer's state
    found = [[steps.ends_with(numbers.of(optimizer.step(i))) for i in range(parts)] for _ in range(12)]
    assert found[REPEATS:] == [[False] * (parts - 1) + [True]] * (12 - REPEATS)


def test_an_optimizer_that_changes_its_parameters_now_and_then_ends_every_step():
    """For example one that trains another layer every few steps."""
    optimizer, numbers = Parts(6), optimizer_steps.OptimizerNumbers()
    assert {numbers.of(optimizer.step(i // 10 % 6)) for i in range(200)} == {1}


def test_an_optimizer_whose_parameters_are_always_new_has_one_number_at_last():
    optimizer, numbers = Parts(1), optimizer_steps.OptimizerNumbers()
    found = []
    for _ in range(optimizer_steps.MOST_PARTS + 10):
        optimizer.parts = [Parameter()]
        found.append(numbers.of(optimizer.step(0)))
    assert len(set(found[-9:])) == 1


def test_a_rescue_that_fails_does_not_end_the_guard():
    tried = threading.Semaphore(0)

    def rescue() -> None:
        tried.release()
        raise OSError("the job's folder is gone")

    guard = Guard(rescue)
    for _ in range(2):
        guard.arm(0.01)
        assert tried.acquire(timeout=20)
        assert guard.disarm() is not None
    guard.stop()


def test_a_guard_rescues_once_and_only_when_it_is_late():
    rescued = threading.Event()
    guard = Guard(rescued.set)
    guard.arm(60)
    assert guard.disarm() is None
    guard.arm(0.01)
    assert rescued.wait(20)
    assert guard.disarm() is not None
    assert guard.disarm() is None  # the next trial, under the default, is not late
    guard.arm(60)
    assert guard.disarm() is None
    guard.stop()


def test_a_process_that_was_stopped_is_not_taken_for_one_that_the_rescue_helped(monkeypatch):
    """Its guard and its step go on at the same moment, whatever the policy was."""
    clock_s = 100.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock_s))
    rescued = threading.Event()
    guard = Guard(rescued.set)
    guard.arm(5)
    clock_s = 112.0
    with guard._changed:
        guard._changed.notify_all()
    assert rescued.wait(20)
    assert guard.disarm() == 7
    guard.stop()


def test_the_thread_of_a_guard_ends_with_stop_and_a_later_trial_gets_another():
    rescued = threading.Semaphore(0)
    guard = Guard(rescued.release)
    for _ in range(2):
        guard.arm(0.01)
        thread = guard._thread
        assert rescued.acquire(timeout=20)
        guard.stop()
        thread.join(20)
        assert not thread.is_alive()
