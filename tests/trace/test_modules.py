"""Communication by module, for traces that record module calls."""

from __future__ import annotations

import json

import pytest
from trace_building import GEMM, TraceBuilder

import weft
from weft.trace import native

US = 1_000


def built():
    trace = TraceBuilder()

    def module(name, start, end, thread=1):
        trace.span("python_function", f"nn.Module: {name}", start, end, pid=9, tid=thread, **{"Python id": 1})

    module("GPT_0", 0, 1_000 * US)
    module("Block_0", 10 * US, 300 * US)
    module("Linear_0", 20 * US, 100 * US)
    module("Block_1", 400 * US, 700 * US)
    trace.span("python_function", "train.py(12): step", 0, 2_000 * US, pid=9, tid=1)
    for launch in (50, 200, 500, 800, 1_500):
        trace.gpu(GEMM, (launch + 5) * US, (launch + 15) * US, launch=launch * US)
        trace.collective((launch + 15) * US, (launch + 40) * US, launch=(launch + 1) * US)
    trace.collective(1_600 * US, 1_630 * US, launch=60 * US, thread=2)  # another thread, as in backward
    return trace


@pytest.mark.parametrize("compiled", [True, False])
def test_each_collective_belongs_to_the_innermost_module(tmp_path, monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    document = weft.analyze(built().write(tmp_path / "rank0.json")).to_json()
    rows = {row["module"]: row for row in document["ranks"][0]["modules"]}
    assert set(rows) == {"Linear_0", "Block_0", "Block_1", "GPT_0"}
    assert all(row["count"] == 1 and row["comm_us"] == 25.0 for row in rows.values())
    json.dumps(document)


def test_the_page_has_a_table_of_modules_only_where_there_are_some(tmp_path):
    from weft.report.page import analysis_page

    with_modules = weft.analyze(built().write(tmp_path / "rank0.json"))
    plain = TraceBuilder()
    plain.collective(0, 1_000)
    without = weft.analyze(plain.write(tmp_path / "rank1.json"))
    assert "-modules" in analysis_page(with_modules.to_json(), with_modules.timelines)
    assert "-modules" not in analysis_page(without.to_json(), without.timelines)
