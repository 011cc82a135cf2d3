"""Decimation keeps the shape: only tiny spans merge, long or exposed ones stay, busy time is unchanged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import large_timeline, small_timeline, timeline

from properties import examples
from weft.report.decimate import decimate, exposed_spans
from weft.report.drawing import MAX_SPANS, draw
from weft.timeline import Kind, Timeline, intersect, subtract, union

SPANS = st.lists(
    st.tuples(st.integers(0, 5_000), st.integers(0, 400), st.integers(0, 2)), min_size=1, max_size=120
)


def columns(spans: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    start, length, lane = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    return start, start + length, lane


@given(SPANS, st.integers(1, 130))
@examples(150)
def test_what_is_merged_covers_exactly_the_originals_and_only_tiny_ones(spans, budget) -> None:
    start, end, lane = columns(spans)
    merged, threshold = decimate(start, end, lane, budget)
    assert int(merged.count.sum()) == len(spans)
    assert (threshold == 0) == (len(spans) <= budget)
    for i in range(len(merged)):
        if merged.count[i] == 1:
            at = merged.first[i]
            assert (merged.start[i], merged.end[i], merged.lane[i]) == (start[at], end[at], lane[at])
            assert merged.busy[i] == end[at] - start[at]
        else:
            inside = (lane == merged.lane[i]) & (start >= merged.start[i]) & (end <= merged.end[i])
            assert inside.sum() >= merged.count[i]
            assert merged.end[i] - merged.start[i] <= 17 * threshold
            assert 0 <= merged.busy[i] <= merged.end[i] - merged.start[i]
    long = end - start >= max(threshold, 1)
    alone = set(merged.first[merged.count == 1].tolist())
    assert set(np.flatnonzero(long).tolist()) <= alone


def test_the_budget_is_kept_and_the_union_only_grows_by_small_gaps() -> None:
    line = large_timeline(60_000)
    at = np.flatnonzero(line.kind == Kind.COMPUTE)
    start, end = line.start_ns[at], line.end_ns[at]
    merged, threshold = decimate(start, end, line.stream[at], 4_000)
    assert len(merged) <= 4_000
    before, after = union(start, end), union(merged.start, merged.end)
    assert intersect(before, after).total_ns == before.total_ns  # nothing is lost
    gaps = subtract(after, before)
    assert int((gaps.end - gaps.start).max()) <= threshold


def test_alternating_kinds_and_many_streams_still_fit() -> None:
    count = 50_000
    start = np.arange(count, dtype=np.int64) * 1_000
    kind = (np.arange(count) % 3).astype(np.uint8)
    line = Timeline(
        start, start + 900, np.arange(count, dtype=np.int64), kind, np.zeros(count, dtype=np.int32), ("k",)
    )
    drawing = draw([line], ["rank 0"], offsets_ns=[0])
    assert drawing.drawn <= MAX_SPANS
    rows = {track["label"] for track in drawing.payload["tracks"]}
    assert f"{count - 12} more streams" in rows
    assert any("share one row" in note for note in drawing.notes)


def test_exposed_spans_name_the_collective_that_ran() -> None:
    line = small_timeline(0)
    start, end, owner = exposed_spans(line)
    assert list(zip(start.tolist(), end.tolist(), strict=True)) == [(30_000, 50_000), (80_000, 90_000)]
    assert [line.names[line.name[i]][:4] for i in owner] == ["nccl", '"><i']
    assert int((end - start).sum()) == line.figures().exposed_ns


def test_collectives_and_exposed_ranges_survive_while_compute_is_merged() -> None:
    line = large_timeline(100_000)
    drawing = draw([line], ["rank 0"], offsets_ns=[0])
    tracks = {(track["label"], track["kind"]): track for track in drawing.payload["tracks"]}
    comm = next(track for (_, kind), track in tracks.items() if kind == Kind.COMM)
    assert comm["m"] == []
    assert len(comm["s"]) == int((line.kind == Kind.COMM).sum())
    assert tracks["exposed", 3]["m"] == []
    assert sum(tracks["exposed", 3]["d"]) == line.figures().exposed_ns
    assert any(track["m"] for track in tracks.values())
    assert any("Decimated: 100,000 spans" in note for note in drawing.notes)


def test_too_many_exposed_ranges_are_merged_without_losing_a_nanosecond() -> None:
    line = large_timeline(300_000)
    tracks = draw([line], ["rank 0"], offsets_ns=[0]).payload["tracks"]
    exposed = next(track for track in tracks if track["kind"] == 3)
    merged = {at: busy for at, _, busy in exposed["m"]}
    assert merged
    assert sum(merged.get(at, length) for at, length in enumerate(exposed["d"])) == line.figures().exposed_ns


def test_a_small_timeline_is_drawn_exactly() -> None:
    line = small_timeline()
    drawing = draw([line], ["rank 0"], offsets_ns=[0])
    assert drawing.notes == ()
    spans = []
    for track in drawing.payload["tracks"]:
        starts = np.cumsum(track["s"]).tolist()
        assert track["m"] == []
        if track["kind"] != 3:
            spans += [
                (at, at + length, drawing.payload["names"][name])
                for at, length, name in zip(starts, track["d"], track["n"], strict=True)
            ]
    origin = int(line.start_ns.min())
    expected = zip(line.start_ns - origin, line.end_ns - origin, line.name, strict=True)
    assert sorted(spans) == sorted((int(a), int(b), line.names[n]) for a, b, n in expected)
    assert drawing.payload["end"] == 100_000


def test_the_overview_is_exact() -> None:
    line = timeline([(0, 480_000, 7, Kind.COMPUTE, "a"), (480_000, 960_000, 20, Kind.COMM, "nccl")])
    overview = draw([line], ["x"], offsets_ns=[0]).payload["overview"]
    assert overview["compute"] == [1000] * 240 + [0] * 240
    assert overview["exposed"] == [0] * 240 + [1000] * 240


def test_clock_offsets_lay_ranks_over_each_other() -> None:
    here, there = small_timeline(1_000_000), small_timeline(1_500_000)
    tracks = draw([here, there], ["a", "b"], offsets_ns=[0, 500_000]).payload["tracks"]
    first = {track["group"]: track["s"][0] for track in tracks if track["kind"] == 0}
    assert first == {"a": 0, "b": 0}
    apart = draw([here, there], ["a", "b"], offsets_ns=[0, 0])
    assert any("different clocks" in note for note in apart.notes)
    shifted = draw([here, small_timeline(1_010_000)], ["a", "b"], offsets_ns=[0, 0])
    assert {t["s"][0] for t in shifted.payload["tracks"] if t["group"] == "b" and t["kind"] == 0} == {10_000}


@pytest.mark.parametrize("length", [10, 900])
def test_many_long_names_still_fit_the_page(length) -> None:
    count = 30_000
    start = np.arange(count, dtype=np.int64) * 10_000
    names = tuple(f"kernel_{i}_" + "n" * length for i in range(count))
    line = Timeline(
        start, start + 9_000, np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.uint8),
        np.arange(count, dtype=np.int32), names,
    )  # fmt: skip
    payload = draw([line], ["rank 0"], offsets_ns=[0], max_bytes=1_000_000).payload
    assert len(json.dumps(payload, separators=(",", ":"))) <= 1_000_000


def test_an_empty_timeline_is_drawn_as_nothing() -> None:
    drawing = draw([timeline([])], ["rank 0"], offsets_ns=[0])
    assert drawing.payload["end"] == 0
    assert drawing.drawn == 0
