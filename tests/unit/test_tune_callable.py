"""`weft.tune(fn)`: verdicts with injected times, fake live controls, two gloo ranks; and `weft.restart()`."""

from __future__ import annotations

import inspect
import itertools
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

import weft
from weft.errors import UnavailableError, UsageError
from weft.policy import Policy
from weft.shim import restart
from weft.tuning import callable_runner as stage
from weft.tuning.live.options import Facts, Kernel
from weft.tuning.store import Key, Store

HIGH, HEAD = Policy(priority="high"), Policy(head_start_us=5.0)


def times(high=9.0, head=10.0, plain=10.0, noise=0.0, seed=0):
    draw = random.Random(seed)

    def ms(policy):
        base = high if policy.priority == "high" else head if policy.head_start_us else plain
        return base * (1 + draw.gauss(0, noise))

    return ms


def nothing():
    raise AssertionError("not called: the measurement is injected")


def test_the_package_is_the_function():
    import weft.tuning.store  # the import that makes the package an attribute of weft

    assert weft.tuning.store is sys.modules["weft.tuning.store"]
    assert weft.tune(nothing, measure=times(), candidates=[HIGH]).policy == HIGH
    assert list(inspect.signature(weft.tune).parameters)[:2] == ["fn", "candidates"]


def test_a_policy_that_helps_is_found_with_its_gain():
    tuned = weft.tune(nothing, measure=times(noise=0.01), candidates=[HIGH, HEAD, HIGH, Policy()])
    low, high = tuned.gain_ci_pct
    assert tuned.policy == HIGH
    assert low <= tuned.gain_pct <= high
    assert 7 < tuned.gain_pct < 13
    assert not tuned.leave
    assert tuned.text.startswith("priority: ")
    assert len(tuned.candidates) == 3
    assert Policy.from_dict(tuned.to_dict()["policy"]) == HIGH


@pytest.mark.parametrize(
    ("high", "said"), [(10.0, "nearest: "), (10.4, "nearest: "), (20.0, "nearest: head5")]
)
def test_what_does_not_help_is_left_alone_with_the_reason(high, said):
    tuned = weft.tune(nothing, measure=times(high=high, noise=0.01), candidates=[HIGH, HEAD])
    assert tuned.leave
    assert tuned.policy == Policy()
    assert tuned.gain_pct == 0
    assert tuned.text.startswith("Leave it alone: ")
    assert said in tuned.reason


def test_a_gain_that_does_not_hold_is_left_alone():
    counts = itertools.count()

    def ms(policy):  # faster at first, then equal
        return 9.0 if policy == HIGH and next(counts) < 4 else 10.0

    tuned = weft.tune(nothing, measure=ms, candidates=[HIGH])
    assert tuned.leave
    assert "not when measured again" in tuned.reason or "nearest: priority" in tuned.reason


def test_candidates_that_cannot_run_are_no_trouble():
    def ms(policy):
        if policy == HIGH:
            raise UnavailableError("not here")
        return 10.0

    assert "not here" in weft.tune(nothing, measure=ms, candidates=[HIGH]).reason
    assert "no control can matter" in weft.tune(nothing, measure=ms).reason


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: weft.tune(3), "takes a function, not int"),
        (lambda: weft.tune(nothing, device="tpu"), "device 'tpu'"),
        (lambda: weft.tune(nothing, budget_s=0), "greater than zero"),
        (
            lambda: weft.tune(
                nothing, measure=times(), candidates=[Policy(sm_reserve=n) for n in range(1, 200)]
            ),
            "too many",
        ),
    ],
)
def test_wrong_arguments_are_named(call, said):
    with pytest.raises(UsageError, match=said):
        call()


def test_without_a_gpu_it_says_so(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match='device="cpu"'):
        weft.tune(nothing)


def test_on_the_cpu_by_the_clock_when_asked():
    calls = []
    tuned = weft.tune(lambda: calls.append(1), setup=lambda: calls.append(0), device="cpu", rounds=3)
    assert tuned.leave
    assert calls[0] == 0
    assert sum(calls) > 3


class FakeControls:
    """Stands in for LaunchControls; on its simulated clock the step time depends on the policy."""

    seconds = 0.0

    def __init__(self, refuses=()):
        self.applied, self.prepared, self.released, self.refuses = [], [], 0, refuses

    def learn(self):
        self.applied.append("learn")

    def facts(self, steps):
        kernel = Kernel("gemm", "gemm", 4.0, 2.0, 4)
        return Facts(collectives=2.0, ctas=8, cta_choices=(4, 16), most_ctas=64, kernels=(kernel,))

    def prepare(self, policy, keys):
        if policy.max_ctas in self.refuses:
            raise UnavailableError("no such communicator")
        self.prepared.append(policy.max_ctas)

    def apply(self, policy):
        self.applied.append(policy)

    def synchronize(self):
        pass

    def release(self):
        self.released += 1

    def step(self):
        now = self.applied[-1] if self.applied else Policy()
        self.seconds += 0.002 if isinstance(now, Policy) and now.max_ctas == 16 else 0.004


@pytest.fixture
def live(monkeypatch, tmp_path):
    controls = FakeControls(refuses=(4,))
    monkeypatch.setattr(stage, "_controls", lambda world: controls)
    monkeypatch.setattr("weft.shim.apply.restore", lambda: controls.applied.append("again"))
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    monkeypatch.setattr("weft.tuning.callable.here", lambda workload: Key("g", "d", "n", "t", workload))
    monkeypatch.setattr(stage, "SAMPLE_MS", 1.0)
    monkeypatch.setattr(stage, "time", SimpleNamespace(perf_counter=lambda: controls.seconds))
    return controls


def test_live_controls_are_tried_and_given_back(live):
    tuned = weft.tune(live.step, rounds=5)
    assert tuned.policy.max_ctas == 16
    assert live.prepared == [16]  # 4 was refused, so it is no candidate
    assert all(one.policy.max_ctas != 4 for one in tuned.candidates)
    assert any(one.policy.priority == "high" for one in tuned.candidates)
    assert any(one.policy.residency == 3 for one in tuned.candidates)
    assert live.applied[-2:] == [Policy(), "again"]
    assert live.released == 1


def test_what_the_callable_raises_comes_out_and_the_process_is_as_before(live):
    calls = itertools.count()

    def step():
        if next(calls) == 9:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        weft.tune(step)
    assert live.applied[-2:] == [Policy(), "again"]


def test_what_the_callable_raises_while_it_is_watched_ends_the_watching(live):
    def step():
        if live.applied == ["learn"]:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        weft.tune(step)
    assert live.applied == ["learn", Policy(), "again"]


def test_a_named_callable_is_measured_once(live, monkeypatch):
    first = weft.tune(live.step, name="step", rounds=5)
    known = len(live.applied)
    second = weft.tune(live.step, name="step")
    assert len(live.applied) == known
    assert second.stored
    assert (second.policy, second.text) == (first.policy, first.text)
    assert not weft.tune(live.step, name="another", candidates=[HIGH], rounds=3).stored
    monkeypatch.setattr(
        "weft.tuning.entry.MAX_AGE_S", -1.0
    )  # all entries are stale: everything is measured again, the old winner too
    again = weft.tune(live.step, name="step", candidates=[HIGH], rounds=3)
    assert not again.stored
    assert first.policy in [one.policy for one in again.candidates]


def test_a_broken_store_costs_a_warning(live, tmp_path):
    (tmp_path / "verdicts.sqlite").write_bytes(b"no database" * 100)
    with pytest.warns(UserWarning, match="damaged") as warned:
        assert weft.tune(live.step, name="step", candidates=[HIGH], rounds=3).best_ms > 0
    assert len(warned) == 2  # once on reading, once on writing


def test_a_stored_verdict_of_another_kind_is_measured_again(live, tmp_path):
    Store().put(Key("g", "d", "n", "t", "callable step, 1 ranks"), HIGH, {"text": "?"})
    with pytest.warns(UserWarning, match="not a verdict of weft"):
        assert not weft.tune(live.step, name="step", candidates=[HIGH], rounds=3).stored


RANKS = """
import json, os, sys
from types import SimpleNamespace
import torch.distributed as dist
import weft
from weft.tuning import callable_runner as stage
dist.init_process_group(
    "gloo", init_method="INIT", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
)
rank = dist.get_rank()
seen, seconds = [], 0.0
stage.time = SimpleNamespace(perf_counter=lambda: seconds)

class Controls:
    now = weft.Policy()
    def learn(self): pass
    def prepare(self, policy, keys):
        if rank == 1:
            raise weft.WeftError("only rank 1 refuses")
    def apply(self, policy):
        if policy.head_start_us == 7 and rank == 1:
            raise weft.WeftError("rank 1 cannot")
        self.now = policy
    def synchronize(self): pass
    def release(self): pass
    def facts(self, steps):
        from weft.tuning.live.options import Facts
        return Facts(collectives=1.0, cta_choices=(4,) if rank else (4, 8))

controls = Controls()
stage._controls = lambda world: controls
stage.SAMPLE_MS = 1.0
import weft.shim.apply
weft.shim.apply.restore = lambda: None

def step():
    seen.append(str(controls.now))
    # fast on rank 0 alone is no gain: the slowest rank counts
    quick = controls.now.priority == "high" or (controls.now.head_start_us == 5 and rank == 0)
    global seconds
    seconds += 0.004 if quick else 0.02

tried = [weft.Policy(priority="high"), weft.Policy(head_start_us=5), weft.Policy(head_start_us=7), weft.Policy(max_ctas=4)]
tuned = weft.tune(step, candidates=tried, rounds=4)
with open(sys.argv[1] + f".{rank}", "w") as file:
    json.dump({"policy": tuned.policy.to_dict(), "seen": seen, "gain": tuned.gain_pct, "text": tuned.text,
               "labels": [c.candidate for c in tuned.candidates], "problems": [c.problem for c in tuned.candidates]}, file)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch 2.13 may abort at the end of the interpreter, while a thread of gloo lets go of its last tensors
"""


def test_two_ranks_try_the_same_and_judge_the_slowest(tmp_path):
    pytest.importorskip("torch")
    import json

    program = RANKS.replace("INIT", f"file://{tmp_path}/rendezvous")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "out"],
            env={**os.environ, "WORLD_SIZE": "2", "RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, error = rank.communicate(timeout=100)
            assert rank.returncode == 0, error.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    first, second = (json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2))
    assert first["policy"] == second["policy"] == HIGH.to_dict()
    assert first["seen"] == second["seen"]
    assert first["gain"] == second["gain"]
    assert first["labels"] == ["overlap", "priority", "head5", "head7"]  # no ctas4: one rank lacks it
    assert "rank 1 cannot" in first["problems"][3]
    assert first["problems"] == second["problems"]


def run(*words, **environment):
    env = {**os.environ, **environment}
    env.pop("WEFT_RESTARTED", None)
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=100)


PROGRAM = """
import os, sys, weft
print("start", sys.argv[1:])
weft.restart()
with weft.overlap(weft.Policy(priority="high")):
    print("inside", os.environ.get("KEPT"))
weft.restart()
sys.exit(7)
"""

needs_shim = pytest.mark.skipif(
    not (
        restart.binding.__file__
        and (__import__("pathlib").Path(restart.binding.__file__).with_name("libweft_shim.so")).is_file()
    ),
    reason="the shim is not built here",
)


@needs_shim
def test_a_program_starts_itself_again_under_the_shim(tmp_path):
    script = tmp_path / "my program.py"
    script.write_text(PROGRAM)
    done = run(script, "a", "b c", KEPT="kept")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["start ['a', 'b c']", "start ['a', 'b c']", "inside kept"]
    done = run("-c", PROGRAM, "x")
    assert done.returncode == 7
    assert done.stdout.count("inside") == 1


def test_the_error_names_the_command_that_works(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import weft\nwith weft.overlap(weft.Policy()):\n    print('inside')\n")
    done = run(script, "--lr", "0.1")
    said = done.stderr.splitlines()[-1]
    assert "this process was not started by weft run: start it with `weft run -- " in said
    assert f"{script} --lr 0.1`, or put `weft.restart()` first in the program" in said


def test_it_does_not_restart_for_ever_and_says_where_it_cannot(monkeypatch):
    monkeypatch.setattr(restart.binding, "injected", lambda: False)
    monkeypatch.setattr(os, "execve", lambda *call: pytest.fail("restarted"))
    monkeypatch.setenv(restart.RESTARTED, "1")
    with pytest.raises(UnavailableError, match="the launch shim did not load"):
        restart.restart()
    monkeypatch.delenv(restart.RESTARTED)
    monkeypatch.setattr(sys, "orig_argv", ["python"])
    with pytest.raises(UnavailableError, match="no script.*weft run -- python SCRIPT"):
        restart.restart()
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.setattr(restart.multiprocessing, "parent_process", lambda: object())
    with pytest.raises(UnavailableError, match="child of multiprocessing"):
        restart.restart()
