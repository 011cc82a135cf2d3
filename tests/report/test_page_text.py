"""The pages as text: their content, and that they are safe, small and self-contained."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_samples import (
    HOSTILE,
    analysis_document,
    bench_document,
    large_timeline,
    rank_document,
    small_timeline,
    tuned_workload,
)

from weft.report.compare import comparison_sentence, metric_changes
from weft.report.page import analysis_page, bench_page, comparison_page, embedded, tune_page


class Elements(HTMLParser):
    """Every tag with its attributes, and the text between."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.bodies: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.bodies:
            self._inside = tag
            self.bodies[tag].append("")

    def handle_endtag(self, tag) -> None:
        self._inside = None if tag == self._inside else self._inside

    def handle_data(self, data) -> None:
        if self._inside:
            self.bodies[self._inside][-1] += data
        else:
            self.text += data


def small_page() -> str:
    lines = [small_timeline(), small_timeline()]
    return analysis_page(analysis_document(lines), lines)


def all_pages() -> dict[str, str]:
    line = small_timeline()
    return {
        "analysis": small_page(),
        "bench": bench_page(bench_document()),
        "tune": tune_page(tuned_workload(), line, line),
    }


def test_the_navigation_has_each_section_of_the_page_and_nothing_else() -> None:
    for page in (*all_pages().values(), bench_page({"rows": []})):
        tags = Elements(page).tags
        links = [at["href"] for tag, at in tags if tag == "a" and str(at.get("href")).startswith("#part0-")]
        assert links == [f"#{at['id']}" for tag, at in tags if tag == "section" and at.get("id") != "part0"]


def test_hostile_names_become_text() -> None:
    page = small_page()
    found = Elements(page)
    assert HOSTILE[0] not in page
    assert not any(tag == "img" for tag, _ in found.tags)
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    names = json.loads(found.bodies["script"][0])["names"]
    assert set(HOSTILE) <= set(names)


@pytest.mark.parametrize(
    "evil", [*HOSTILE, "</script><b>", "<!--<script>", "\u2028\u2029&", "{{ 7*7 }}", "\ud800\x1b[31m"]
)
def test_hostile_text_anywhere_in_a_document_is_escaped(evil) -> None:
    line = small_timeline()
    document = analysis_document([line])
    rank = document["ranks"][0]
    rank.update(path=evil, device=evil, rank=evil, steps=[{"name": evil, "span_us": 1.0}])
    rank["attribution"][f"{evil}_us"] = 3.0
    rank["collectives"][0].update(name=evil, kernel=evil, kind=evil)
    rank["price_of_overlap"] = {"kernels": [{"name": evil, "alone_us": 1.0, "beside_us": 2.0}]}
    document["advice"][0].update(title=evil, detail=evil, command=evil, control=evil, collective=evil)
    document["warnings"] = [evil]
    bench = bench_document()
    bench.update(device=evil, suite=evil)
    bench["rows"][0].update(workload=evil, policy={evil: evil})
    sample = tuned_workload()
    tune = tuned_workload(
        device=evil,
        workload=sample.workload.but(name=evil),
        verdict=replace(
            sample.verdict,
            chosen=evil,
            reason=evil,
            candidates=(replace(sample.candidates[0], candidate=evil, problem=evil), *sample.candidates[1:]),
        ),
    )
    for page in (analysis_page(document, [line]), bench_page(bench), tune_page(tune, None, None)):
        page.encode("utf-8")
        found = Elements(page)
        assert len(found.bodies["script"]) <= 2
        assert not any(tag in ("img", "b") for tag, _ in found.tags)
        assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
        assert "\x1b" not in page
        if evil.startswith("{{"):
            assert "{{ 7*7 }}" in found.text


def test_the_policy_allows_this_script_and_style_only() -> None:
    for page in all_pages().values():
        found = Elements(page)
        policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
        assert policy is not None
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        for body in (found.bodies["script"][-1], found.bodies["style"][0]):
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy


def test_nothing_refers_to_the_outside() -> None:
    for name, page in all_pages().items():
        for tag, attributes in Elements(page).tags:
            for key in ("src", "href", "action", "data", "srcset"):
                value = attributes.get(key)
                assert value is None or value.startswith("#"), (name, tag, value)
            assert "style" not in attributes, "inline styles are against the page's own policy"
        assert not re.search(r"https?://|@import|url\(", page), name


def test_the_embedded_json_cannot_end_its_block() -> None:
    payload = {"names": ["</script>", "<!--", "&amp;", "\u2028\u2029", "ok"]}
    text = embedded(payload)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == payload


def test_the_summary_says_what_is_exposed_and_why() -> None:
    text = Elements(small_page()).text
    assert (
        "30 µs of 50 µs communication (60%) is exposed on rank 0, the worst of 2 ranks, mostly because"
        in text
    )
    assert "wait behind compute that holds the SMs (60% of it)." in text
    assert 'weft run --priority high -- torchrun train.py --name "a & b"' in text
    assert "5 µs to 20 µs" in text


def test_the_bars_of_a_rank_add_up_to_its_communication() -> None:
    page = small_page()
    bar = re.search(r'aria-label="rank 0: ([^"]*)"', page)
    assert bar is not None
    assert bar.group(1).startswith("hidden 20 µs, launched late 3 µs, behind compute 18 µs")
    first = page.split('aria-label="rank 0:')[1].split("</svg>")[0]
    pieces = [(float(x), float(w)) for x, w in re.findall(r'x="([\d.]+)" width="([\d.]+)"', first)]
    assert sum(width for _, width in pieces) == pytest.approx(1000, abs=0.1)
    for (x, width), (following, _) in itertools.pairwise(pieces):
        assert x + width == pytest.approx(following, abs=0.02)


def test_of_many_ranks_the_most_exposed_are_shown() -> None:
    rank = rank_document(small_timeline(), 0)
    ranks = [{**rank, "rank": i, "exposed_comm_us": float(i)} for i in range(40)]
    page = analysis_page({"ranks": ranks, "advice": []}, [])
    bars = re.findall(r'<span class="bar-label" title="rank (\d+)"', page)
    assert [int(bar) for bar in bars] == list(range(39, 7, -1))
    assert "8 more are in the JSON document" in page


def test_a_document_with_nothing_optional_is_still_a_page() -> None:
    for document in ({"ranks": [], "advice": []}, {"ranks": [{}], "summary": None, "advice": None}, {}):
        assert "No communication was found" in analysis_page(document, [])
    odd = {
        "ranks": [{"rank": None, "comm_us": "x", "collectives": [3, {"name": None}], "steps": {}}],
        "advice": [1],
    }
    assert "No communication" in analysis_page(odd, [])
    assert "measurements" in bench_page({"rows": []})
    nan = bench_document()
    nan["rows"][0].update(ms=float("nan"), time_ratio=float("inf"), ci_ms="wide", fraction_of_ideal=10**400)
    assert "nan" not in Elements(bench_page(nan)).text.lower()


def test_hidden_and_missing_communication_are_told_apart() -> None:
    rank = rank_document(small_timeline(), 0)
    hidden = {**rank, "exposed_comm_us": 0.0, "attribution": {}}
    assert "All 50 µs of communication is hidden" in analysis_page({"ranks": [hidden], "advice": []}, [])
    assert "Nothing to gain" in analysis_page({"ranks": [hidden], "advice": []}, [])


def test_steps_price_and_warnings_are_shown_when_there() -> None:
    document = analysis_document([small_timeline()])
    plain = Elements(analysis_page(document, [])).text
    assert "The price of overlap" not in plain
    assert "Steps" not in plain
    document["ranks"][0]["steps"] = [{"name": "ProfilerStep#7", "span_us": 55.0, "exposed_comm_us": 5.0}]
    document["ranks"][0]["price_of_overlap"] = {
        "lost_us": 12.0,
        "kernels": [
            {"name": "gemm", "alone_us": 10.0, "beside_us": 14.0, "slowdown_pct": 40.0, "lost_us": 12.0}
        ],
    }
    document["warnings"] = ["rank1.json: cut short"]
    text = Elements(analysis_page(document, [])).text
    for said in (
        "ProfilerStep#7",
        "The price of overlap",
        "12 µs longer in all",
        "40.0%",
        "rank1.json: cut short",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("change", "labelled"),
    [({}, False), ({"simulated": True}, True), ({"device": "sim:h100"}, True), ({"simulated": False}, False)],
)
def test_simulated_results_are_labelled(change, labelled) -> None:
    assert ('class="badge">simulated<' in bench_page({**bench_document(), **change})) == labelled


@pytest.mark.parametrize(("source", "labelled"), [("lab", False), ("simulator", True)])
def test_simulated_verdicts_are_labelled(source, labelled) -> None:
    assert ('class="badge">simulated<' in tune_page(tuned_workload(source=source))) == labelled


def test_a_bench_page_shows_ratios_intervals_and_the_best() -> None:
    page = bench_page(bench_document())
    assert page.count("heat-n4 best") == 1  # cb-ar under priority: 0.78 of sequential
    assert '<td class="heat-p4 best">1.56</td>' in page  # the best of mb-ar is still a loss
    text = Elements(page).text
    assert "1 of 2 workloads run faster overlapped" in text
    assert "22.4 to 23.3 ms" in text
    assert "priority high" in text


def test_a_large_bench_says_what_its_heatmap_leaves_out() -> None:
    rows = [{"cell": f"cell {at}", "candidate": "overlap", "time_ratio": 0.9} for at in range(4100)]
    html = bench_page({"suite": "x", "device": "gpu", "rows": rows})
    assert "100 more workloads are left out here" in html


def test_a_tune_page_shows_candidates_against_the_references() -> None:
    page = tune_page(tuned_workload(), None, None)
    text = Elements(page).text
    for said in ("sequential 29.3 ms", "overlap, no control 25.9 ms", "ideal 18.8 ms", "best is 25.5% less"):
        assert said in text
    kept = re.search(r'whisker kept.*?x1="([\d.]+)" x2="([\d.]+)" y1="12"', page, re.DOTALL)
    assert kept is not None
    low, high = float(kept.group(1)), float(kept.group(2))
    top = 29.5 * 1.04
    assert (low, high) == (
        pytest.approx(1000 * 19.1 / top, abs=0.1),
        pytest.approx(1000 * 19.5 / top, abs=0.1),
    )
    assert 'class="timeline"' not in page
    line = small_timeline()
    drawn = Elements(tune_page(tuned_workload(), line, line))
    groups = {track["group"] for track in json.loads(drawn.bodies["script"][0])["tracks"]}
    assert groups == {"before", "after"}


def test_a_comparison_shows_the_change_and_both_analyses() -> None:
    line = small_timeline()
    side = analysis_document([line])
    change = {
        "exposed_comm_us": {"before": 100.0, "after": 40.0, "delta": -60.0, "percent": -60.0},
        "span_us": {"before": 500.0, "after": 450.0},
        "overlap_pct": {"before": 50.0, "after": 80.0},
        "attribution": {"behind_compute_us": {"before": 60.0, "after": 0.0}},
        "collectives": [{"kind": "all_reduce", "exposed_us": {"before": 0.0, "after": 5.0}}],
    }
    page = comparison_page({"before": side, "after": side, "change": change}, [line], [line])
    text = Elements(page).text
    assert "went from 100 µs to 40 µs (-60.0%), the span from 500 µs to 450 µs (-10.0%)." in text
    for said in ("+30.0 points", "Exposed: behind compute", "Exposed all_reduce", "Before", "After"):
        assert said in text
    assert page.count('class="timeline"') == 2


def test_a_comparison_is_per_step_and_by_reason() -> None:
    change = {
        "exposed_comm_us": {"before": 300.0, "after": 100.0},
        "comm_us": {"before": 600.0, "after": 400.0},
        "span_us": {"before": 3000.0, "after": 1800.0},
        "attribution": {"nothing_to_hide_behind": {"before": 300.0, "after": 100.0}},
        "reasons": {
            "same_stream": {"before": 300.0, "after": 100.0},
            "queue_full": {"before": 0.0, "after": 0.0},
        },
        "steps": {"before": 3, "after": 2},
    }
    assert comparison_sentence({"change": change}) == (
        "Exposed communication per rank and step went from 100 µs to 50 µs (-50.0%), "
        "the step from 1 ms to 900 µs (-10.0%)."
    )
    rows = {row.label: (row.before, row.after) for row in metric_changes({"change": change})}
    assert rows["Step"] == ("1 ms", "900 µs")
    assert rows["Exposed: same stream"] == ("100 µs", "50 µs")
    assert not {"Span", "Exposed: queue full", "Exposed: no compute left"} & set(rows)
    silent = {
        **change,
        "comm_us": {"before": 0.0, "after": 0.0},
        "overlap_pct": {"before": 0.0, "after": 0.0},
    }
    assert comparison_sentence({"change": silent}).startswith(
        "Neither run has communication; the step went from"
    )
    assert "Hidden behind compute" not in {row.label for row in metric_changes({"change": silent})}


def test_a_million_spans_make_a_small_page_that_says_so() -> None:
    line = large_timeline(1_000_000)
    page = analysis_page(analysis_document([line]), [line])
    assert len(page.encode()) < 3_000_000
    assert "Decimated: 1,000,000 spans are drawn as" in page


def test_huge_documents_still_make_a_page_under_three_megabytes() -> None:
    long = "name" * 200
    rows = [
        {"workload": f"{long}{i % 90}", "policy": f"{i // 90} {long}", "ms": 1.0 + i, "ci_ms": 0.5, "time_ratio": 0.9,
         "fraction_of_ideal": 0.5, "status": "hung", "problem": long}
        for i in range(9_000)
    ]  # fmt: skip
    assert len(bench_page({"rows": rows, "suite": long}).encode()) < 3_000_000
    one = tuned_workload().candidates[0]
    many = tuple(replace(one, candidate=f"{i}{long}", ms=i + 1.0) for i in range(3_000))
    assert len(tune_page(tuned_workload(candidates=many)).encode()) < 3_000_000
    collective = {
        "name": long,
        "kernel": long * 3,
        "exposed_us": 1.0,
        "attribution": {"behind_compute_us": 1.0},
    }
    price = {"kernels": [{"name": long, "alone_us": 1.0, "beside_us": 2.0}] * 50}
    rank = {**rank_document(small_timeline(), 0), "collectives": [collective] * 60, "price_of_overlap": price}
    ranks = [{**rank, "rank": i, "device": f"{long}{i}", "path": long} for i in range(600)]
    advice = [{"title": long, "detail": long * 9, "command": f"weft run -- {long}"}] * 300
    page = analysis_page(
        {"ranks": ranks, "advice": advice, "warnings": [long] * 99}, [small_timeline()] * 600
    )
    assert len(page.encode()) < 3_000_000


def test_identifiers_are_unique() -> None:
    for page in all_pages().values():
        ids = [attributes["id"] for _, attributes in Elements(page).tags if "id" in attributes]
        assert len(ids) == len(set(ids))
