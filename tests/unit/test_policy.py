from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import InputError, UsageError
from weft.policy import ENGINES, MAX_RESIDENCY, MOMENTS, PRIORITIES, SCHEDULES, CommRule, Policy, Rule

residencies = st.none() | st.integers(1, MAX_RESIDENCY)
policies = st.builds(
    Policy,
    priority=st.sampled_from(PRIORITIES),
    head_start=st.sampled_from((None, "placed")),
    head_start_us=st.floats(0, 1000),
    max_ctas=st.none() | st.integers(1, 128),
    engine=st.sampled_from(ENGINES),
    residency=residencies,
    when=st.sampled_from(MOMENTS),
    rules=st.lists(st.builds(Rule, st.text("ab*?_é", min_size=1, max_size=20), residencies), max_size=4),
    sm_reserve=st.integers(0, 64),
    schedule=st.none() | st.sampled_from(SCHEDULES),
)


@examples()
@given(policies)
def test_a_policy_survives_json(policy):
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


def test_the_defaults_change_nothing():
    assert Policy().is_neutral
    assert Policy().to_dict() == {"version": 1}
    assert str(Policy()) == "no control"


@pytest.mark.parametrize(
    ("given", "mode", "document", "label"),
    [
        ({}, "none", {}, "overlap"),
        ({"head_start": "none"}, "none", {}, "overlap"),
        ({"head_start_us": 5}, "timed", {"head_start_us": 5}, "head5"),
        ({"head_start": "timed", "head_start_us": 5}, "timed", {"head_start_us": 5}, "head5"),
        ({"head_start": "placed"}, "placed", {"head_start": "placed"}, "placed"),
        (
            {"head_start": "placed", "head_start_us": 300},
            "placed",
            {"head_start": "placed", "head_start_us": 300},
            "placed300",
        ),
    ],
)
def test_one_head_start_has_one_form(given, mode, document, label):
    policy = Policy(**given)
    assert policy.head_start_mode == mode
    assert policy.to_dict() == ({"version": 1, "comm": document} if document else {"version": 1})
    assert policy.label == label
    assert policy.controls == (mode != "none")
    assert replace(policy, head_start=None, head_start_us=0) == Policy()


@pytest.mark.parametrize("key", ["comm", "max_ctas"])
def test_a_key_that_is_there_twice_is_refused(key, tmp_path):
    """json keeps only the last one, so part of the policy would be lost silently."""
    text = '{"version": 1, "comm": {"max_ctas": 8}}'
    path = tmp_path / "policy.json"
    path.write_text(text.replace(f'"{key}":', f'"{key}": {{}}, "{key}":'))
    with pytest.raises(InputError, match=f"^policy {path}: duplicate key '{key}'; remove one$"):
        Policy.load(path)


def test_save_and_load(tmp_path):
    policy = Policy(
        priority="high", residency=3, rules=(Rule("*gemm*", 2), Rule("*norm*", None)), when="overlap"
    )
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == policy
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ([], "object"),
        ({}, 'no version; add "version": 1'),
        ({"version": True}, "version True"),
        ({"version": 1, "comm": {"head_start_us": 10**400}}, "comm.head_start_us 1000"),
        ({"version": 1, "compute": {"sm_reserve": None}}, "compute.sm_reserve None"),
        ({"version": 1, "compute": {"rules": [{"kernel": "\ud800", "residency": 1}]}}, "no kernel name has"),
        ({"version": 1, "compute": {"rules": [{"kernel": "a\0b", "residency": 1}]}}, "no kernel name has"),
        ({"version": 2}, "version 2"),
        ({"version": 1, "comm": {"prioritty": "high"}}, "unknown key 'prioritty'"),
        ({"version": 1, "extra": 1}, "unknown key 'extra'"),
        ({"version": 1, "comm": {"priority": "urgent"}}, "comm.priority 'urgent'"),
        ({"version": 1, "comm": []}, "comm: must be an object"),
        ({"version": 1, "comm": {"head_start_us": -1}}, "comm.head_start_us -1"),
        ({"version": 1, "comm": {"head_start": "placed", "head_start_us": 1e6}}, "use 0 to 100000 micro"),
        ({"version": 1, "comm": {"head_start": "timed"}}, "timed needs comm.head_start_us"),
        ({"version": 1, "comm": {"head_start": "none", "head_start_us": 5}}, "none contradicts"),
        ({"version": 1, "comm": {"head_start": "exact"}}, "use one of none, timed, placed"),
        ({"version": 1, "comm": {"head_start_us": 5000}}, "comm.head_start_us 5000"),
        ({"version": 1, "comm": {"max_ctas": 0}}, "comm.max_ctas 0"),
        (
            {"version": 1, "comm": {"max_ctas": 1000}},
            "comm.max_ctas 1000 is not valid; use an integer from 1 to 128 "
            "(NCCL has at most 64 channels, RCCL 128)",
        ),
        ({"version": 1, "comm": {"engine": "warp"}}, "comm.engine 'warp'"),
        ({"version": 1, "compute": {"residency": 0}}, "compute.residency 0"),
        ({"version": 1, "compute": {"residency": -3}}, "compute.residency -3"),
        ({"version": 1, "compute": {"residency": 33}}, "compute.residency 33"),
        ({"version": 1, "compute": {"residency": True}}, "compute.residency True"),
        ({"version": 1, "compute": {"residency": 2.5}}, "compute.residency 2.5"),
        ({"version": 1, "compute": {"when": "sometimes"}}, "compute.when 'sometimes'"),
        ({"version": 1, "compute": {"rules": {}}}, "compute.rules: must be a list"),
        ({"version": 1, "compute": {"rules": [{"kernel": "*"}]}}, "kernel and residency"),
        ({"version": 1, "compute": {"rules": [{"kernel": "", "residency": 1}]}}, "name pattern"),
        ({"version": 1, "compute": {"rules": [{"kernel": "x" * 200, "residency": 1}]}}, "too long"),
        ({"version": 1, "compute": {"rules": [{"kernel": "*", "residency": 1}] * 65}}, "65 rules"),
        ({"version": 1, "schedule": "chaos"}, "schedule 'chaos'"),
    ],
)
def test_what_is_wrong_is_named(document, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        Policy.from_dict(document)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", "nonsense"])
def test_a_malformed_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InputError, match="broken.json"):
        Policy.load(path)


def test_a_missing_file_and_a_binary_file_are_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="nowhere.json"):
        Policy.load(tmp_path / "nowhere.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="binary.json"):
        Policy.load(tmp_path / "binary.json")


def test_rules_for_collectives_are_refused_by_name():
    for entry, words in (
        ({"collective": "gossip"}, "comm.rules: collective 'gossip' is not known"),
        ({"ctas": 0}, "comm.rules: ctas 0 is not valid"),
        ({"ctas": 65}, "use an integer from 1 to 64 (the channels of NCCL)"),
        ({"cluster": 9}, "comm.rules: cluster 9"),
        ({"algorithm": "Ring"}, "comm.rules: algorithm 'Ring' is not known"),
        ({"protocol": "LL"}, "use one of ll, ll128, simple"),
        ({"chunk": 100}, "comm.rules: chunk 100"),
        ({"cta_policy": "all"}, "comm.rules: cta_policy"),
        ({"min_bytes": 10, "max_bytes": 9}, "max_bytes 9 is below min_bytes 10"),
        ({"min_bytes": -1}, "comm.rules: min_bytes -1"),
        ({"collective": "send_recv", "protocol": "ll"}, "keep collective and ctas only"),
        ({"size": 3}, "unknown key 'size'"),
        (3, "every entry must be an object"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            Policy.from_dict({"version": 1, "comm": {"rules": [entry]}})
    with pytest.raises(UsageError, match="must be a list"):
        Policy.from_dict({"version": 1, "comm": {"rules": {}}})
    with pytest.raises(UsageError, match="at most 32"):
        Policy(comm_rules=(CommRule(ctas=1),) * 33)


def test_rules_for_collectives_survive_the_file_and_count_as_a_control(tmp_path):
    policy = Policy(
        comm_rules=(
            CommRule(collective="all_gather", max_bytes=1 << 20, ctas=4, cluster=0, protocol="ll"),
            CommRule(min_bytes=1, chunk=65536, algorithm="tree", cta_policy="zero"),
        )
    )
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == policy
    assert (policy.controls, policy.is_neutral, policy.label) == (1, False, "rules2")
    assert "2 collective rules" in str(policy)
