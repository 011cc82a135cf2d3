"""Helper processes that read other ranks give the same result as this process, errors included."""

from __future__ import annotations

import json
import os
import sys

import pytest
from trace_building import GEMM, TraceBuilder

import weft
from weft.errors import InputError
from weft.trace import parallel


@pytest.fixture
def eager(monkeypatch):
    """Use helpers even for little work, on a machine of any size."""
    monkeypatch.setattr(parallel, "WORTH_BYTES", 0)
    monkeypatch.setattr(parallel.native, "library", lambda: None)  # helpers serve Python's reader only
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)


def folder_of(tmp_path, ranks=6):
    for rank in range(ranks):
        built = TraceBuilder(rank=rank, world_size=ranks)
        for i in range(30):
            built.gpu(GEMM, i * 1_000, i * 1_000 + 600, launch=i * 1_000 - 400)
            built.gpu(f"ring_{rank % 2}", i * 1_000 + 300, i * 1_000 + 900, stream=20, launch=i * 1_000 - 300)
            built.collective(i * 1_000 + 700, i * 1_000 + 950, launch=i * 1_000 - 200)
        built.write(tmp_path / f"rank{rank}.json.gz")
    return tmp_path


def test_the_same_document(tmp_path, eager, monkeypatch):
    folder = folder_of(tmp_path)
    used = []
    monkeypatch.setattr(parallel.Helper, "read", counting(parallel.Helper.read, used))
    together = weft.analyze(folder, comm="^ring_1$").to_json()
    monkeypatch.setattr(parallel, "WORTH_BYTES", 1 << 40)
    alone = weft.analyze(folder, comm="^ring_1$").to_json()
    assert json.dumps(together) == json.dumps(alone)
    assert used  # helpers did read some of them


def counting(function, calls):
    def wrapped(self, path):
        calls.append(path)
        return function(self, path)

    return wrapped


def test_errors_come_back_with_the_path_as_given(tmp_path, eager, monkeypatch):
    folder = folder_of(tmp_path)
    for rank in range(5):
        (folder / f"rank{rank}.json.gz").write_bytes(b"junk")
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=r"^rank0\.json\.gz: not JSON"):
        weft.analyze(*(f"rank{rank}.json.gz" for rank in range(6)))
    analysis = weft.analyze(".")
    assert len(analysis.ranks) == 1
    assert sum(warning.startswith("left out: rank") for warning in analysis.warnings) == 5


def test_a_helper_that_dies_is_told_of(tmp_path, eager, monkeypatch):
    folder = folder_of(tmp_path)
    monkeypatch.setattr(parallel, "_SERVE", "raise SystemExit(3)")
    monkeypatch.setattr(
        parallel, "_reader", lambda comm, workers: lambda path: InputError(f"{path}: not here")
    )
    with pytest.raises(InputError, match="no usable trace"):
        weft.analyze(folder)


def test_progress_counts_every_file(tmp_path, eager):
    folder = folder_of(tmp_path)
    seen = []
    weft.analyze(folder, progress=lambda path, done, total: seen.append((done, total)))
    assert sorted(seen) == [(i + 1, 6) for i in range(6)]


def test_helpers_do_not_run_the_callers_main_module(tmp_path):
    """A script without a main guard would otherwise start itself again."""
    folder = folder_of(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, weft, weft.trace.parallel as p\n"
        "print('started')\n"
        "p.WORTH_BYTES = 0\n"
        "os.sched_getaffinity = lambda pid: {0, 1, 2}\n"
        f"print(len(weft.analyze({str(folder)!r}).ranks))\n"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["started", "6"]
    assert done.stderr == ""
