"""Ranks agree through a store: the same decision everywhere, even if one is late, silent or out of step."""

from __future__ import annotations

import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest

from weft import ranks
from weft.errors import UnavailableError
from weft.policy import Policy
from weft.ranks import ABANDON, Agreement, launched_ranks, published
from weft.tuning.live.conductor import Conductor, conduct, slowest
from weft.tuning.live.options import Facts
from weft.tuning.live.search import tune
from weft.tuning.live.session import Session as ImpatientSession
from weft.tuning.live.trial import Record
from weft.tuning.live.trial_length import MEET
from weft.tuning.live.tuned_job import TunedJob, final
from weft.tuning.live.watch import Watch, watch
from weft.tuning.live.watch_status import WatchStatus

# Time is simulated here; how long a thread waits for a CPU has no meaning.
Session = partial(ImpatientSession, least_stall_s=60.0, least_deadline_s=60.0)


class MemoryStore:
    """A torch.distributed store between threads."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.broken_for: set[int] = set()
        self.requests = 0
        """How often values were read."""

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.data[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.data[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return [self.data[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.data for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.data.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.changed:
            if self.data.get(key, b"") == expected.encode():
                self.data[key] = desired.encode()
                self.changed.notify_all()
            return self.data[key]


def together(count: int, act) -> list:
    """Run each rank on its own thread."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=60) for future in [pool.submit(act, rank) for rank in range(count)]]


def test_all_ranks_do_what_the_first_decides_from_all_reports():
    store = MemoryStore()

    def rank(number: int) -> list[dict]:
        agreement = Agreement(store, number, range(4), deadline_s=20)
        decide = lambda reports: {"do": "run", "sum": sum(r["value"] for r in reports)}  # noqa: E731
        return [agreement.exchange({"value": number * turn}, decide) for turn in range(5)]

    decisions = together(4, rank)
    assert decisions == [decisions[0]] * 4
    assert [d["sum"] for d in decisions[0]] == [0, 6, 12, 18, 24]


def test_a_rank_that_is_far_behind_reads_all_decisions_and_old_ones_go():
    """For example where ranks average their models every thousand steps only."""
    store = MemoryStore()
    leader, follower = (Agreement(store, rank, range(2), deadline_s=20) for rank in range(2))
    for turn in range(1000):
        leader.announce({}, lambda reports, turn=turn: {"do": "run", "turn": turn})
    assert [follower.announce({}, dict)["turn"] for _ in range(1000)] == list(range(1000))
    for _ in range(9000):
        leader.announce({}, lambda reports: {"do": "run"})
    assert len(store.data) < 5000


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("exchange", [Agreement.exchange, Agreement.announce])
def test_no_rank_waits_for_one_that_has_left(monkeypatch, gone, exchange):
    """The time that a wait would take passes at once, so that a wait ends as an exchange without a reason."""
    monkeypatch.setattr(ranks, "WATCH_PATIENCE_S", 0.0)
    store = MemoryStore()
    left, other = (Agreement(store, rank, range(2), deadline_s=0) for rank in (gone, 1 - gone))
    left.leave("it has no inputs left")
    decision = exchange(other, {}, lambda reports: {"do": "run"})
    assert decision == {**ABANDON, "reason": "it has no inputs left"}


def test_a_silent_rank_ends_the_exchange_for_all_and_is_named():
    store = MemoryStore()

    def rank(number: int) -> dict | None:
        if number == 0:  # starts waiting after the others have reported, and gives up long before them
            store.wait(["1/report/1", "1/report/3"], timedelta(seconds=60))
        agreement = Agreement(store, number, range(4), deadline_s=20 if number else 0.3)
        return None if number == 2 else agreement.exchange({}, lambda reports: {"do": "run"})

    zero, one, two, three = together(4, rank)
    assert two is None
    assert zero == one == three
    assert zero["do"] == "abandon"
    assert "rank 2" in zero["reason"]


def test_a_silent_leader_ends_it_too_and_cannot_go_on_alone_later():
    store = MemoryStore()
    followers = together(
        3, lambda n: Agreement(store, n + 1, range(4), 0.1).exchange({}, lambda reports: {"do": "run"})
    )
    assert {d["do"] for d in followers} == {"abandon"}
    late = Agreement(store, 0, range(4), 5).exchange({}, lambda reports: {"do": "run"})
    assert late == followers[0] == followers[1] == followers[2]


@pytest.mark.parametrize("seed", range(20))
def test_however_the_race_for_the_decision_ends_it_ends_the_same_for_all(seed):
    """The leader decides just when the followers' patience ends."""
    store, gate = MemoryStore(), threading.Event()

    def rank(number: int) -> dict:
        agreement = Agreement(store, number, range(3), deadline_s=0.05 if number else 20)

        def decide(reports: list) -> dict:
            gate.wait(0.08 + seed * 0.002)
            return {"do": "run"}

        return agreement.exchange({}, decide)

    decisions = together(3, rank)
    assert decisions == [decisions[0]] * 3


def test_one_process_alone_needs_no_store():
    agreement = Agreement(None, 0, (0,), 1.0)  # type: ignore[arg-type]
    assert agreement.exchange({"a": 1}, lambda reports: {"do": "run", "got": reports}) == {
        "do": "run",
        "got": [{"a": 1}],
    }


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_a_follower_of_the_watch_waits_while_the_leader_writes_a_checkpoint(monkeypatch):
    waited = []
    for meet in (Agreement.announce, Agreement.exchange):
        clock = Clock()
        monkeypatch.setattr(ranks, "time", clock)
        assert meet(Agreement(MemoryStore(), 1, range(2), 5.0), {}, lambda reports: {})["do"] == "abandon"
        waited.append(clock.now)
        assert max(clock.pauses) <= 0.25
        assert len(clock.pauses) < 500  # the store serves all ranks
    assert waited[0] >= 60 > waited[1]


def test_a_decision_is_read_soon_after_it_was_written(monkeypatch):
    for comes_s in (0.0003, 0.02, 3.0):
        clock, store = Clock(), MemoryStore()
        monkeypatch.setattr(ranks, "time", clock)
        monkeypatch.setattr(store, "check", lambda keys, clock=clock, at=comes_s: clock.now >= at)
        store.set("1/decision", "{}")
        assert Agreement(store, 1, range(2), 5.0).announce({}, lambda reports: {}) == {}
        assert comes_s <= clock.now <= 1.05 * comes_s + 1e-4


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_what_a_signal_handler_raises_while_a_rank_waits_reaches_the_program(kind):
    """In the `wait` of a torch store no handler runs before the timeout."""
    looks = []

    class Signalled(MemoryStore):
        def check(self, keys: list[str]) -> bool:
            looks.append(keys)
            if len(looks) == 3:
                signal.raise_signal(signal.SIGUSR1)
            return False

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise AssertionError("no handler runs in here")

    def handler(number: int, frame: object) -> None:
        raise kind("of the program")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind, match="of the program"):
            published(Signalled(), ["never"], 600.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_of_the_store_is_not_taken_for_a_late_rank():
    class Broken(MemoryStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RuntimeError, match="reset by peer"):
        Agreement(Broken(), 1, range(2), 1.0).exchange({}, lambda reports: {})


def test_each_step_counts_by_its_slowest_rank_and_a_problem_of_one_is_a_problem_of_all():
    reports = [{"ms": [10.0, 40.0]}, {"ms": [30.0, 20.0], "problem": "stalled"}, {"ms": [20.0, 20.0]}]
    assert [(one.ms, one.problem) for one in slowest(reports)] == [(30.0, "stalled"), (40.0, "stalled")]


def test_what_each_rank_copied_goes_with_the_step():
    reports = [{"ms": [10.0, 40.0], "copied": [1, 2]}, {"ms": [30.0, 20.0], "copied": [3, 4]}]
    assert [one.copied for one in slowest(reports)] == [(1, 3), (2, 4)]
    assert [one.copied for one in slowest([{"ms": [10.0, 40.0], "copied": [1]}])] == [(1,), ()]


def test_ranks_at_different_steps_are_noticed_by_any_clock_they_share():
    def first(*clocks: dict) -> dict:
        conductor = conduct(tune(Policy()), Policy())
        next(conductor)
        return conductor.send([{"ms": [], "problem": "", "clock": clock} for clock in clocks])

    assert first({"a": 1, "b": 2}, {"a": 1}, {"c": 9, "b": 2})["do"] == "run"
    decision = first({"a": 1, "b": 2}, {"b": 3})
    assert decision["do"] == "abandon"
    assert "b: 2 and 3" in decision["reason"]


# --- whole sessions -----------------------------------------------------------------------------------------


class Rank:
    """A rank of a job whose policy sets the step time. Time is simulated; the threads are real."""

    def __init__(self, number: int, effects: dict[str, float]) -> None:
        self.number, self.effects = number, effects
        self.default = self.policy = Policy()
        self.time = 0.0
        self.steps = self.prepared = 0
        self.ran: list[str] = []
        self.refuse: int | None = None
        self.cannot, self.halfway = "", False
        self.skip, self.ahead_from = 0, 10**9
        self.making_s = self.releasing_s = 0.0
        self.marked = self.copied = 0
        self.lengths: random.Random | None = None
        """Of the inputs: the same draws on all ranks, each of which takes one of them."""
        self.collective: threading.Barrier | None = None
        """Where each step waits for the other ranks; None: it does not."""
        self.released = False
        self.result: dict | None = None

    def learn(self) -> None: ...

    def facts(self, steps: int) -> Facts:
        return Facts(collectives=4, ctas=12, cta_choices=(6, 16, 24), world=3)

    def preparable(self) -> list[tuple[str, int]]:
        return []

    def prepare(self, policy: Policy, keys: object) -> None:
        self.prepared += 1
        self.time += self.making_s
        if self.refuse and self.refuse == policy.max_ctas:
            raise RuntimeError(f"no {policy.max_ctas} here")

    def apply(self, policy: Policy) -> None:
        if self.cannot and self.cannot in policy.label:
            if self.halfway:  # the first part of the policy is already applied
                self.policy = policy
            raise RuntimeError(f"no {self.cannot} here")
        self.policy = policy

    def harmless(self) -> None:
        self.policy = Policy()

    def release(self) -> None:
        self.released = True
        self.time += self.releasing_s

    def synchronize(self) -> None: ...

    def mark(self) -> float:
        self.marked += 1
        return self.time

    def copied_bytes(self) -> int:
        return self.copied

    def between_ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)

    def clock(self) -> dict[str, int]:
        return {"steps": self.steps, "of another thread": self.steps // 3 + (self.steps >= self.ahead_from)}

    def run(
        self, store: MemoryStore, ranks: int, steps: int = 400, conductor: Conductor | None = None
    ) -> Rank:
        agreement = Agreement(store, self.number, range(ranks), deadline_s=60)
        conductor = conductor or conduct(tune(self.default), self.default)
        session = Session(self, agreement, conductor, self.ended)
        session.begin()
        for _ in range(steps):
            self.ran.append(self.policy.label)
            factor = 1.0
            for part in self.policy.label.split("+"):
                factor *= self.effects.get(part, 1.0)
            if self.lengths is not None:
                drawn = [self.lengths.uniform(0.7, 1.3) for _ in range(ranks)]
                self.copied += round(1e6 * drawn[self.number])
                factor *= max(drawn)
            self.time += 0.04 * factor * (1 + 0.001 * (self.steps % 7)) * (1 + 0.1 * self.number)
            self.steps += 2 if self.steps == self.skip - 1 else 1
            if self.collective is not None:
                self.collective.wait()
            if not session.over:
                session.step()
        assert agreement.deadline_s == 60  # by the steps alone it would be 5 s
        return self

    def ended(self, result: dict) -> None:
        assert self.result is None
        self.result = result


def job(
    effects: dict[str, float],
    default: Policy | None = None,
    of_rank_1: dict[str, object] | None = None,
    **more: object,
) -> list[Rank]:
    store, of_rank_1 = MemoryStore(), of_rank_1 or more

    def one(number: int) -> Rank:
        rank = Rank(number, effects)
        rank.default = default or rank.default
        for name, value in of_rank_1.items() if number == 1 else ():
            setattr(rank, name, value)
        return rank.run(store, 3)

    return together(3, one)


def test_all_ranks_change_policy_at_the_same_step_and_end_with_the_same():
    ranks = job(
        {"ctas6": 1.2, "ctas16": 0.9, "ctas24": 0.95, "priority": 0.97, "head5": 1.02, "placed": 1.02}
    )
    assert ranks[0].ran == ranks[1].ran == ranks[2].ran
    assert len(set(ranks[0].ran)) > 5
    assert ranks[0].result == ranks[1].result == ranks[2].result
    assert ranks[0].ran[-1] == "priority+ctas16"
    assert all(rank.released for rank in ranks)
    assert ranks[0].result["default_ms"] == pytest.approx(1.2 * 40, rel=0.02)  # the slowest of the three


def test_a_gain_is_found_where_the_longest_input_of_all_ranks_decides_how_long_a_step_takes():
    for seed in range(3):
        store = MemoryStore()

        def one(number: int, seed: int = seed, store: MemoryStore = store) -> Rank:
            rank = Rank(number, {"ctas16": 0.95})
            rank.lengths = random.Random(seed)
            return rank.run(store, 3)

        ranks = together(3, one)
        assert ranks[0].ran == ranks[1].ran == ranks[2].ran
        assert ranks[0].result["policy"]["comm"]["max_ctas"] == 16
        assert ranks[0].result["gain_pct"] == pytest.approx(5, abs=0.5)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_watch_knows_the_longest_input_of_all_ranks(ranks):
    store, collective, seed, record = MemoryStore(), threading.Barrier(ranks), 1, Record()

    def one(number: int) -> Rank:
        rank = Rank(number, {"ctas16": 0.95})
        rank.lengths = random.Random(seed)
        rank.collective = collective
        kept = record if number == 0 else Record()

        def watched(outcome: TunedJob, ahead: int, each: int) -> Watch:
            return watch(outcome, ahead=ahead, each=each, record=kept)

        conductor = conduct(tune(rank.default, record=kept), rank.default, watched)
        return rank.run(store, ranks, steps=700, conductor=conductor)

    played = together(ranks, one)
    assert all(rank.ran == played[0].ran for rank in played)
    r = random.Random(seed)
    longest = [round(1e6 * max(r.uniform(0.7, 1.3) for _ in range(ranks))) for _ in range(700)]
    steps = [step for step in record.steps if step.purpose in ("watch", "probe", "check", "wait")]
    known = [(step.inputs.largest.size, longest[step.number]) for step in steps if step.inputs.largest]
    assert len(steps) > 200
    assert len(known) >= len(steps) - 16  # of the first plan, only the leader's are known
    assert all(size == pytest.approx(most, abs=1) for size, most in known)


def test_a_post_counts_only_if_all_ranks_have_made_it_since_the_last_announcement():
    store = MemoryStore()
    leader, *others = (Agreement(store, number, range(3), deadline_s=1) for number in range(3))
    assert leader.posted() == []
    others[0].post({"ms": [1]})
    assert leader.posted() == []
    others[1].post({"ms": [2]})
    assert [report["ms"] for report in leader.posted()] == [[1], [2]]
    assert store.requests == 1
    leader.announce({}, lambda reports: {"do": "run"})
    assert leader.posted() == []
    assert Agreement(store, 0, [0], deadline_s=1).posted() == []


def test_the_cost_of_a_search_counts_what_the_ranks_waited_for_between_steps():
    effects = {"ctas6": 1.2, "ctas16": 0.9, "ctas24": 0.95, "priority": 0.97, "head5": 1.02, "placed": 1.02}
    quick, slow = job(effects), job(effects, making_s=0.5)
    assert slow[0].ran == quick[0].ran  # this time belongs to no step
    more_ms = slow[0].result["cost_ms"] - quick[0].result["cost_ms"]
    assert more_ms == pytest.approx(500 * slow[1].prepared, rel=0.02)


def test_the_cost_of_a_search_counts_the_release_of_what_it_made():
    """Ranks release it between steps after the search, when the watch has already begun."""
    costs = []
    for releasing_s in (0.0, 0.7):
        store, statuses = MemoryStore(), list[WatchStatus]()

        def one(
            number: int,
            store: MemoryStore = store,
            statuses: list[WatchStatus] = statuses,
            releasing_s: float = releasing_s,
        ) -> Rank:
            rank = Rank(number, {"ctas16": 0.9})
            rank.releasing_s = releasing_s

            def watched(outcome: TunedJob, ahead: int, each: int) -> Watch:
                status = WatchStatus(outcome, outcome.policy)
                statuses.extend([status] if number == 0 else [])
                return watch(outcome, ahead=ahead, each=each, status=status)

            return rank.run(store, 2, conductor=conduct(tune(rank.default), rank.default, watched))

        first, _ = together(2, one)
        assert first.released
        costs.append(final(statuses[0])["cost_ms"])
    assert costs[1] - costs[0] == pytest.approx(700, rel=0.02)


def test_the_cost_of_a_search_without_a_watch_counts_the_release_too():
    quick, slow = job({"ctas16": 0.9}), job({"ctas16": 0.9}, releasing_s=0.7)
    assert slow[1].released
    more_ms = slow[0].result["cost_ms"] - quick[0].result["cost_ms"]
    assert more_ms == pytest.approx(700, rel=0.02)
    assert {rank.result["cost_ms"] for rank in slow} == {slow[0].result["cost_ms"]}


def test_short_steps_are_watched_together_and_all_ranks_still_change_at_the_same_step():
    """Steps of 2 ms: a mark for every eighth. The policy turns slower, and is gone."""
    store = MemoryStore()

    def one(number: int) -> tuple[Rank, list[int]]:
        rank, marked = Rank(number, {}), []
        conductor = conduct(
            tune(rank.default),
            rank.default,
            lambda outcome, ahead, each: watch(outcome, ahead=ahead, each=each),
        )
        session = Session(rank, Agreement(store, number, range(2), 60), conductor, rank.ended)
        session.begin()
        for step in range(2400):
            rank.ran.append(rank.policy.label)
            faster = "ctas16" in rank.policy.label
            rank.time += 0.002 * (1 + 0.001 * (step % 7)) * ((0.8 if step < 1200 else 1.2) if faster else 1.0)
            rank.steps += 1
            session.step()
            marked.append(rank.marked)
        return rank, marked

    (first, marked), (second, _) = together(2, one)
    assert first.ran == second.ran
    assert first.ran[1100:1190].count("overlap") <= 16
    assert "ctas16" in first.ran[1190]
    assert set(first.ran[-400:]) == {"overlap"}
    assert marked[1100] - marked[700] < 400 / 7 + 2 * 400 / 8 / 10 + 10  # also, a probe has two


def test_a_watch_of_short_steps_goes_on_with_single_steps_once_they_are_long():
    """Steps go from 2 ms to 200: with 8 steps a trial, a check would last 100 long steps. Then a search,
    whose cost includes nothing of the earlier watch."""
    store = MemoryStore()

    def one(number: int) -> tuple[Rank, list[WatchStatus]]:
        rank, statuses = Rank(number, {}), list[WatchStatus]()

        def watched(outcome: TunedJob, ahead: int, each: int) -> Watch:
            statuses.append(WatchStatus(outcome, outcome.policy))
            return watch(outcome, ahead=ahead, each=each, status=statuses[0])

        conductor = conduct(tune(rank.default), rank.default, watched)
        session = Session(rank, Agreement(store, number, range(2), 60), conductor, rank.ended)
        session.begin()
        for step in range(3600):
            rank.ran.append(rank.policy.label)
            factor = (0.8 if step < 1400 else 1.2) if "ctas16" in rank.policy.label else 1.0
            rank.time += (0.002 if step < 800 else 0.2) * (1 + 0.001 * (step % 7)) * factor
            rank.steps += 1
            session.step()
        return rank, statuses

    (first, statuses), (second, _) = together(2, one)
    assert first.ran == second.ran
    assert "ctas16" in first.ran[799]
    assert 0 < sum("ctas16" not in label for label in first.ran[1100:1400]) <= 30  # probes of one step each
    last = max(step for step, label in enumerate(first.ran[:1600]) if "ctas16" in label)
    assert 1400 < last < 1400 + 60
    assert statuses[0].searches == 1
    assert abs(statuses[0].outcome.cost_ms) < 200 * statuses[0].outcome.steps


def test_what_one_rank_cannot_prepare_is_tried_on_none():
    ranks = job({"ctas6": 1.2, "ctas16": 0.8, "ctas24": 0.9}, refuse=16)
    assert ranks[0].ran == ranks[1].ran == ranks[2].ran
    assert not any("ctas16" in policy for policy in ranks[0].ran)
    assert "ctas24" in ranks[0].ran[-1]
    assert "no 16 here" in str(ranks[0].result["candidates"])


def test_what_one_rank_cannot_apply_is_dropped_on_all_and_communicators_stay_the_same():
    """A rank that returned to its own communicators alone would leave the others waiting in a collective."""
    ranks = job({"ctas6": 1.2, "ctas16": 0.8, "ctas24": 0.9, "head5": 0.9}, cannot="priority")
    ctas = [[policy.split("+")[-1] for policy in rank.ran] for rank in ranks]
    assert ctas[0] == ctas[1] == ctas[2]
    assert {rank.ran[-1] for rank in ranks} == {"head5+ctas16"}
    assert "no priority here" in str(ranks[0].result["candidates"])


def test_a_policy_that_fails_halfway_in_its_preparation_is_taken_back():
    """The prepared half may be a communicator that other ranks do not use: the next steps would hang."""
    store, default = MemoryStore(), Policy()
    run = {"do": "run", "policies": [default.to_dict()], "order": [0, 0], "light": False}

    def method():
        yield {}
        reports = yield {"do": "prepare", "policy": Policy(max_ctas=24).to_dict(), "keys": None}
        assert [report["problem"] for report in reports] == ["", "no ctas24 here"]
        yield {**run, "learn": False, "each": 1, "say": []}
        yield {**ABANDON, "reason": "over"}

    def one(number: int) -> list[str]:
        rank = Rank(number, {})
        rank.cannot, rank.halfway = "ctas24" if number else "", True
        session = Session(rank, Agreement(store, number, range(2), 60), method(), rank.ended)
        session.begin()
        ran = [rank.policy.label]
        session.step()
        return [*ran, rank.policy.label]

    assert together(2, one) == [["overlap"] * 2] * 2


def test_controls_of_models_that_can_no_longer_be_changed_keep_nothing_else_in_force():
    """For example if the program registers a DDP communication hook while a trial runs."""
    trial = Policy(max_ctas=16, priority="high", bucket_mb=100)
    run = {"do": "run", "policies": [trial.to_dict()], "order": [0], "light": False}

    class Hooked(Rank):
        def apply(self, policy: Policy) -> None:
            if policy.bucket_mb != self.policy.bucket_mb and self.policy.bucket_mb is not None:
                raise UnavailableError("it has a communication hook")
            self.policy = policy

    def method():
        yield {}
        yield {**run, "learn": False, "each": 1, "say": []}
        yield {"do": "end", "result": {}, "policy": Policy().to_dict()}

    rank = Hooked(0, {})
    session = Session(rank, Agreement(MemoryStore(), 0, range(1), 5), method(), rank.ended)
    session.begin()
    assert rank.policy == trial
    session.step()
    assert session.over
    assert rank.policy == Policy(bucket_mb=100)
    assert rank.released


def test_a_framework_control_that_one_rank_cannot_apply_at_the_start_is_in_force_on_none():
    """A group for reduce-scatter that only some ranks use would leave all of them waiting."""
    default = Policy(reduce_scatter_group=True)
    ranks = job({}, default=default, of_rank_1={"cannot": default.label})
    assert {rank.ran[-1] for rank in ranks} == {"overlap"}
    assert [rank.result["state"] for rank in ranks] == ["stopped"] * 3
    assert {rank.ran[-1] for rank in job({}, default=default, of_rank_1={})} == {default.label}


def test_a_rank_that_is_out_of_step_ends_the_tuning_on_all_ranks():
    ranks = job({"ctas16": 0.8}, skip=30)
    assert {rank.ran[-1] for rank in ranks} == {"overlap"}
    assert all("not at the same step" in rank.result["reason"] for rank in ranks)


@pytest.mark.parametrize("skipped", [200, 203, 207])
def test_a_rank_that_skips_a_step_ends_the_watch_on_all_ranks(skipped):
    """Otherwise it would change the CTAs of another step's collectives than the other ranks."""
    ranks = watched_job(of_rank_1={"skip": skipped})
    assert all("not at the same step" in rank.result["reason"] for rank in ranks)
    assert all(set(rank.ran[skipped + 4 * MEET[0] :]) == {rank.ran[-1]} for rank in ranks)


def test_collectives_of_another_thread_do_not_end_a_watch():
    ranks = watched_job(of_rank_1={"ahead_from": 200})
    assert {rank.result for rank in ranks} == {None}
    assert {rank.ran[-1] for rank in ranks} == {"ctas16"}


def watched_job(of_rank_1: dict[str, int]) -> list[Rank]:
    store, collective = MemoryStore(), threading.Barrier(3)

    def one(number: int) -> Rank:
        rank = Rank(number, {"ctas16": 0.9})
        rank.collective = collective
        for name, value in of_rank_1.items() if number == 1 else ():
            setattr(rank, name, value)

        def watched(outcome: TunedJob, ahead: int, each: int) -> Watch:
            return watch(outcome, ahead=ahead, each=each)

        return rank.run(store, 3, conductor=conduct(tune(rank.default), rank.default, watched))

    return together(3, one)


def test_a_mistake_in_the_method_ends_the_tuning_on_all_ranks():
    store = MemoryStore()

    def broken():
        yield {}
        raise ZeroDivisionError("oh")

    def one(number: int) -> Rank:
        rank = Rank(number, {})
        session = Session(rank, Agreement(store, number, range(2), 60), broken(), rank.ended)
        session.begin()
        assert session.over
        return rank

    assert {rank.result["reason"] for rank in together(2, one)} == {"ZeroDivisionError: oh"}


@pytest.mark.parametrize(("text", "ranks"), [(None, 1), ("", 1), ("8", 8), ("0", 1), ("-2", 1), ("two", 1)])
def test_a_launcher_that_states_no_number_of_ranks_started_one(monkeypatch, text, ranks):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("WORLD_SIZE", text)
    assert launched_ranks() == ranks
