"""The page of a plan: complete, self-contained, and safe whatever the document says."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from properties import examples
from weft.plan import TrainingJob
from weft.plan.answer import answer, document, scaling_document, sweep_document
from weft.plan.scaling import curves
from weft.plan.sweep import room, sweep
from weft.report import plan
from weft.report.find import find_results
from weft.report.folder import folder_page
from weft.report.plan_page import plan_page
from weft.report.plan_plots import pareto, scaling
from weft.report.plan_terminal import show_plan

sys.path.insert(0, str(Path(__file__).parent.parent / "report"))

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
JOB = TrainingJob(model="llama3-8b", gpu="h100", gpus=16, tp=2, pp=2, global_batch=32, policy="auto")


@pytest.fixture(scope="module")
def documents():
    return {
        "plan": document(answer(JOB), error={"mean_pct": 5.0, "p90_pct": 11.0, "runs": 60, "on": []}),
        "sweep": sweep_document(JOB, sweep(JOB, limit=10, fits=room())),
        "scaling": scaling_document(JOB, curves(JOB, 4, 32)),
    }


def test_the_page_has_everything_and_asks_for_nothing(documents):
    for kind, words in {
        "plan": (
            "Where the step goes",
            "tensor parallel all-gather",
            "What weft changes",
            "Memory",
            "5.0% on average",
        ),
        "sweep": ("Step time against memory", "GiB on the fullest GPU", "on the front"),
        "scaling": ("Weak scaling", "Strong scaling", "tokens per second and GPU"),
    }.items():
        page = plan_page(documents[kind])
        for said in (*words, "simulated", "not from a measurement"):
            assert said in page, (kind, said)
        assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
        assert "default-src &#39;none&#39;" in page
        assert 'style="' not in page


def poisoned(value):
    if isinstance(value, dict):
        return {key: poisoned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return HOSTILE if isinstance(value, str) and not value.startswith("plan") else value


@pytest.mark.parametrize("kind", ["plan", "sweep", "scaling"])
def test_hostile_names_are_text(documents, kind):
    page = plan_page(poisoned(documents[kind]))
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    out = io.StringIO()
    show_plan(poisoned(documents[kind]), Console(file=out, width=80))
    assert "\x1b" not in out.getvalue()


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 10**30), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@examples(30)
@given(
    st.sampled_from(["plan", "plan-sweep", "plan-scaling", "?"]),
    st.dictionaries(
        st.sampled_from(
            [
                *("job", "step_time_s", "breakdown", "collectives", "rows", "curves", "memory", "changes"),
                *("known_error", "without_weft", "policy", "notes", "refused", "calibration", "best"),
            ]
        ),
        junk,
    ),
)
def test_any_document_gets_a_page(kind, content):
    assert "<html" in plan_page({"kind": kind, **content})
    show_plan({"kind": kind, **content}, Console(file=io.StringIO(), width=80))


@pytest.mark.parametrize("kind", ["plan", "sweep", "scaling"])
def test_the_terminal_keeps_to_its_width(documents, kind):
    out = io.StringIO()
    show_plan(documents[kind], Console(file=out, width=80))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "…" not in out.getvalue().split("left out")[0]


def test_positions_lie_in_the_plot(documents):
    plots = [pareto(documents["sweep"]), *map(scaling, documents["scaling"]["curves"])]
    for plot in plots:
        assert plot.dots
        for dot in plot.dots:
            assert plot.left <= dot.x <= plot.right
            assert plot.top <= dot.y <= plot.bottom
        assert all(plot.top - 1 <= tick.at <= plot.bottom + 1 for tick in plot.y_ticks)


def test_faster_is_lower_and_less_memory_is_left(documents):
    rows = documents["sweep"]["rows"]
    plot = pareto(documents["sweep"])
    by_title = {dot.title.split(",")[0] + str("with weft" in dot.title): dot for dot in plot.dots}
    places = [by_title[row["label"] + str(row["controls"] == "weft")] for row in rows]
    steps = [row["step_time_s"] for row in rows]
    assert [place.y for place in places] == sorted((p.y for p in places), reverse=True)
    assert steps == sorted(steps)


def test_a_folder_of_results_shows_plans_too(documents, tmp_path):
    for name, found in documents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    found = find_results(tmp_path)
    assert [result.kind for result in found.results] == ["plan"] * 3
    page = folder_page(found.results)
    for words in ("Where the step goes", "Step time against memory", "Weak scaling"):
        assert words in page


def test_shares_of_the_step_add_up(documents):
    found = documents["plan"]
    assert sum(seconds for _, seconds in plan.breakdown(found)) == pytest.approx(found["step_time_s"])


def test_what_weft_changes_is_said_or_denied(documents):
    found = documents["plan"]
    assert "% less" in plan.weft_sentence(found)
    same = {**found, "without_weft": {**found["without_weft"], "step_time_s": found["step_time_s"]}}
    assert "leave it alone" in plan.weft_sentence(same)
