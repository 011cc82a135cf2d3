"""Live tuning in a process, without ranks: the collectives' period where no optimizer steps, and what is left behind."""

from __future__ import annotations

import json
import math
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from weft.shim import binding, communicators  # noqa: E402
from weft.tuning.live import ddp, job, job_store, optimizer_steps, settings  # noqa: E402
from weft.tuning.live.options import Facts  # noqa: E402
from weft.tuning.live.steps import Steps  # noqa: E402
from weft.tuning.live.tuned_job import read_record, read_result  # noqa: E402


class Calls:
    """The program's collectives, in the form in which the shim reports them."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[communicators.CommunicatorCall] = []
        self.callback, self.every = None, 1
        monkeypatch.setattr(binding, "injected", lambda: True)
        monkeypatch.setattr(communicators, "on_call", self.on_call)
        monkeypatch.setattr(communicators, "calls", lambda: self.log[-4096:])

    def on_call(self, callback, key=None, every=1) -> None:
        self.callback, self.every = callback, every

    def make(self, operation: str, size: int) -> None:
        self.log.append(communicators.CommunicatorCall(len(self.log), "ab", operation, size, 0, False))
        if self.callback and len(self.log) % self.every == 0:
            self.callback("ab", len(self.log))


class Session:
    """Stands in for the tuning; counts steps, and must be called at every `each`-th."""

    made: ClassVar[list[Session]] = []
    each: ClassVar[int] = 1

    watching = changed = False

    def __init__(self, controls, agreement, conductor, on_end, *_: object, **__: object) -> None:
        self.steps, self.looks, self.over, self.on_end = 0, 0, False, on_end
        Session.made.append(self)

    def begin(self) -> None: ...

    @property
    def free_steps(self) -> int:
        return self.each - 1 - self.steps % self.each

    def step(self, count: int = 1) -> None:
        assert count <= self.free_steps + 1
        self.steps += count
        self.looks += self.steps % self.each == 0


class Controls:
    def __init__(self, default, world) -> None:
        self.default = default

    def facts(self, steps: int) -> Facts:
        return Facts()


@pytest.fixture
def group(monkeypatch, tmp_path):
    """A process group of two ranks with only this process present, as with ghost ranks."""
    import torch.distributed as dist

    monkeypatch.setenv("WEFT_JOB", str(tmp_path))
    monkeypatch.setenv(settings.CONTROLS_VARIABLE, f"{__name__}:Controls")
    monkeypatch.setattr("weft.tuning.live.session.Session", Session)
    Session.made.clear()
    made = []

    def make() -> None:
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
        made.append(1)

    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    yield make
    if made:
        dist.destroy_process_group()


@pytest.fixture
def watching(monkeypatch):
    monkeypatch.setattr(optimizer_steps, "LONGEST_FREE_S", math.inf)  # the machine may be slow
    found = job.Live()
    found.watch()
    yield found
    found._end({"text": "", "state": "stopped"})


def optimizer_of_two_weights() -> torch.optim.Optimizer:
    weights = torch.zeros(2, requires_grad=True)
    weights.sum().backward()
    return torch.optim.SGD([weights], lr=0.1)


def optimize() -> None:
    """A few steps of the program."""
    optimizer = optimizer_of_two_weights()
    for _ in range(8):
        optimizer.step()


def test_without_an_optimizer_the_period_of_the_collectives_is_the_step(monkeypatch, group, watching):
    calls = Calls(monkeypatch)
    group()
    for _ in range(60):
        for operation, size in (
            ("all_gather", 10),
            ("all_reduce", 20),
            ("all_reduce", 20),
            ("reduce_scatter", 5),
        ) * 5:
            calls.make(operation, size)
    (session,) = Session.made
    assert calls.every == 16
    assert session.steps >= 5


def test_an_optimizer_that_steps_goes_before_the_collectives(monkeypatch, group, watching):
    calls = Calls(monkeypatch)
    group()
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(40):
        for _ in range(20):
            calls.make("all_reduce", 20)
        weight.sum().backward()
        optimizer.step()
    (session,) = Session.made
    assert session.steps == 40 - 4
    assert calls.callback is None


def test_steps_that_need_no_look_are_counted_later(monkeypatch, group, watching):
    """This needs a single optimizer; once a second one steps, steps end as if each had been looked at."""
    monkeypatch.setattr(Session, "each", 10)
    group()
    often, rarely = optimizer_of_two_weights(), optimizer_of_two_weights()
    seen = []
    ends_with = watching._steps.ends_with
    monkeypatch.setattr(watching._steps, "ends_with", lambda event: seen.append(event) or ends_with(event))
    for optimizer in [often] * 67:
        optimizer.step()
    (session,) = Session.made
    assert session.steps == 60
    assert session.looks == 6
    assert len(seen) == 4 + 6  # the steps that show the period, and every tenth
    worker = threading.Thread(target=often.step)  # not the thread on which steps end
    worker.start()
    worker.join()
    assert session.steps == 60
    rarely.step()
    assert watching._steps.length is None
    looked_at = Steps()
    for event in [1] * 67 + [2]:
        looked_at.ends_with(event)
    assert watching._steps._seen == looked_at._seen
    assert session.steps == 63


def test_the_watch_ends_where_no_step_repeats_any_more(monkeypatch, group, watching):
    """The policy would stay unwatched, and every optimizer step would look for a period."""
    left = list[str]()
    monkeypatch.setattr(watching, "_leave", left.append)
    group()
    optimizer = optimizer_of_two_weights()
    for _ in range(2):
        for _ in range(200):
            optimizer.step()
        for _ in range(job.EVENTS_WITHOUT_STEP - 200):
            optimizer_of_two_weights().step()
    assert not left
    for _ in range(190):
        optimizer_of_two_weights().step()
    assert not left
    for _ in range(20):
        optimizer_of_two_weights().step()
    assert set(left) == {"the program's steps no longer repeat"}


def test_an_optimizer_that_ends_no_step_has_no_free_ones(monkeypatch, group, watching):
    """It steps now and then, perhaps several times in a row. `weft top` shows the other optimizer's steps."""
    monkeypatch.setattr(Session, "each", 10)
    group()
    often, rarely = optimizer_of_two_weights(), optimizer_of_two_weights()
    published = []
    for optimizer in [*[often] * 4, rarely, *[often] * 30, rarely]:  # a period of one, though both are known
        optimizer.step()
    monkeypatch.setattr(
        watching._output, "publish", lambda session, *, ended=0, over: published.append(ended)
    )
    (session,) = Session.made
    before = session.steps
    for optimizer in [*[often] * 7, *[rarely] * 12, *[often] * 16, rarely] * 2:
        optimizer.step()
    assert session.steps == before + 2 * 23
    assert sum(published) == 2 * 23


@pytest.mark.parametrize(("changed", "ended"), [(True, True), (False, False)])
def test_a_capture_between_two_looks_ends_the_watch_of_a_policy(monkeypatch, group, watching, changed, ended):
    monkeypatch.setattr(Session, "each", 1000)
    monkeypatch.setattr(Session, "changed", changed)
    capturing = Mock(is_current_stream_capturing=Mock(return_value=False))
    monkeypatch.setattr(watching, "_cuda", capturing)
    leave = Mock()
    monkeypatch.setattr(watching, "_leave", leave)
    group()
    optimize()
    capturing.is_current_stream_capturing.return_value = True
    watching._free.begin(optimizer := torch.optim.SGD([torch.zeros(1)], lr=0.1), 1, 5)
    optimizer.step()
    assert leave.called == ended


def test_a_thread_takes_over_from_one_that_has_ended():
    """The second one runs already when the first one ends, so that they cannot have the same identifier."""
    own, both, ended, found = optimizer_steps.OwnThread(), threading.Barrier(2), threading.Event(), []

    def first() -> None:
        found.append(own.here())
        both.wait()
        both.wait()

    def second() -> None:
        both.wait()
        found.append(own.here())
        both.wait()
        ended.wait()
        found.append(own.here())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    threads[0].join()
    ended.set()
    threads[1].join()
    assert found == [True, False, True]
    assert own.here()


def test_free_steps_that_take_long_are_counted_meanwhile(monkeypatch):
    """A job whose steps have become slow is not silent until hundreds of them are over."""
    now = Mock(return_value=5.0)
    monkeypatch.setattr(optimizer_steps, "time", Mock(monotonic=now))
    optimizer, free = torch.optim.SGD([torch.zeros(1)], lr=0.1), optimizer_steps.FreeSteps()
    free.begin(optimizer, 3, 100)
    assert [free.take(optimizer) for _ in range(7)] == [True] * 7
    now.return_value += 2 * optimizer_steps.LONGEST_FREE_S
    assert not free.take(optimizer)
    assert free.end() == (7, 3)
    assert free.end() == (0, 3)


def test_of_many_free_steps_the_hook_counts_most_by_itself():
    """A call of Python after a step of the program, which has filled the caches, takes microseconds."""
    seen, free, optimizer = list[object](), optimizer_steps.FreeSteps(), optimizer_of_two_weights()
    hook = optimizer_steps.OptimizerHook(lambda one: free.take(one) and seen.append(one), free)
    try:
        for watched, looks in ((False, 6), (True, 100)):
            free.begin(optimizer, 1, 100, each_in_python=watched)
            for _ in range(100):
                optimizer.step()
            assert (len(seen), free.end()) == (looks, (100, 1))
            seen.clear()
        free.begin(optimizer, 1, 100)
        optimizer_of_two_weights().step()
        assert free.taken == 0
    finally:
        hook.remove()


def test_a_fork_of_a_rank_with_steps_of_its_own_is_not_tuned(group, watching):
    group()
    watching._group_process = -1  # the group is of the process that this one was forked from
    optimize()
    assert not Session.made


def test_what_is_known_is_saved_now_and_then(monkeypatch, group, watching, tmp_path):
    """A program may be killed or call os._exit, so its end may leave no chance to save."""
    monkeypatch.setattr(job, "SAVED_S", (0.0, 0.0))
    watching._save_after_s = 0.0
    group()
    optimize()
    assert read_record(tmp_path)["policies"] == []
    assert "ended before tuning was over" in read_result(tmp_path)["text"]


def test_a_group_without_a_step_is_reported_as_such(monkeypatch, group, watching, tmp_path):
    Calls(monkeypatch)
    group()
    assert "no optimizer step" in read_result(tmp_path)["text"]


def test_an_error_of_ours_is_one_line_and_the_hooks_are_gone(monkeypatch, group, tmp_path, capsys):
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer as hooks

    def entries() -> list[object]:
        names = ("init_process_group", "destroy_process_group")
        return [getattr(place, name) for place in (dist, distributed_c10d) for name in names]

    def broken(self) -> None:
        ddp._watch_forward()  # as candidates with other buckets do
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Session, "step", broken)
    monkeypatch.setattr(
        Session, "stop", lambda self, reason: self.on_end({"text": reason, "state": "stopped"}), raising=False
    )
    untouched, hooks_before = entries(), len(hooks._global_optimizer_post_hooks)
    post_forward = DistributedDataParallel._post_forward
    job.Live().watch()
    assert not set(untouched) & set(entries())
    assert len(hooks._global_optimizer_post_hooks) == hooks_before + 1
    group()
    optimize()
    assert len(hooks._global_optimizer_post_hooks) == hooks_before
    assert entries() == untouched
    assert DistributedDataParallel._post_forward is post_forward
    assert capsys.readouterr().err.count("tuning stops: ZeroDivisionError: ours") == 1
    assert "ZeroDivisionError" in json.loads((tmp_path / "tuning.0.json").read_text())["text"]


class PreemptedError(Exception):
    """Raised by a program that saves a checkpoint and exits."""


class Handler:
    """A signal handler in one of the forms that programs give it."""

    def __call__(self, number, frame) -> None:
        self.save_and_leave(number, frame)

    def save_and_leave(self, number, frame) -> None:
        raise PreemptedError

    @staticmethod
    def interrupt(number, frame) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (Handler(), PreemptedError),
        (partial(Handler().save_and_leave), PreemptedError),
        (Handler.interrupt, KeyboardInterrupt),
    ],
)
def test_what_a_signal_handler_raises_in_weft_reaches_the_program_and_ends_the_tuning(
    monkeypatch, group, watching, tmp_path, handler, kind
):
    def step(self) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def stop(self, reason: str) -> None:
        self.on_end({"text": reason, "state": "stopped"})

    monkeypatch.setattr(Session, "step", step)
    monkeypatch.setattr(Session, "stop", stop, raising=False)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        group()
        with pytest.raises(kind):
            optimize()
        optimize()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "was interrupted" in read_result(tmp_path)["text"]


@pytest.mark.parametrize("others", [0, 1])
def test_a_rank_that_runs_out_of_inputs_before_others_leaves_the_tuning(
    monkeypatch, group, watching, tmp_path, others
):
    from torch.distributed.algorithms.join import Join

    monkeypatch.setattr(Join, "_get_num_nonjoined_procs", lambda self: others)
    agreement = Mock()
    monkeypatch.setattr(Session, "agreement", agreement, raising=False)
    monkeypatch.setattr(
        Session, "stop", lambda self, reason: self.on_end({"text": reason, "state": "stopped"}), raising=False
    )
    group()
    optimize()
    assert Join._get_num_nonjoined_procs(None) == others
    assert agreement.leave.called == (watching._session is None) == bool(others)
    assert ("fewer inputs" in read_result(tmp_path)["text"]) == bool(others)


@pytest.mark.parametrize("may_leave", [False, True])
def test_two_threads_that_train_at_the_same_time_end_the_tuning(
    monkeypatch, group, watching, tmp_path, may_leave
):
    """At a step boundary of one, ranks may be at different steps of the other, whose models change, too."""
    agreement = Mock()
    monkeypatch.setattr(Session, "agreement", agreement, raising=False)
    monkeypatch.setattr(Session, "may_leave", may_leave, raising=False)
    monkeypatch.setattr(
        Session, "stop", lambda self, reason: self.on_end({"text": reason, "state": "stopped"}), raising=False
    )
    group()
    optimize()
    other = threading.Thread(target=optimize)
    other.start()
    other.join()
    assert watching._session is not None
    optimize()
    assert agreement.leave.called == (watching._session is None) == may_leave
    assert ("several threads" in read_result(tmp_path)["text"]) == may_leave


def test_a_rank_leaves_the_others_only_where_they_notice_it_under_the_same_policy():
    from weft.policy import Policy
    from weft.tuning.live.session import Session as RealSession

    class Both:
        leads = True

        def exchange(self, report, decide, *, extra_s=0.0):
            return decisions.pop(0)

        announce = exchange

    def run(light: bool) -> dict:
        policies = [Policy().to_dict(), Policy(max_ctas=16).to_dict()]
        order = {"policies": policies, "order": [0, 1], "learn": False, "light": light, "each": 2}
        return {"do": "run", **order, "inputs": False, "say": []}

    for light, leads in ((False, False), (False, True), (True, True), (True, False)):
        decisions = [run(light)]
        agreement = Both()
        agreement.leads = leads
        controls = Mock(default=Policy(), **{"between_ms.return_value": 1.0, "clock.return_value": {}})
        session = RealSession(controls, agreement, iter([{}]), Mock())
        session.begin()
        left = []
        for _ in range(4):
            left.append(session.may_leave)
            if len(left) < 4:
                session.step()
        session.stop("")
        assert left == [False, False, False, leads or not light]


def test_a_result_that_cannot_be_kept_stays_the_result(monkeypatch, group, watching, tmp_path, capsys):
    from weft.errors import UsageError
    from weft.policy import Policy
    from weft.tuning.live.earlier import Earlier
    from weft.tuning.live.job_output import warn

    def refuse(*_: object) -> None:
        raise UsageError("the verdict cannot be written as JSON")

    monkeypatch.setattr("weft.tuning.store.Store.put", refuse)
    group()
    watching._output.leads, watching._earlier = True, Earlier(Policy(), warn)
    watching._earlier.key = object()
    watching._end({"text": "ctas16", "state": "kept", "policy": Policy(max_ctas=16).to_dict()})
    assert read_result(tmp_path)["state"] == "kept"
    assert "not saved for the next start: the verdict cannot be written as JSON" in capsys.readouterr().err


def test_a_user_without_a_home_folder_is_tuned_without_earlier_results(monkeypatch):
    """For example in a container whose user has no entry in /etc/passwd."""
    from pathlib import Path

    from weft.policy import Policy
    from weft.tuning.live.earlier import Earlier

    def nowhere() -> None:
        raise RuntimeError("Could not determine home directory.")

    for name in ("WEFT_STORE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    said: list[str] = []
    earlier = Earlier(Policy(), said.append)
    assert earlier.recall(Facts(workload="job")) is None
    earlier.remember({"state": "kept", "policy": Policy(max_ctas=16).to_dict()})
    earlier.forget()
    assert ["no home folder" in line and "WEFT_STORE" in line for line in said] == [True, True]


def test_files_are_written_once_the_group_is_gone(monkeypatch, group, tmp_path):
    """The rank that serves the store must not go later than without weft: others may make the next group already."""
    import torch.distributed as dist

    seen, real = [], dist.destroy_process_group

    def destroy(*args: object) -> None:
        seen.append((live._session, read_result(tmp_path)["text"]))
        real(*args)

    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    monkeypatch.setattr(
        Session, "stop", lambda self, reason: self.on_end({"text": reason, "state": "stopped"}), raising=False
    )
    live = job.Live()
    live.watch()
    group()
    with ThreadPoolExecutor(1) as trainer:  # alive to the end, as in programs that train on a thread
        trainer.submit(optimize).result()
        assert live._session is not None
        dist.destroy_process_group()
    assert seen == [(None, "left alone: the job ended before tuning was over")]
    assert read_result(tmp_path)["text"] == "the program destroyed its process group before tuning finished"
    monkeypatch.undo()
    group()  # the fixture destroys it


@pytest.mark.parametrize("destroys", [True, False])
def test_a_proven_policy_of_a_job_that_ends_during_its_measurement_is_kept(
    monkeypatch, group, tmp_path, destroys
):
    """Short jobs: otherwise each would search again, and end before its search does."""
    import torch.distributed as dist

    from weft.policy import Policy
    from weft.tuning.live.tuned_job import TunedJob

    remembered = []
    monkeypatch.setattr(
        "weft.tuning.live.earlier.Earlier.remember", lambda _, result: remembered.append(result)
    )
    monkeypatch.setattr(Session, "leave", lambda self, result: self.on_end(result), raising=False)
    live = job.Live()
    live.watch()
    group()
    live._output.leads = True
    optimize()
    live._note_proven(lambda: TunedJob(policy=Policy(), kept=False, reason="not proven"))
    assert live._proven_so_far() is None
    found = TunedJob(policy=Policy(bucket_mb=400.0), kept=True, gain_pct=12.0, ci_pct=(9.0, 15.0))
    live._note_proven(lambda: found)
    if destroys:
        dist.destroy_process_group()
        group()  # the fixture destroys it
    else:
        live._at_exit(live._group_process)
    result = read_result(tmp_path)
    assert (result["state"], result["gain_pct"], result["ci"]) == ("kept", 12.0, [9.0, 15.0])
    assert result["text"].endswith("the job ended before this was measured any further")
    assert remembered == [result]
    live._session = None


def test_a_job_that_ends_during_another_search_keeps_what_is_known(monkeypatch, group, tmp_path):
    import torch.distributed as dist

    from weft.policy import Policy
    from weft.tuning.live.tuned_job import TunedJob

    monkeypatch.setattr(Session, "watching", False, raising=False)
    monkeypatch.setattr(Session, "leave", lambda self, result: self.on_end(result), raising=False)
    live = job.Live()
    live.watch()
    group()
    optimize()
    live._found(TunedJob(policy=Policy(), kept=False, reason="nothing was faster").to_dict())
    dist.destroy_process_group()
    group()  # the fixture destroys it
    result = read_result(tmp_path)
    assert (result["state"], result["reason"]) == ("left alone", "nothing was faster")
    assert live._session is None


def test_no_start_reads_the_decisions_of_an_earlier_one():
    """torchrun keeps the store where a restart changes the number of nodes, with the same count of restarts."""
    import torch.distributed as dist

    base = dist.HashStore()
    for start in range(3):
        zero, one = (job_store.own_keys(base, rank, 2) for rank in range(2))
        assert not one.check(["1/decision"])
        zero.set("1/decision", str(start))
        assert one.get("1/decision") == str(start).encode()
    assert not job_store.own_keys(base, 0, 3).check(["1/decision"])
