"""The benchmark of live tuning on a CPU: everything except CUDA itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

LIVE = Path(__file__).parents[2] / "benchmarks" / "live"


@pytest.fixture
def live(monkeypatch):
    """The modules of the benchmark, importable as its own scripts import them."""
    monkeypatch.syspath_prepend(str(LIVE))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("configs", "running_job", "search"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_configuration_from_end_to_end(tmp_path):
    rows = tmp_path / "rows.jsonl"
    policy = {"version": 1, "framework": {"forward_prefetch": 1}}
    rows.write_text(json.dumps({"program": "fsdp2-3072", "tuning": {"policy": policy}}) + "\n")
    command = [sys.executable, str(LIVE / "search.py"), "--out", str(tmp_path), "--only", "fsdp2-3072"]
    command += ["--tiny", "--limit", "1", "--tuned", str(rows)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "fsdp2-3072.json").read_text())
    assert "problems" not in found
    assert found["without_communication_ms"] > 0
    levers = {row["lever"] for row in found["levers"]}
    assert {"forward prefetch", "resharding"} <= levers
    assert [row["label"] for row in found["tuned"]] == ["forward1"]
    assert found["best"]["ms"] == min(row["ms"] for row in found["confirmed"])
    assert all(len(row["samples_ms"]) >= 5 for row in found["confirmed"])
    assert "| forward prefetch | forward1 |" in done.stdout


def test_changes_that_helped_are_combined(live):
    import search

    from weft.tuning.live.levers import LeverStage

    stages = [
        LeverStage("CTAs", [{"max_ctas": 6}, {"max_ctas": 16}, {"max_ctas": 24}]),
        LeverStage("buckets", [{"bucket_mb": 5.0}, {"bucket_mb": 400.0}]),
        LeverStage("head start and priority", [{"priority": "high"}]),
    ]
    policy = search.Policy
    samples = {
        policy(): [10.0, 10.0, 10.1],
        policy(max_ctas=6): [11.0] * 3,
        policy(max_ctas=16): [9.5] * 3,
        policy(max_ctas=24): [9.52] * 3,  # close to the best of its lever
        policy(bucket_mb=5.0): [9.9] * 3,
        policy(bucket_mb=400.0): [9.0] * 3,
        policy(priority="high"): [10.2] * 3,  # did not help
    }
    found = search.combinations(stages, samples)
    assert found == [policy(max_ctas=16, bucket_mb=400.0), policy(max_ctas=24, bucket_mb=400.0)]
    samples.pop(policy(max_ctas=24))  # it could not be applied
    assert search.combinations(stages, samples) == found[:1]


def test_the_table_has_the_floor_and_the_worst_of_two_tunings(live):
    import search

    def row(label: str, ms: float, **more: object) -> dict[str, object]:
        return {"label": label, "ms": ms, "to_default": [ms / 10, ms / 10, ms / 10], **more}

    found = {
        "config": "c",
        "about": "a job",
        "facts": {"costs": {"held_ms": 0.5}},
        "levers": [row("ctas24", 9.2, lever="CTAs")],
        "confirmed": [row("overlap", 10.0), row("ctas24", 9.0), row("ctas16", 9.5)],
        "best": row("ctas24", 9.0),
        "tuned": [row("ctas24", 9.0), row("ctas16", 9.5)],
        "without_communication_ms": 7.5,
        "problems": {"dma": "UnavailableError: no copy engine"},
    }
    job = search.summary(found)
    assert job["could_win_pct"] == pytest.approx(20)
    assert job["tuned"] == "ctas16"
    assert job["tuned_pct"] == pytest.approx(5)
    assert job["tuned_over_best"] == pytest.approx(9.5 / 9)
    assert job["share_won"] == pytest.approx(0.25)
    text = search.markdown([found])
    assert "8.00 (7.50 + 0.50)" in text
    assert "| CTAs | ctas24 | 8.0 (8.0 to 8.0) |" in text
    assert "dma: UnavailableError" in text
    unknown = search.summary({**found, "without_communication_ms": None, "tuned": []})
    assert unknown["share_won"] is None
    assert unknown["tuned"] == "overlap"
