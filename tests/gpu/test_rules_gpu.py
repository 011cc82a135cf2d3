"""Rules for collectives on a real NCCL, two ghost ranks: by call configuration, by the tuner plugin alone.

Needs torch and an NCCL that places two ranks on one GPU (WEFT_TEST_NCCL). Every run has a deadline.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.execute.worker import RemoteExecutor
from weft.policy import CommRule, Policy
from weft.workload import Compute, Workload

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs"
LINE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")


@pytest.fixture(scope="module", params=["config", "tuner"])
def ghosts(request, nccl, tmp_path_factory):
    log = tmp_path_factory.mktemp("nccl") / "log"
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {
        **os.environ,
        "PYTHONPATH": paths,
        "WEFT_NCCL": nccl,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "TUNING",
        "NCCL_DEBUG_FILE": str(log),
        "WEFT_NO_CALL_CONFIG": "1" if request.param == "tuner" else "0",
    }
    program = [sys.executable, str(PROGRAMS / "rules_ghosts.py")]
    policy = log.with_name("policy.json")
    subprocess.run([*program, str(policy)], env=env, timeout=60, check=True)
    command = [sys.executable, "-m", "weft", "run", "--policy", str(policy), "--", *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:] + tail
    print(done.stdout)
    found = json.loads(done.stdout.splitlines()[-1])
    planned = (
        [line for line in log.read_text(errors="replace").splitlines() if "Algo" in line] if tail else []
    )
    print("\n".join([*dict.fromkeys(re.sub(r"^.*NCCL INFO ", "", line) for line in planned)][:60]))
    found["planned"] = [match.groups() for match in map(LINE.search, planned) if match]
    found["wanted"] = request.param
    return found


def phase(ghosts, name):
    (found,) = [found for found in ghosts["phases"] if found["name"] == name]
    return found


def test_the_path_is_the_one_that_was_asked_for(ghosts):
    if ghosts["wanted"] == "config" and tuple(map(int, ghosts["nccl"].split(".")[:2])) < (2, 31):
        pytest.skip("this NCCL takes no configuration with a call")
    assert ghosts["path"] == ghosts["wanted"], ghosts["why"]
    assert ghosts["tuner"] == 6
    assert ghosts["counters"]["config_refused"] == ghosts["counters"]["tuner_failures"] == 0


def test_each_size_has_the_ctas_of_its_rule(ghosts):
    calls = phase(ghosts, "ctas")["calls"]
    seen = {name: call["ctas"] for name, call in calls.items()}
    wanted = {
        "all_reduce 65536": [2],
        "all_reduce 4194304": [4],
        "all_reduce 67108864": [8],
        "all_gather": [3],
    }
    assert {name: seen[name] for name in wanted} == wanted, seen


def test_results_are_bit_equal_under_every_rule(ghosts):
    assert len({tuple(found["digests"]) for found in ghosts["phases"]}) == 1


def test_algorithm_and_protocol_follow_the_rules(ghosts):
    """Reads NCCL's own log of its plans, in the order of the phases."""
    kinds = {(algorithm.upper(), protocol.upper()) for _, _, algorithm, protocol, _, _ in ghosts["planned"]}
    if not ghosts["planned"]:
        pytest.skip("this NCCL logs no plans")
    assert "TREE" in {algorithm for algorithm, _ in kinds}, kinds
    assert ("RING", "LL") in kinds, kinds
    assert ("RING", "SIMPLE") in kinds, kinds


def test_per_call_control_takes_no_memory(ghosts):
    assert phase(ghosts, "plain")["free"] - phase(ghosts, "ctas")["free"] < 1 << 20
    assert ghosts["limit_bytes"] < 1 << 20
    assert ghosts["limited"]["ctas"] == [6]


def test_sends_and_receives_have_the_channels_that_the_job_started_with(ghosts):
    assert max(ghosts["exchanged"]["ctas"]) <= 2, ghosts["exchanged"]


def test_a_captured_call_keeps_the_policy_of_the_job(ghosts):
    assert ghosts["captured"]["equal"]
    assert ghosts["captured"]["ctas"] in ([12], []), ghosts["captured"]  # no rule: the communicator's own 12


def test_the_lab_measures_the_rules_of_a_policy(nccl, monkeypatch):
    """Rules give large all-reduces 4 of the communicator's 16 CTAs: they take the time of a limit of 4."""
    monkeypatch.setenv("WEFT_NCCL", nccl)
    workload = Workload(
        compute=Compute(kind="gemm", shape=(256, 256, 256)), collective="all_reduce", bytes=64 << 20
    )
    rule = CommRule(collective="all_reduce", min_bytes=1 << 20, ctas=4)
    policies = {
        "ruled": Policy(max_ctas=16, comm_rules=(rule,)),
        "4": Policy(max_ctas=4),
        "16": Policy(max_ctas=16),
    }
    with RemoteExecutor() as lab:
        samples = [{n: lab.measure(workload, policy).ms for n, policy in policies.items()} for _ in range(4)]
    ms = {name: min(sample[name] for sample in samples) for name in policies}
    assert ms["ruled"] == pytest.approx(ms["4"], rel=0.2), ms
    assert ms["16"] < 0.7 * ms["4"], ms
