"""CTAs from start to start, where a running job cannot change them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from weft.policy import Policy
from weft.tuning.live import starts
from weft.tuning.live.options import Facts
from weft.tuning.live.starts import Memory, Starts
from weft.tuning.live.tuned_job import TunedJob
from weft.tuning.store import Store

COMMAND = ["torchrun", "train.py"]


def machine() -> tuple[str, str]:
    return "NVIDIA H200", "580.159"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    return tmp_path / "verdicts.sqlite"


def result(ms: float, choices: tuple[int, ...] = (8, 16, 24)) -> dict:
    facts = Facts(ctas=12, why_no_ctas="no siblings", cta_choices_at_start=choices)
    return TunedJob(policy=Policy(), kept=False, reason="no siblings", default_ms=ms, facts=facts).to_dict()


def play(times: dict[int | None, float], count: int) -> tuple[list[int | None], list[str]]:
    ran, said = [], []
    for _ in range(count):
        memory = Memory(COMMAND, machine)
        ran.append(memory.begin())
        said.append(memory.learn(result(times[ran[-1]])))
    return ran, said


def test_each_start_tries_one_number_and_later_ones_have_the_best():
    ran, said = play({None: 50, 8: 55, 16: 47, 24: 46}, 6)
    assert ran == [None, 8, 16, 24, 24, 24]
    assert said[0] == "the next start tries 8 CTAs"
    assert said[3].startswith("24 CTAs took 8.0% less time per step")


def test_a_small_lead_between_runs_changes_nothing():
    ran, said = play({None: 50, 8: 55, 16: 49, 24: 49.5}, 6)
    assert ran == [None, 8, 16, 24, None, None]
    assert "no number of CTAs was clearly faster" in said[-1]


def test_a_start_that_never_ended_is_not_tried_again():
    Memory(COMMAND, machine).learn(result(50))
    assert Memory(COMMAND, machine).begin() == 8
    assert Memory(COMMAND, machine).begin() == 16


def test_another_command_machine_or_job_that_can_switch_starts_afresh():
    play({None: 50, 8: 45, 16: 47, 24: 46}, 4)
    assert Memory(["torchrun", "other.py"], machine).begin() is None
    assert Memory(COMMAND, lambda: ("NVIDIA A100", "580.159")).begin() is None
    assert Memory(COMMAND, lambda: None).begin() is None
    memory = Memory(COMMAND, machine)
    assert memory.begin() == 8
    assert memory.learn(result(44, choices=())) == ""


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {"starts": [], "choices": []},
        {"starts": {"x": 1}, "choices": []},
        {"starts": {"0": 5, "9999": 1}, "choices": []},
        {"starts": {"0": -1}, "choices": [8]},
    ],
)
def test_what_is_not_of_our_making_is_tried_anew(verdict):
    Store().put(starts.key(COMMAND, *machine()), Policy(), verdict)
    assert Memory(COMMAND, machine).starts == Starts({})


def test_a_broken_store_costs_a_line(store):
    store.write_text("no database")
    memory = Memory(COMMAND, machine)
    assert memory.begin() is None
    assert "earlier starts are not used" in memory.problem
    assert memory.learn(result(50)) == ""


RUN = """
import sys
from weft.tuning.live import starts
Memory = starts.Memory
starts.Memory = lambda command: Memory(["torchrun", "train.py"], lambda: ("NVIDIA H200", "580.159"))
from weft.cli.main import main
main(["run", "--tune", "--", sys.executable, "-c", sys.argv[1]])
"""


def test_the_program_is_started_with_it_and_the_user_is_told(tmp_path, monkeypatch):
    play({None: 50, 8: 55, 16: 47, 24: 46}, 1)
    seen = tmp_path / "seen"
    script = f"import json, os; json.dump(os.environ.get('NCCL_MAX_CTAS'), open({str(seen)!r}, 'w'))"
    command = [sys.executable, "-c", RUN, script]  # a process of its own: weft run ends like the program
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(seen.read_text()) == "8"
    assert "this start has 8 CTAs for a collective" in done.stderr
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert json.loads(seen.read_text()) == "4"
