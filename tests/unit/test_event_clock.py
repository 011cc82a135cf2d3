"""Spans from recordings on an H200, compared with Kineto's of the same steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from weft.shim.interval_sets import common, total, union_spans
from weft.shim.spans import spans_of

FILE = Path(__file__).parents[1] / "data/tracer_h200.json.gz"
PROGRAMS = json.loads(gzip.decompress(FILE.read_bytes()))["programs"]


def recording(found):
    """The recording as the shim would return it; the file has no kernel names."""
    raws = [
        SimpleNamespace(**dict(zip(found["fields"], values, strict=True)), grid=tuple(grid), copy=0)
        for values, grid in zip(found["raw"], found["grids"], strict=True)
    ]
    return SimpleNamespace(
        spans=raws, header=SimpleNamespace(calibrated_ns=found["calibrated_ns"]), symbols=()
    )


def figures(rows):
    """Exposed, overlapped and compute time of rows (communicates, start, end), in ns."""
    comm = union_spans((start, end) for communicates, start, end in rows if communicates)
    compute = union_spans((start, end) for communicates, start, end in rows if not communicates)
    both = common(comm, compute)
    return total(comm) - both, both, total(compute)


def compared(program):
    """Our figures and Kineto's, for each recording of a program."""
    for found in PROGRAMS[program]:
        spans = [s for s in spans_of(recording(found)) if s.kind != "memory"]
        yield figures([(s.kind == "comm", s.start_ns, s.end_ns) for s in spans]), figures(found["kineto"])


@pytest.mark.parametrize("program", ["mixed", "persistent", "layers"])
def test_exposed_and_overlapped_time_is_what_kineto_says(program):
    pairs = list(compared(program))
    for ours, theirs in pairs:
        comm = theirs[0] + theirs[1]
        assert ours[0] == pytest.approx(theirs[0], rel=0.04)
        assert ours[1] == pytest.approx(theirs[1], abs=0.01 * comm)
        assert ours[2] == pytest.approx(theirs[2], rel=0.015)
    assert mean(ours[0] / theirs[0] for ours, theirs in pairs) == pytest.approx(1, abs=0.03)


def test_without_probes_the_events_would_count_as_compute():
    found = PROGRAMS["mixed"][0]
    for raw in (bare := recording(found)).spans:
        raw.again_ns = -1
    spans = [s for s in spans_of(bare) if s.kind != "memory"]
    ours = figures([(s.kind == "comm", s.start_ns, s.end_ns) for s in spans])
    assert ours[0] < 0.8 * figures(found["kineto"])[0]
