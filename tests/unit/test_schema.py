"""`weft schema`: the schemas are valid, accept real documents and reject others."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import contract
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schema_checks import OF_CASE, WITHOUT, invalid, problems

import weft
from properties import examples
from weft.errors import UsageError
from weft.monitor.jobs import select_job
from weft.monitor.watch_jobs import JobsWatch
from weft.policy import ENGINES, MOMENTS, PRIORITIES, Policy, Rule, place_of
from weft.report.documents import SCHEMAS, json_schema
from weft.reproduce.figure import Reproduced
from weft.shim.inject import Job

TRACES = sorted(path for path in contract.TRACES.iterdir() if path.suffix != ".md")


def test_every_case_of_the_contract_has_a_schema_and_every_schema_is_used():
    assert OF_CASE.keys() | WITHOUT == contract.CASES.keys()
    # tests/shim/test_top.py, tests/unit/test_node.py
    elsewhere = {"top", "top-change", "node", "node-list"}
    assert set(OF_CASE.values()) | elsewhere == SCHEMAS.keys()


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_valid_and_all_references_resolve(name):
    schema = json_schema(name)
    Draft202012Validator.check_schema(schema)
    text = json.dumps(schema)
    for title in schema.get("$defs", {}):
        assert f"#/$defs/{title}" in text
    assert "version" in schema["required"]


def test_the_command_prints_them_and_lists_their_names():
    done = contract.run_weft("schema")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(SCHEMAS)
    assert json.loads(contract.run_weft("schema", "top").stdout) == json_schema("top")
    refused = contract.run_weft("schema", "nonsense")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "use one of policy, analyze" in refused.stderr
    with pytest.raises(UsageError):
        json_schema("")


@pytest.mark.parametrize(
    "document",
    [
        {"comm": {"head_start": "placed", "head_start_us": 2000}},
        {"comm": {"head_start": "placed", "head_start_us": 200_000}},
        {"comm": {"head_start": "placed"}},
        {"comm": {"head_start": "timed"}},
        {"comm": {"head_start": "timed", "head_start_us": 0}},
        {"comm": {"head_start": "timed", "head_start_us": 5}},
        {"comm": {"head_start": "none", "head_start_us": 5}},
        {"comm": {"head_start": "none"}},
        {"comm": {"head_start": None, "head_start_us": 5}},
        {"comm": {"head_start_us": 2000}},
        {"comm": {"rules": [{"min_bytes": None}]}},
        {"comm": {"rules": [{"min_bytes": -1}]}},
        {"comm": {"rules": [{"max_bytes": 2**63}]}},
        {"compute": {"sm_reserve": None}},
        {"compute": {"rules": [{"kernel": "", "residency": 1}]}},
        {"compute": {"rules": [{"kernel": "x" * 128, "residency": 1}]}},
        {"framework": {"bucket_mb": 0}},
        {"framework": {"bucket_mb": None}},
        {"framework": {"first_bucket_mb": 65537}},
    ],
    ids=json.dumps,
)
def test_the_schema_of_a_policy_accepts_what_weft_reads_and_nothing_else(document):
    try:
        Policy.from_dict({"version": 1, **document})
        refused = False
    except UsageError:
        refused = True
    assert bool(invalid("policy", {"version": 1, **document})) == refused


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_analyses_of_real_traces_have_the_described_form(path):
    document = {"version": 1, **weft.analyze(path).to_json()}
    assert invalid("analyze", json.loads(json.dumps(document))) == []


@pytest.mark.parametrize("options", ["--gpu b200 --gpus 64", "--gpu h100 --gpus 16 --pp 2 --price 2.5"])
def test_plans_of_other_jobs_have_the_described_form(options):
    done = contract.run_weft("plan", "--model", "llama3-8b", *options.split(), "--json")
    assert done.returncode == 0, done.stderr
    assert invalid("plan", json.loads(done.stdout)) == []


def test_a_sample_of_top_has_the_described_form(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job(Policy(priority="high"), tune=True, command=["true"]) as job:
        watch = JobsWatch(select_job(str(job.folder)))
        document = json.loads(json.dumps(watch.sample().to_dict()))
        watch.close()
    assert document["jobs"][0]["tuning"]["phase"] == "waiting"
    assert problems("top", document) == []


def test_keys_that_lack_are_unknown_or_have_another_type_are_found():
    good = {"version": 1, "checks": [{"name": "n", "status": "ok", "detail": "", "fix": ""}]}
    assert problems("doctor", good) == []
    for change in (
        lambda d: d.pop("version"),
        lambda d: d.update(more=1),
        lambda d: d["checks"][0].pop("fix"),
        lambda d: d["checks"][0].update(detail=None),
        lambda d: d["checks"].append("text"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        assert problems("doctor", bad)


def test_a_schema_as_printed_lets_later_versions_add_keys():
    later = {"version": 1, "checks": [], "more": 1}
    assert Draft202012Validator(json_schema("doctor")).is_valid(later)


# --- policies -----------------------------------------------------------------------------------------------------

rules = st.builds(Rule, kernel=st.sampled_from(["*gemm*", "k?"]), residency=st.none() | st.integers(1, 32))
policies = st.builds(
    Policy,
    priority=st.sampled_from(PRIORITIES),
    engine=st.sampled_from(ENGINES),
    when=st.sampled_from(MOMENTS),
    residency=st.none() | st.integers(1, 32),
    max_ctas=st.none() | st.integers(1, 128),
    sm_reserve=st.integers(0, 1024),
    head_start_us=st.floats(0, 1000),
    rules=st.lists(rules, max_size=3).map(tuple),
)


@examples()
@given(policies)
def test_every_policy_has_the_described_form(policy):
    assert problems("policy", json.loads(json.dumps(policy.to_dict()))) == []


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Policy)])
def test_every_control_is_described_with_its_docstring(field):
    section, key = place_of(field)
    properties = json_schema("policy")["properties"]
    found = properties[section]["properties"][key] if section else properties[key]
    assert len(found["description"]) > 10


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 2},
        {"version": 1, "comm": {"priority": "low"}},
        {"version": 1, "comm": {"max_ctas": 0}},
        {"version": 1, "comm": {"max_ctas": 129}},
        {"version": 1, "comm": {"rules": [{"ctas": 65}]}},
        {"version": 1, "comm": {"head_start_us": 1001}},
        {"version": 1, "compute": {"residency": 33}},
        {"version": 1, "compute": {"rules": [{"kernel": "a"}]}},
        {"version": 1, "compute": {"rules": [{"kernel": "a", "residency": 1, "x": 1}]}},
        {"version": 1, "nonsense": {}},
        {"version": 1, "comm": {"nonsense": 1}},
    ],
)
def test_what_weft_refuses_the_schema_refuses_too(document):
    with pytest.raises(UsageError):
        Policy.from_dict(document)
    assert problems("policy", document)


def test_figures_of_a_reproduction_are_described_as_they_are():
    described = json_schema("reproduce")["$defs"]["ReproducedJson"]["properties"]
    assert described.keys() == {field.name for field in dataclasses.fields(Reproduced)} | {"error"}


def test_descriptions_come_from_docstrings_also_of_inherited_fields():
    rank = json_schema("analyze")["$defs"]["RankJson"]["properties"]
    assert rank["exposed_comm_us"]["description"] == "Communication during which no compute kernel ran."
    job = json_schema("top")["$defs"]["JobSample"]["properties"]
    assert "10th to 90th percentile" in job["step_spread_pct"]["description"]


def test_the_page_names_every_schema():
    page = (Path(__file__).parents[2] / "docs/schemas.md").read_text()
    assert [name for name in SCHEMAS if f"`{name}`" not in page] == []
