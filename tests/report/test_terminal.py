"""The terminal: everything except commands fits 80 columns, figures are never cut, names are plain text."""

from __future__ import annotations

import io
import re

import pytest
from report_samples import HOSTILE, analysis_document, small_timeline
from rich.console import Console

from weft.report import analysis, terminal
from weft.report.terminal import show_analysis, show_comparison


def shown(document, width: int = 80, *, compare: bool = False, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        highlight=False,
        force_terminal=color,
        color_system="standard" if color else None,
    )
    (show_comparison if compare else show_analysis)(document, console)
    return out.getvalue()


def document_of(ranks: int = 2) -> dict:
    return analysis_document([small_timeline()] * ranks)


def test_it_says_what_why_and_what_next() -> None:
    said = shown(document_of())
    for expected in (
        "30 µs of 50 µs communication (60%) is exposed",
        "behind compute",
        "60.0%",
        "5 µs to 20 µs",
    ):
        assert expected in said
    assert (
        said.index("is exposed")
        < said.index("Why 60 µs")
        < said.index("What to try")
        < said.index("weft run")
    )


@pytest.mark.parametrize("width", [80, 200])
def test_every_line_but_a_command_fits_80_columns(width) -> None:
    document = document_of(40)
    for rank in document["ranks"]:
        rank.update(span_us=123_456_789.123, compute_us=98_765_432.1, comm_us=55_555.555, path="p" * 200)
        rank["collectives"][0].update(
            name="ncclDevKernel_" + "Long" * 40, total_us=123_456.7, exposed_us=99_999.9
        )
    document["advice"][0]["detail"] = "Because " * 60
    document["advice"][0]["command"] = "weft run -- " + "x" * 100
    said = shown(document, width)
    assert max(len(line) for line in said.splitlines() if "weft run" not in line) <= 80
    assert "weft run -- " + "x" * 100 in said, "a command must stay in one line to be copied"
    assert "123.5 s" in said
    assert "100 ms" in said
    assert "24 more ranks" in said


def test_names_are_neither_markup_nor_control_sequences() -> None:
    document = document_of(1)
    document["ranks"][0]["collectives"][0].update(name="[red]x[/red]\x1b[2J\x07" + HOSTILE[0], kind="")
    document["advice"][0]["title"] = "[link=http://evil]title[/link]\x1b]0;owned\x07"
    said = shown(document)
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "[red]x[/red]" in said
    assert "[link=http://evil]title[/link]" in said


def test_nothing_to_show_is_said() -> None:
    assert "No communication" in shown({"ranks": [], "advice": []})
    assert "Nothing to gain" in shown({**document_of(), "advice": []})
    assert "Note: rank1: cut short" in shown({**document_of(), "warnings": ["rank1: cut short"]})


def test_a_comparison_shows_both_sides_and_the_change() -> None:
    side = document_of()
    change = {
        "exposed_comm_us": {"before": 100.0, "after": 40.0},
        "span_us": {"before": 500.0, "after": 550.0},
        "overlap_pct": {"before": 50.0, "after": 80.0},
    }
    document = {"before": side, "after": side, "change": change}
    said = shown(document, compare=True)
    for expected in ("100 µs", "40 µs", "-60.0%", "+10.0%", "+30.0 points", "weft run"):
        assert expected in said
    coloured = shown(document, compare=True, color=True)
    assert re.search(r"\x1b\[32m *-60\.0%", coloured)
    assert re.search(r"\x1b\[31m *\+10\.0%", coloured)
    assert "cannot be compared" in shown({"before": {}, "after": {}, "change": {}}, compare=True)


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        ("dpsk::ep::internode::notify_dispatch", 16, "notify_dispatch"),
        ("dpsk::ep::internode::combine", 20, "internode::combine"),
        ("AllReduce_RING_LL", 17, "AllReduce_RING_LL"),
        ("AllReduce_RING_LL_Sum_float", 17, "AllReduce_R…float"),
        ("a::" + "b" * 30, 10, "bbbbbb…bbb"),
    ],
)
def test_names_lose_namespaces_before_letters(name, width, shown):
    assert terminal._fitted(name, width) == shown


def test_what_a_collective_did_stands_for_a_kernel_of_another_name():
    """NCCL runs an all-to-all in the kernel of its sends; a generic kernel's name says nothing."""
    said = [
        terminal._shown_name({"name": "ncclDevKernel_SendRecv", "kind": "all_to_all"}),
        terminal._shown_name({"name": "ncclDevKernel_Generic", "kind": "other"}),
        terminal._shown_name({"name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kind": "all_reduce"}),
    ]
    assert said == ["all_to_all", "Generic", "AllReduce_Sum_bf16_RING_LL"]


def test_copies_have_a_column_where_they_take_time():
    quiet = {"span_us": 100.0, "compute_us": 90.0, "comm_us": 5.0, "exposed_comm_us": 5.0, "idle_us": 4.0}
    for memory, expected in ((1.0, False), (60.0, True)):
        said = shown({"ranks": [{**quiet, "memory_us": memory}], "advice": []})
        assert ("copies" in said) is expected
        assert ("60 µs" in said) is expected


def test_what_only_the_program_can_change_is_said_as_a_limit():
    item = {"control": "program", "title": "x", "step_ms": [3.0, 4.0], "step_pct": [30.0, 40.0]}
    assert analysis.gain_text(item) == "at most 4 ms of the step, 40.0%"
    assert analysis.gain_text({**item, "of": "span"}) == "at most 4 ms of the span, 40.0%"
    assert analysis.gain_text({**item, "control": "priority"}) == "3 ms to 4 ms of the step, 30.0 to 40.0%"
