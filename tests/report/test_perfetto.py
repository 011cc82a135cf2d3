"""The Perfetto export: exact times, a track of exposed time, counters, and spans that nest."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from report_samples import HOSTILE, analysis_document, small_timeline, timeline

from weft.report.perfetto import export
from weft.timeline import Kind, Timeline


def events(lines: list[Timeline], document: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    written = export(document if document is not None else analysis_document(lines), lines)
    found: list[dict[str, Any]] = json.loads(written, parse_float=Decimal)["traceEvents"]
    return found


def ns(value: Any) -> int:
    exact = Decimal(value) * 1000
    assert exact == int(exact)
    return int(exact)


def test_every_span_is_there_to_the_nanosecond() -> None:
    line = small_timeline(1_700_000_000_123_456_789)
    spans = [e for e in events([line]) if e["ph"] == "X" and e["cat"] != "exposed"]
    origin = int(line.start_ns.min())
    expected = sorted(
        (int(a) - origin, int(b - a), line.names[n])
        for a, b, n in zip(line.start_ns, line.end_ns, line.name, strict=True)
    )
    assert sorted((ns(e["ts"]), ns(e["dur"]), e["name"]) for e in spans) == expected
    assert set(HOSTILE) <= {e["name"] for e in spans}
    gemm = next(e for e in spans if e["name"].startswith("gemm"))
    assert gemm["args"] == {
        "kind": "compute", "blocks": 128, "threads": 256, "registers": 255, "shared_bytes": 65536,
    }  # fmt: skip


def test_times_are_written_with_three_decimals() -> None:
    line = timeline([(5, 1_005, 1, Kind.COMPUTE, "k"), (2_000_007, 2_000_008, 1, Kind.COMPUTE, "k")])
    written = export({}, [line]).decode()
    assert '"ts":0.000,"dur":1.000' in written
    assert '"ts":2000.002,"dur":0.001' in written
    assert json.loads(written)["otherData"]["baseTimeNanoseconds"] == "5"


def test_exposed_ranges_have_a_track_with_the_causes() -> None:
    line = small_timeline()
    found = events([line, line])
    exposed = [e for e in found if e["ph"] == "X" and e["cat"] == "exposed"]
    assert [(e["pid"], ns(e["ts"]), ns(e["dur"])) for e in exposed] == [
        (1, 30_000, 20_000), (1, 80_000, 10_000), (2, 30_000, 20_000), (2, 80_000, 10_000),
    ]  # fmt: skip
    assert exposed[0]["args"]["collective"].startswith("ncclDevKernel_AllReduce")
    assert float(exposed[0]["args"]["causes_of_this_collective_us"]["behind_compute_us"]) > 0
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert named[1, exposed[0]["tid"]] == "exposed communication"
    assert named[2, exposed[2]["tid"]] == "exposed communication"


def test_counters_say_when_each_kind_runs() -> None:
    found = [e for e in events([small_timeline()]) if e["ph"] == "C" and e["name"] == "communication running"]
    steps = [(ns(e["ts"]), int(e["args"]["running"])) for e in found]
    assert steps == [(20_000, 1), (60_000, 0), (80_000, 1), (90_000, 0)]


def test_spans_that_overlap_on_a_stream_get_lanes() -> None:
    line = timeline(
        [(0, 100, 3, Kind.COMPUTE, "a"), (50, 150, 3, Kind.COMPUTE, "b"), (100, 160, 3, Kind.COMPUTE, "c")]
    )
    found = events([line], {})
    lanes: dict[int, list[tuple[int, int]]] = {}
    for e in found:
        if e["ph"] == "X":
            lanes.setdefault(e["tid"], []).append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
    assert sorted(map(sorted, lanes.values())) == [[(0, 100), (100, 160)], [(50, 150)]]
    assert {e["args"]["name"] for e in found if e["name"] == "thread_name"} == {"stream 3", "stream 3 (2)"}


def test_ranks_are_laid_over_each_other_by_their_clocks() -> None:
    lines = [small_timeline(1_000), small_timeline(901_000)]
    document = analysis_document(lines)
    document["ranks"][1]["clock_offset_us"] = 900.0
    first = [e for e in events(lines, document) if e["ph"] == "X" and e["name"].startswith("gemm")]
    assert {(e["pid"], ns(e["ts"])) for e in first} >= {(1, 0), (2, 0)}


def test_nothing_is_valid_too() -> None:
    assert events([], {}) == []
    assert [e["ph"] for e in events([timeline([])], {})] == ["M", "M"]
