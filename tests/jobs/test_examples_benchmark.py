"""The benchmark of live tuning, as far as a CPU can run it: nothing but CUDA itself is left for the GPU."""

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
        if name in ("configs", "job", "search", "table", "compare"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_configuration_from_end_to_end(tmp_path):
    command = [
        sys.executable,
        str(LIVE / "compare.py"),
        "--out",
        str(tmp_path / "out"),
        "--only",
        "triton-ddp-1024",
    ]
    command += ["--tiny", "--repeats", "1", "--search", "1", "--budget", "250"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert line["problems"] == []
    assert line["losses_identical"] is True
    assert line["best_ms"] <= line["search_default_ms"]
    assert line["without_communication_ms"] > 0
    assert len(line["without_ms"]) == len(line["tune_ms"]) == 1
    assert "triton-ddp-1024" in (tmp_path / "out" / "table.md").read_text()
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert "without-0" not in again.stdout, "a rerun repeats nothing that is done"


def test_what_is_seen_of_kernels_makes_the_grid(live, monkeypatch):
    import search

    from weft.execute import spans

    rows = [
        (0, 100, 7, "tile_gemm"),
        (100, 200, 7, "nvjet_sm90"),
        (50, 150, 9, "ncclDevKernel_AllReduce"),
        (200, 210, 7, "small"),
        (205, 215, 9, "ncclDevKernel_AllReduce"),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(spans, "record_timeline", lambda once: spans.from_rows(rows))
    seen = search.look(search.Job(lambda number: None))
    assert seen["share_pct"] == pytest.approx(100 * 110 / 215)
    beside = {kernel["name"]: round(kernel["beside_ms"] * 3e6) for kernel in seen["kernels"]}
    assert beside == {"tile_gemm": 50, "nvjet_sm90": 50, "small": 5}
    known = {"tile_gemm": ("tile_gemm", 4), "nvjet_sm90": ("nvjet_sm90", 1), "small": ("small", 16)}
    shapes = search.residencies(seen, known)
    assert {shape["when"] for shape in shapes if shape} == {"overlap"}
    counts = {(shape["rules"][0].kernel, shape["rules"][0].residency) for shape in shapes if shape}
    assert counts == {("tile_gemm", 2), ("tile_gemm", 3)}  # one block per SM, or hardly any time: not shaped
    policies = search.grid(shapes)
    assert policies[0] == search.Policy()
    assert len(set(policies)) == len(policies) == 5 * 4 + 2 * 5 * 2


def test_the_table_tells_different_losses_and_the_worst_of_two_tunings(live):
    import table

    def row(way: str, ms: float, losses: list[str], **more: object) -> dict[str, object]:
        return {
            "config": "c",
            "way": way,
            "name": way,
            "ok": True,
            "exit": 0,
            "times": [ms] * 8,
            "losses": losses,
            **more,
        }

    def policy(label: str, ms: float) -> dict[str, object]:
        return {"label": label, "ms": ms, "to_default": [ms / 10, ms / 10, ms / 10]}

    found = {
        "confirmed": [policy("default", 10.0)],
        "best": policy("ctas24", 9.0),
        "also": [policy("ctas24", 9.0), policy("ctas16", 9.5)],
        "communication": {"share_pct": 40.0, "kernels": []},
    }
    tuning = {"text": "ctas16: 5% less time", "steps": 40}
    rows = [row("without", 10.0, ["0x1"]), row("tune", 9.5, ["0x2"], tuning=tuning)]
    rows.append({**row("search", 0, [], search=found), "times": [], "losses": None})
    line = table.summarise(rows, tail=4)
    assert line["losses_identical"] is False
    assert line["tuned_label"] == "ctas16"
    assert line["tuned_to_best"] == pytest.approx(9.5 / 9)
    assert line["tune_to_without"][0] == pytest.approx(0.95)
    text = table.markdown([line])
    assert "DIFFERENT" in text
    assert "| 40 |" in text
    assert table.same_losses([row("without", 1, ["0x1"]), row("tune", 1, ["0x1"])]) is True
    assert table.same_losses([]) is None
