"""The compiled scanner and the Python reader give the same result, on real, made and random traces."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from test_hostile import DOCUMENT
from test_reader import random_trace
from trace_building import GEMM, TraceBuilder, write_text

import weft
from properties import examples
from weft.errors import WeftError
from weft.trace import bulk, files, native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the scanner is not built")


def both(path, monkeypatch):
    """Results of the compiled scanner and of Python alone, as comparable text."""
    said = []
    for library in (native.library, lambda: None):
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", library)
            try:
                document = weft.analyze(path).to_json()
            except WeftError as error:
                said.append(str(error))
                continue
            for rank in document["ranks"]:
                rank["collectives"].sort(key=json.dumps)
                rank["price_of_overlap"]["kernels"].sort(key=json.dumps)
            said.append(json.dumps(document, sort_keys=True))
    return said


@pytest.mark.parametrize("name", ["h200_ddp_2ranks", "v100_dlrm_8ranks", "b200_same_stream.json.gz"])
def test_real_traces(pytestconfig, monkeypatch, name):
    compiled, python = both(pytestconfig.rootpath / "tests/data/traces" / name, monkeypatch)
    assert compiled == python


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", [3_000, 50_000])
def test_random_traces_in_small_parts(tmp_path, monkeypatch, seed, block):
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    built, _ = random_trace(seed, spans=400)
    compiled, python = both(built.write(tmp_path / f"t{seed}.json"), monkeypatch)
    assert compiled == python


def test_most_of_a_usual_trace_is_left_to_the_scanner(pytestconfig):
    """Only events that describe themselves, and marks, go to Python."""
    path = pytestconfig.rootpath / "tests/data/traces/h200_ddp_2ranks/rank0.json.gz"
    text = gzip.decompress(path.read_bytes())
    start = text.index(b"[", text.index(b'"traceEvents"')) + 1
    part = native.scan(text, start, len(text))
    assert part.status == native.CLOSED
    found = part.columns()
    assert len(found.gpu) > 300
    assert len(found.later) < 0.05 * found.events


@pytest.mark.parametrize(
    "number", ["1700000000123456.789", "17.5", "0.0005", "0.0004", "12.34567", "1e3", "-5.25", "1700000000123456", ".5", "5.", "9999999999999999", "nan"]
)  # fmt: skip
def test_times_of_any_form(tmp_path, monkeypatch, number):
    built = TraceBuilder(clock_ns=0)
    built.gpu(GEMM, 0, 1_000)
    built.collective(500, 2_000)
    text = built.text().replace('"ts": 0.500', f'"ts": {number}')
    assert number in text
    compiled, python = both(write_text(tmp_path / "t.json", text), monkeypatch)
    assert compiled == python


@pytest.mark.parametrize("inside", ["}, {", "}]", "\\\\", '\\"}, {', "{" * 50, '\\\\\\"'])
def test_text_that_looks_like_the_end_of_an_event(tmp_path, monkeypatch, inside):
    monkeypatch.setattr(files, "BLOCK_BYTES", 500)
    monkeypatch.setattr(bulk, "_TAILS", (600,))
    built = TraceBuilder()
    for i in range(60):
        built.gpu(GEMM, i * 1_000, i * 1_000 + 600, note=f"call{i} {inside}", nested=[{"a": 1}, {"b": [{}]}])
        built.collective(i * 1_000 + 300, i * 1_000 + 900)
    compiled, python = both(built.write(tmp_path / "t.json"), monkeypatch)
    assert compiled == python
    assert json.loads(compiled)["ranks"][0]["gpu_events"] == 120


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=DOCUMENT)
def test_any_document(tmp_path, monkeypatch, document):
    compiled, python = both(write_text(tmp_path / "t.json", json.dumps(document)), monkeypatch)
    if compiled.startswith("{") and python.startswith("{"):
        figures = [
            [{**r, "events": 0, "partial": 0, "warnings": 0} for r in json.loads(d)["ranks"]]
            for d in (compiled, python)
        ]
        assert figures[0] == figures[1]
    else:  # the scanner does not parse events that it drops, so it does not count damage in them
        assert compiled.split(" in its ")[0] == python.split(" in its ")[0]


def test_damage_never_crashes_the_scanner():
    built = TraceBuilder()
    for i in range(5):
        built.gpu(GEMM, i * 1_000, i * 1_000 + 600, launch=i * 900)
    text = bytearray(built.text().encode())
    start = text.index(b"[", text.index(b"traceEvents")) + 1
    draw = random.Random(0)
    for _ in range(3_000):
        damaged = bytearray(text[start:])
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.randrange(3)] = bytes(
                draw.choices(b'{}[]",:\\0e-. \n', k=draw.randrange(3))
            )
        found = native.scan(bytes(damaged), 0, len(damaged))
        assert 0 <= found.consumed <= len(damaged)


SANITIZED = """
import gzip, random, sys
from pathlib import Path
from weft.trace import native

native._LIBRARY = sys.argv[1]
text = gzip.decompress(Path(sys.argv[2]).read_bytes())
start = text.index(b"[", text.index(b'"traceEvents"')) + 1
assert len(native.scan(text, start, len(text)).columns().gpu) > 300
draw = random.Random(1)
for _ in range(1_500):
    low = draw.randrange(start, len(text) - 6_000)
    part = bytearray(text[low : low + draw.randrange(6_000)])
    for _ in range(draw.randrange(5) if part else 0):
        at = draw.randrange(len(part))
        part[at : at + draw.randrange(3)] = bytes(draw.choices(b'{}[]",:\\\\0e-. 9', k=draw.randrange(3)))
    native.scan(bytes(part), 0, len(part)).columns()
print("clean")
"""


def test_the_scanner_touches_only_its_memory(pytestconfig, tmp_path):
    """Real events from any offset, cut and damaged, under the address and undefined-behaviour sanitizers."""
    compiler = shutil.which("gcc")
    found = (
        compiler
        and subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    if not found or not Path(found).is_absolute():
        pytest.skip("needs gcc with its address sanitizer")
    root = pytestconfig.rootpath
    sys.path.insert(0, str(root))
    try:
        import hatch_build
    finally:
        sys.path.remove(str(root))
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    library = hatch_build.build_scan(root, tmp_path / "checked.so", checks)
    env = {**os.environ, "LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    env["PYTHONPATH"] = str(root / "src")
    trace = root / "tests/data/traces/h200_ddp_2ranks/rank0.json.gz"
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(library), str(trace)],
        env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-2000:]
