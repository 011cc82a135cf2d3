"""Settings from start to start, where a running job cannot change them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import count
from random import Random

import pytest

from weft.policy import Policy
from weft.tuning.live import starts
from weft.tuning.live.launcher import still_runs, this_launcher
from weft.tuning.live.options import Facts, merge
from weft.tuning.live.start_trial import (
    GIVEN_VARIABLE,
    LARGER_BUFFERS,
    MORE_QUEUES,
    PAIRS,
    RANGES,
    USES,
    configured,
    offered,
)
from weft.tuning.live.starts import OWN, Memory, Starts
from weft.tuning.live.tuned_job import TunedJob, stopped
from weft.tuning.store import Store

COMMAND = ["torchrun", "train.py"]
QUEUES, BUFFERS = (dict([one.split("=")]) for one in (MORE_QUEUES, LARGER_BUFFERS))


def machine() -> tuple[str, str]:
    return "NVIDIA H200", "580.159"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    for name in RANGES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "verdicts.sqlite"


def result(ms: float, choices: tuple[int, ...] = (8, 16, 24), settings: tuple[str, ...] = ()) -> dict:
    facts = Facts(ctas=12, why_no_ctas="no siblings", cta_choices_at_start=choices, start_settings=settings)
    return TunedJob(policy=Policy(), kept=False, reason="no siblings", default_ms=ms, facts=facts).to_dict()


def play(times: dict[int | None, float], number: int) -> tuple[list[int | None], list[str]]:
    """`number` starts whose step time depends on the CTAs: what each ran with, and the messages."""
    ran, said = [], []
    for i in range(number):
        memory = Memory(COMMAND, machine, coin=lambda i=i: i % 3 == 0)
        ctas = memory.begin().get("NCCL_MAX_CTAS")
        ran.append(int(ctas) if ctas else None)
        said.append(memory.learn(result(times[ran[-1]])))
    return ran, said


@pytest.mark.parametrize("program", ["/home/jos\udce9/bin/torchrun", "a\tb", "/x" * 2000])
def test_a_program_of_any_name_is_started(program):
    command = [program, "train.py"]
    Memory(command, machine).learn(result(50))
    assert Memory(command, machine).begin() == {"NCCL_MAX_CTAS": "8"}
    assert not Memory([f"{program}2", "train.py"], machine).begin()


def test_each_start_tries_one_number_and_the_best_must_win_every_pair():
    ran, said = play({None: 50, 8: 55, 16: 47, 24: 46}, 4 + 2 * PAIRS + 2)
    assert ran[:4] == [None, 8, 16, 24]
    assert said[0] == "the next start tries 8 CTAs"
    compared = ran[4 : 4 + 2 * PAIRS]
    pairs = list(zip(compared[::2], compared[1::2], strict=True))
    assert set(pairs) == {(24, None), (None, 24)}  # in varying order
    assert ran[-2:] == [24, 24]
    assert "pair 1 of 8" in said[3]
    assert said[-1].startswith("NCCL_MAX_CTAS=24 took 8.0% less time per step between starts (8.0 to 8.0%")


def test_a_small_lead_between_runs_changes_nothing():
    ran, said = play({None: 50, 8: 55, 16: 49, 24: 49.5}, 6)
    assert ran == [None, 8, 16, 24, None, None]
    assert "no number of CTAs was clearly faster" in said[-1]


def test_a_start_that_never_ended_is_not_tried_again():
    Memory(COMMAND, machine).learn(result(50))
    assert Memory(COMMAND, machine).begin() == {"NCCL_MAX_CTAS": "8"}
    assert Memory(COMMAND, machine).begin() == {"NCCL_MAX_CTAS": "16"}


def test_another_command_or_machine_starts_afresh():
    play({None: 50, 8: 45, 16: 47, 24: 46}, 1)
    assert Memory(COMMAND, machine).begin() == {"NCCL_MAX_CTAS": "8"}
    assert Memory(["torchrun", "other.py"], machine).begin() == {}
    assert Memory(COMMAND, lambda: ("NVIDIA A100", "580.159")).begin() == {}
    assert Memory(COMMAND, lambda: None).begin() == {}
    assert Memory(["torchrun", "other.py"], machine).learn(result(44, choices=())) == ""


def begun(fixed=(), *, runs=False):
    """A start that has begun, B before A. `runs`: whether earlier starts still run."""
    memory = Memory(COMMAND, machine, fixed=fixed, coin=lambda: True, runs=lambda launcher: runs)
    return memory, memory.begin()


def start(ms=None, *, fixed=(), ended_well=True, offers=(MORE_QUEUES, LARGER_BUFFERS)):
    """One start of a job that offers both settings: what it ran with, and the message."""
    memory, given = begun(fixed)
    done = result(ms, (), offers) if ms else stopped("it ended too early")
    return given, memory.learn(done, ended_well=ended_well)


def test_a_setting_is_dropped_for_good_after_the_first_pair_that_it_does_not_win():
    said = f"{MORE_QUEUES} is being compared between starts: pair 1 of 8, until it loses one"
    assert start(50) == ({}, said)
    assert start(49.8)[0] == QUEUES
    assert start(50)[0] == {}
    assert start(40)[0] == BUFFERS  # half a percent ahead was not enough
    assert start(50)[0] == {}
    assert start(51)[0] == BUFFERS
    given, said = start(50)
    assert given == {}
    assert "+2.0% time per step in pair 2 of starts" in said
    assert [start(50)[0] for _ in range(3)] == [{}, {}, {}]


def test_settings_are_compared_although_the_first_start_did_not_end_well():
    assert start(50, ended_well=False)[0] == {}
    assert start(45)[0] == QUEUES
    given, said = start(50)
    assert given == {}
    assert "pair 2 of 8" in said


@pytest.mark.parametrize(
    ("how", "next_one"),
    [
        ({"ended_well": False}, BUFFERS),
        ({"ms": 30, "ended_well": False}, BUFFERS),  # fast, but it ran out of memory
        ({}, QUEUES),
        (None, BUFFERS),
    ],
)
def test_a_start_without_a_result_is_repeated_unless_the_setting_may_have_broken_it(how, next_one):
    start(50)
    if how is None:
        begun()  # and never finished
    else:
        assert start(**how)[0] == QUEUES
    assert start(50)[0] == next_one


def test_what_the_user_sets_is_neither_tried_nor_forgotten():
    start(50)
    start(40)
    assert start(50, fixed=["CUDA_DEVICE_MAX_CONNECTIONS"])[0] == BUFFERS
    assert start(50)[0] == {}  # the second start of that pair
    assert start(50)[0] == QUEUES  # the pair starts over


def used(*times, **how):
    """Starts with these step times of a job that offers one setting: which had it, and the last message."""
    done = [start(ms, offers=(MORE_QUEUES,), **how) for ms in times]
    return [given == QUEUES for given, _ in done], done[-1][1]


def confirmed():
    had, said = used(50, *(45, 50) * PAIRS, 45)
    assert had == [False, *(True, False) * PAIRS, True]
    assert said.endswith("later starts use it")


@pytest.mark.parametrize("faster_again", [True, False])
def test_a_confirmed_setting_that_no_longer_pays_is_dropped_after_two_lost_pairs(faster_again):
    confirmed()
    had, said = used(48)  # 7% slower than with it in the last pair
    assert (had, said[-37:]) == ([True], " the next two starts compare it again")
    assert used(47, 46)[0] == [True, False]  # lost
    assert used(45, 49 if faster_again else 44)[0] == [True, False]
    had, said = used(45)
    assert had == [faster_again]
    if not faster_again:
        assert "not tried again: +2.3% time per step in the last of 2 pairs that it lost" in said


def test_a_confirmed_setting_is_compared_again_now_and_then_and_after_a_failure_from_the_beginning():
    confirmed()
    assert used(*[45] * USES, 50, 45)[0] == [True] * USES + [False, True]
    assert "pair 1 of 8" in used(45, ended_well=False)[1]


def test_two_starts_at_once_are_not_compared():
    start(50)
    first, given = begun()
    assert given == QUEUES
    second, given = begun(runs=True)
    assert (given, second.learn(result(70))) == ({}, starts.OVERLAPPED)
    assert "pair 1 of 8" in first.learn(result(30, ()))  # this start shared the GPU, so it does not count
    assert start(45)[0] == QUEUES
    first, _ = begun()
    begun(runs=True)
    first.learn(stopped("no memory left"), ended_well=False)
    assert start(50)[0] == QUEUES  # not to blame


def test_a_launcher_runs_until_it_ends():
    assert still_runs(this_launcher())
    host, boot, pid, began, now = this_launcher().split()
    for gone in (
        (host, "other-boot", pid, began, now),
        (host, boot, pid, "1", now),
        ("elsewhere", boot, pid, "", "1"),
    ):
        assert not still_runs(" ".join(gone))
    assert still_runs(f"elsewhere {boot} 1 1 {now}")
    assert not still_runs("True")


def test_what_a_job_offers():
    usual = {"free_bytes": 64 << 30, "one_node": True, "exposed_ms": 5.0, "step_ms": 50.0}
    assert offered({}, **usual) == (MORE_QUEUES, LARGER_BUFFERS)
    assert offered({"NCCL_BUFFSIZE": "1048576"}, **usual) == (MORE_QUEUES,)
    assert offered({}, **{**usual, "free_bytes": 1 << 30}) == (MORE_QUEUES,)
    assert offered({}, **{**usual, "one_node": False}) == ()
    assert offered({}, **{**usual, "exposed_ms": 0.5}) == ()
    given = {GIVEN_VARIABLE: MORE_QUEUES, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert offered(given, **usual) == (MORE_QUEUES, LARGER_BUFFERS)
    assert offered({**given, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, **usual) == (LARGER_BUFFERS,)
    facts = [Facts(start_settings=(MORE_QUEUES, LARGER_BUFFERS)), Facts(start_settings=(LARGER_BUFFERS,))]
    assert merge(facts).start_settings == (LARGER_BUFFERS,)


def test_what_nccls_configuration_files_set_is_the_users(tmp_path):
    own, system = tmp_path / ".nccl.conf", tmp_path / "etc.conf"
    own.write_text("# NCCL_DEBUG=INFO\nNCCL_BUFFSIZE = 2097152\n\n")
    system.write_text("NCCL_MAX_CTAS=8\n")
    assert configured({"HOME": str(tmp_path)}, system) == {"NCCL_BUFFSIZE", "NCCL_MAX_CTAS"}
    os.mkfifo(tmp_path / "pipe")  # no writer: reading would block forever
    for name in ("none", "pipe"):
        own = {"HOME": str(tmp_path), "NCCL_CONF_FILE": f"{tmp_path}/{name}"}
        assert configured(own, tmp_path / "no") == set()


def history(ms, settings, number, draw):
    """Many starts without a store: the settings that were claimed, and how many starts had each."""
    now, used = Starts({OWN: 1.0}).with_trials(settings), Counter()
    for _ in range(number):
        trial = now.current()
        if trial is None:
            break
        now = now.replaced(trial.begun(draw.random() < 0.5, "this"))
        given = now.next()
        used.update(given)
        now = now.replaced(now.current().ended(ms(given)))
    return now.confirmed, used


def scatters(draw):
    """Relative step times of successive starts: kinds of scatter between processes of one command."""
    walk, starts = [0.0], count()

    def wander() -> float:
        walk[0] = 0.9 * walk[0] + draw.gauss(0, 0.02)
        return walk[0]

    return {
        "normal": lambda: draw.gauss(0, 0.03),
        "two modes": lambda: draw.choice([0.0, 0.06]) + draw.gauss(0, 0.003),
        "heavy tails": lambda: min(5.0, 0.01 * draw.paretovariate(1.1)),
        "slow drift": wander,
        "every second start": lambda: 0.05 * (next(starts) % 2) + draw.gauss(0, 0.002),
        "ever faster": lambda: -0.002 * next(starts) + draw.gauss(0, 0.01),
    }


@pytest.mark.parametrize("kind", list(scatters(Random(0))))
def test_false_claims_between_starts_are_at_most_two_percent(kind):
    draw, jobs, claimed = Random(kind), 1000, 0
    settings = [MORE_QUEUES, LARGER_BUFFERS, "NCCL_MAX_CTAS=8"]
    for _ in range(jobs):
        scatter = scatters(draw)[kind]
        found, used = history(lambda _, scatter=scatter: 50 * (1 + scatter()), settings, 100, draw)
        claimed += bool(found)
        assert all(used[one] <= PAIRS or one in found for one in settings)
    assert claimed <= 0.02 * jobs


@pytest.mark.parametrize(("scatter", "least"), [(0.01, 0.9), (0.03, 0.2)])
def test_a_gain_of_five_percent_between_starts_is_found(scatter, least):
    draw, found = Random(7), 0

    def ms(given):
        return 50 * (0.95 if given else 1.0) * (1 + draw.gauss(0, scatter))

    for _ in range(200):
        found += bool(history(ms, [MORE_QUEUES], 100, draw)[0])
    assert found >= least * 200


TRIAL = {
    "setting": MORE_QUEUES,
    "pairs": [[50, 48]],
    "with_first": None,
    "half_ms": None,
    "running": False,
    "over": "",
}


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {"starts": [], "choices": []},
        {"starts": {"x": 1}, "choices": []},
        {"starts": {"0": 5, "9999": 1}, "choices": []},
        {"starts": {"0": -1}, "choices": [8]},
        {"starts": {"0": 10**400}, "choices": [8]},
        {"starts": {}, "choices": [], "trials": [{**TRIAL, "pairs": [[50, 10**400]]}]},
        {"starts": {}, "choices": [], "trials": [{**TRIAL, "setting": "LD_PRELOAD=/tmp/x.so"}]},
        {"starts": {}, "choices": [], "trials": [{**TRIAL, "setting": "NCCL_BUFFSIZE=1 LD_PRELOAD=x"}]},
        {"starts": {}, "choices": [], "trials": [{**TRIAL, "setting": "CUDA_DEVICE_MAX_CONNECTIONS=33"}]},
        {"starts": {}, "choices": [], "trials": [{**TRIAL, "pairs": [[50, -1]]}]},
        {"starts": {}, "choices": [], "trials": [{**TRIAL, "pairs": [[50]]}]},
        {"starts": {}, "choices": [], "trials": [{"setting": MORE_QUEUES}]},
    ],
)
def test_what_is_not_of_our_making_is_tried_anew(verdict):
    Store().put(starts.key(COMMAND, *machine()), Policy(), verdict)
    assert Memory(COMMAND, machine).starts == Starts({})


def test_a_broken_store_costs_a_line(store):
    store.write_text("no database")
    memory = Memory(COMMAND, machine)
    assert memory.begin() == {}
    assert "earlier starts are not used" in memory.problem
    assert memory.learn(result(50)) == ""


RUN = """
import sys
from weft.tuning.live import starts
Memory = starts.Memory
starts.Memory = lambda command, fixed: Memory(
    ["torchrun", "train.py"], lambda: ("NVIDIA H200", "580.159"), fixed=fixed, coin=lambda: True
)
from weft.cli.main import main
main(["run", "--tune", "--", sys.executable, "-c", sys.argv[1]])
"""


def test_the_program_is_started_with_it_and_the_user_is_told(tmp_path, monkeypatch):
    Memory(COMMAND, machine).learn(result(50, (8,), (MORE_QUEUES,)))
    seen = tmp_path / "seen"
    script = f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))"
    command = [sys.executable, "-c", RUN, script]  # a separate process: weft run ends like the program

    def run() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr

    assert "this start uses NCCL_MAX_CTAS=8" in run()
    assert json.loads(seen.read_text())["NCCL_MAX_CTAS"] == "8"
    assert f"this start uses {MORE_QUEUES}" in run()
    found = json.loads(seen.read_text())
    assert (found["CUDA_DEVICE_MAX_CONNECTIONS"], found[GIVEN_VARIABLE]) == ("32", MORE_QUEUES)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "this start uses" not in run()
    assert json.loads(seen.read_text())["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
