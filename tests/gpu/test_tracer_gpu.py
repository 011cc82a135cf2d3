"""The shim's tracer on a GPU: `weft run --trace` of an unmodified DDP job, and the tracer against Kineto.

Needs torch, Triton and an NCCL that places two ranks on one GPU (WEFT_TEST_NCCL). About two minutes in all.
WEFT_TRACE_OUT names a folder in which to keep traces and figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 4, "width": 2048, "heads": 16, "length": 1024, "batch": 4, "lr": 0.001}


@pytest.fixture
def keep(tmp_path):
    folder = Path(os.environ.get("WEFT_TRACE_OUT") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def under_weft(nccl, *command, timeout=180):
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, "WEFT_NCCL": nccl}
    weft = [sys.executable, "-m", "weft", "run", *command]
    done = subprocess.run(weft, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_an_unmodified_job_is_traced(nccl, keep):
    flags = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    job = [sys.executable, "-m", "weft.comm.ghost", "--ranks", "2", str(ROOT / "examples" / "ddp.py"), *flags]
    options = ("--trace", str(keep), "--trace-after", "8", "--trace-steps", "3")
    under_weft(nccl, *options, "--", *job, "--steps", "25")
    (path,) = keep.glob("weft.*.json")
    trace = json.loads(path.read_text())
    assert trace["weft"]["steps"] == 3
    assert trace["weft"]["event_failures"] == trace["weft"]["dropped"] == trace["weft"]["unfinished"] == 0
    kernels = [e for e in trace["traceEvents"] if e["cat"] == "kernel"]
    comm = [e for e in kernels if "nccl" in e["name"]]
    assert comm
    assert all(e["args"]["Collective name"] == "all_reduce" for e in comm)
    assert all(e["args"]["Group size"] == 2 and e["args"]["In msg nelems"] > 0 for e in comm)
    assert {e["args"]["timing"] for e in comm} == {"events"}  # launch-completion events, not "stream ready"
    streams = {}
    for event in kernels:
        streams.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in streams.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(spans))


def test_the_tracer_agrees_with_kineto_and_leaves_nothing_behind(nccl, keep):
    out = keep / "tracer.json"
    program = [sys.executable, str(ROOT / "benchmarks" / "tracer.py"), "--out", str(out)]
    under_weft(nccl, "--", *program)
    results = json.loads(out.read_text())
    for name in ("mixed", "persistent", "launches"):
        found = results[name]
        print(name, json.dumps(found, indent=1))
        assert found["compared"]["kernels_equal"] == 1, name
        assert found["counters"]["left_behind"] == found["counters"]["event_failures"] == 0
        assert found["counters"]["stamp_failures"] == 0
        assert found["counters"]["stamps"] > 0
        median, low, _ = found["after_over_before"]
        drift = abs(found["next_over_after"][0] - 1)
        assert median < 1.005 + drift or low <= 1, name
        for key in ("overlapped_ms", "exposed_ms"):
            assert abs(found["compared"][f"{key}_error_of_comm_pct"]) < 3, (name, key)
    for name in ("mixed", "persistent"):
        assert results[name]["traced_over_untraced"][0] < 1.15, name
