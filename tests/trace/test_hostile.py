"""Damaged and hostile input: one clear line or a partial result, never a crash, a hang or endless memory."""

from __future__ import annotations

import gzip
import json
import os
import zlib

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from trace_building import GEMM, NCCL, TraceBuilder, write_text

import weft
from properties import examples
from weft.errors import InputError, UsageError, WeftError
from weft.trace import custom, files, scan
from weft.trace.files import Blocks
from weft.trace.kineto import read


def small() -> TraceBuilder:
    built = TraceBuilder()
    for i in range(6):
        built.gpu(GEMM, i * 1_000, i * 1_000 + 600, launch=i * 1_000 - 500)
        built.collective(i * 1_000 + 300, i * 1_000 + 900, launch=i * 1_000 - 400)
    built.step(1, -2_000, 10_000)
    return built


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"   \n ", "empty"),
        (b"hello", "not JSON"),
        (b"\x00\x01\x02", "not JSON"),
        (b"<html><body>404</body></html>", "not JSON"),
        (b"PK\x03\x04 a zip", "not JSON"),
        (b"123", "not JSON"),
        (b"null", "not JSON"),
        (b'"text"', "not JSON"),
        (b"{}", "no traceEvents"),
        (b'{"a": 1, "b": [1, 2]}', "no traceEvents"),
        (b'{"schema": "1.1.0-chakra.0.0.4", "pid": 1, "nodes": [{"id": 1}]}', "execution trace"),
        (b'{"traceEvents": 5}', "no traceEvents"),
        (b'{"traceEvents": {}}', "no traceEvents"),
        (b'{"traceEvents": []}', "no GPU activity"),
        (b"[]", "no GPU activity"),
        (b"[1, 2, 3]", "no GPU activity"),
        (b'["a", null, [[]], {}]', "no GPU activity"),
        (b'{"traceEvents": [', "ends early"),
        (b"[", "ends early"),
        (b"{", "no traceEvents"),
        (b'{"traceEvents', "no traceEvents"),
        (b'{"traceEvents": [}', "early|no GPU activity"),
        (b"[" * 100_000, "early|no GPU activity"),
        (b'{"a":' * 100_000, "no traceEvents"),
        (b'{"traceEvents": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}", "no GPU activity"),
        (
            b'{"traceEvents": [{"cat": "kernel", "args": '
            + b'{"a":' * 50_000
            + b"1"
            + b"}" * 50_000
            + b"}]}",
            "no GPU",
        ),
        (b'[{"cat": "kernel", "ts": 1e999, "dur": NaN}]', "no GPU activity"),
        (b'[{"cat": "kernel", "ts": ' + b"9" * 10_000 + b', "dur": 1}]', "no GPU activity"),
        (b'[{"cat": ["kernel"], "ts": 1, "dur": 1}]', "no GPU activity"),
        (b'{"traceEvents": [{"name": "' + b"},{" * 200_000, "early|no GPU"),
        (gzip.compress(b"", mtime=0), "empty"),
        (gzip.compress(b"{}", mtime=0), "no traceEvents"),
        (b"\x1f\x8b", "empty|damaged|early"),
        (b"\x1f\x8b garbage that is no gzip at all", "empty|damaged"),
        (b"\x28\xb5\x2f\xfd garbage that is no zstd", "empty|damaged"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, data, says):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=says) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_duplicate_keys_take_the_last(tmp_path):
    text = small().text().replace('"cat": "kernel"', '"cat": "cpu_op", "cat": "kernel"')
    assert len(read(write_text(tmp_path / "t.json", text))[0].timeline) == 12


def test_deep_nesting_beside_good_events_costs_only_itself(tmp_path):
    deep = '{"cat": "kernel", "args": ' + '{"a":' * 20_000 + "1" + "}" * 20_000 + "},"
    text = small().text().replace('"traceEvents": [', '"traceEvents": [' + deep)
    (trace,) = read(write_text(tmp_path / "t.json", text))
    assert len(trace.timeline) == 12
    assert trace.partial


def test_a_gzip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FREE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    packer = zlib.compressobj(9, wbits=31)
    body = b"".join(packer.compress(b"[" + b" " * (1 << 20)) for _ in range(64)) + packer.flush()
    path.write_bytes(body)
    with pytest.raises(InputError, match="expands more than 400 times"):
        read(path)


def test_an_endless_zstd_frame_is_refused(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setattr(files, "FREE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b"[" + b" " * (64 << 20)))
    with pytest.raises(InputError, match="expands more than"):
        read(path)


def test_the_size_limit_is_explicit(tmp_path):
    path = small().write(tmp_path / "t.json.gz")
    with pytest.raises(InputError, match="more than 1000 bytes, which is the limit"):
        read(path, max_bytes=1000)


def test_an_event_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "MAX_EVENT_BYTES", 1 << 16)
    monkeypatch.setattr(scan, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 12)
    path = write_text(tmp_path / "t.json", '[{"name": "' + "x" * (1 << 20) + '"}]')
    with pytest.raises(InputError, match="an event of more than 65536 bytes"):
        read(path)


def test_a_metadata_value_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "MAX_EVENT_BYTES", 1 << 12)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 12)
    path = write_text(tmp_path / "t.json", '{"INFO": "' + "x" * (1 << 20) + '", "traceEvents": []}')
    with pytest.raises(InputError, match="a value of more than 4096 bytes"):
        read(path)


def test_members_of_gzip_are_read_one_after_the_other(tmp_path):
    text = small().text().encode()
    half = len(text) // 2
    (tmp_path / "t.json.gz").write_bytes(
        gzip.compress(text[:half]) + gzip.compress(text[half:]) + b"\0" * 512
    )
    assert len(read(tmp_path / "t.json.gz")[0].timeline) == 12


def test_the_unpacking_thread_ends_when_the_reader_gives_up(tmp_path):
    path = write_text(tmp_path / "t.json", "[" + " " * (64 << 20))
    blocks = Blocks(path)
    next(iter(blocks))
    blocks.close()
    assert not blocks._thread.is_alive()


def test_paths_that_are_no_traces(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        weft.analyze(tmp_path / "missing.json")
    with pytest.raises(InputError, match="has no trace"):
        weft.analyze(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no traceEvents"):
        weft.analyze(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        weft.analyze(tmp_path / "pipe")


def test_a_folder_may_hold_other_json(tmp_path):
    small().write(tmp_path / "rank0.json.gz")
    (tmp_path / "config.json").write_text('{"lr": 1}')
    analysis = weft.analyze(tmp_path)
    assert len(analysis.ranks) == 1
    assert "config.json" in analysis.warnings[0]


def test_ranks_in_folders_of_their_own_come_in_natural_order(tmp_path):
    for rank in (10, 2, 1):
        (tmp_path / f"rank{rank}").mkdir()
        built = small()
        built.rank = rank
        built.write(tmp_path / f"rank{rank}" / "trace.json")
    assert [rank.trace.rank for rank in weft.analyze(tmp_path).ranks] == [1, 2, 10]


def test_the_folder_that_jax_was_given_leads_to_its_profiles(tmp_path):
    place = tmp_path / "plugins" / "profile" / "2026_01_01_00_00_00"
    place.mkdir(parents=True)
    small().write(place / "host.json")
    assert len(weft.analyze(tmp_path).ranks) == 1


def test_a_name_made_to_be_slow_is_not(tmp_path):
    built = small()
    built.gpu("quickreduce" * 500_000, 20_000, 21_000)
    built.gpu("(()" * 500_000, 21_000, 22_000)
    analysis = weft.analyze(built.write(tmp_path / "t.json"))
    assert max(map(len, analysis.timelines[0].names)) <= 1 << 14
    analysis.to_json()


def test_comm_adds_kernels(tmp_path):
    built = small()
    built.gpu("my_ring_exchange_v2", 20_000, 21_000)
    path = built.write(tmp_path / "t.json")
    assert weft.analyze(path, comm="ring_.*change").comm_us == weft.analyze(path).comm_us + 1.0


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{2,1}", "(?P<x>", "a" * 5000])
def test_a_bad_expression_is_named(tmp_path, pattern):
    with pytest.raises(UsageError, match="--comm"):
        weft.analyze(small().write(tmp_path / "t.json"), comm=pattern)


def test_a_catastrophic_expression_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(custom, "TIMEOUT_S", 0.5)
    built = small()
    built.gpu("a" * 64 + "!", 20_000, 21_000)
    with pytest.raises(UsageError, match="takes more than"):
        weft.analyze(built.write(tmp_path / "t.json"), comm="(a+)+$")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS = {
    "ph": st.sampled_from(["X", "B", "M"]) | JSON,
    "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", "cpu_op", "cuda_sync"])
    | JSON,
    "name": st.sampled_from([NCCL, GEMM, "cudaLaunchKernel", "ProfilerStep#1", "nccl:all_reduce"]) | JSON,
    "ts": st.integers(0, 10**6) | JSON,
    "dur": st.integers(0, 1000) | JSON,
    "pid": JSON,
    "tid": JSON,
}
ARGS = {
    key: st.integers(-5, 100) | JSON
    for key in (
        "device", "stream", "correlation", "External id", "registers per thread", "shared memory", "bytes", "grid",
        "block", "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name",
        "Process Group Ranks", "Seq", "Input Dims", "Input type", "wait_on_stream", "wait_on_cuda_event_record_corr_id",
    )
}  # fmt: skip
EVENT = st.fixed_dictionaries(
    {}, optional={**FIELDS, "args": JSON | st.fixed_dictionaries({}, optional=ARGS)}
) | st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["kernel", "cuda_runtime"]),
        "name": st.sampled_from([NCCL, GEMM, "cudaLaunchKernel"]),
        "ts": st.integers(0, 10**4),
        "dur": st.integers(0, 1000),
        "tid": st.integers(0, 2),
        "args": st.fixed_dictionaries({"correlation": st.integers(0, 9), "stream": st.integers(0, 3)}),
    }
)
DOCUMENT = st.lists(EVENT, max_size=25) | st.fixed_dictionaries(
    {"traceEvents": st.lists(EVENT, max_size=25)},
    optional={"distributedInfo": JSON, "deviceProperties": JSON, "other": JSON},
)
FUZZ = examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(path) -> None:
    """An analysis whose causes add up, or an error that a user can act on."""
    try:
        analysis = weft.analyze(path)
    except WeftError:
        return
    document = analysis.to_json()
    json.dumps(document, allow_nan=False)
    for rank in analysis.ranks:
        assert sum(rank.attribution.totals().values()) == rank.figures.exposed_ns
        assert (rank.attribution.cause_ns >= 0).all()


@FUZZ
@given(document=DOCUMENT)
def test_any_document(tmp_path, document):
    survives(write_text(tmp_path / "t.json", json.dumps(document)))


@FUZZ
@given(data=st.data())
def test_any_damage_to_a_trace(tmp_path, data):
    text = bytearray(small().text().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        action = data.draw(st.sampled_from(["flip", "cut", "drop", "insert"]))
        if action == "flip":
            text[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del text[at + 1 :]
        elif action == "drop":
            del text[at : at + data.draw(st.integers(1, 200))]
        else:
            text[at:at] = data.draw(
                st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\xff", b"},{"])
            )
        if not text:
            break
    survives(write_text(tmp_path / "t.json", bytes(text)))


@FUZZ
@given(data=st.binary(max_size=300), gz=st.booleans())
def test_any_bytes(tmp_path, data, gz):
    path = tmp_path / "t.json"
    path.write_bytes(b"\x1f\x8b" + data if gz else data)
    survives(path)


def test_mostly_malformed_events_are_given_up_on(tmp_path):
    path = write_text(tmp_path / "t.json", "[" + "[]," * 200_000 + '{"cat": "kernel"}]')
    with pytest.raises(InputError, match="not a profiler trace: .* malformed events"):
        read(path)


@pytest.mark.parametrize("number", [1 << 40, 1 << 62, 1 << 63, 1 << 70, -(1 << 70), 10**90, 1e300])
def test_huge_numbers_in_every_place(tmp_path, number):
    keys = [
        "In msg nelems", "Out msg nelems", "Group size", "Seq", "stream", "correlation", "External id", "bytes",
        "registers per thread", "shared memory",
    ]  # fmt: skip
    for key in keys:
        built = small()
        built.collective(7_000, 7_500, launch=6_000, **{key: number})
        built.gpu("Memcpy PtoP", 8_000, 8_100, cat="gpu_memcpy", **{key: number})
        survives(built.write(tmp_path / "t.json"))
        row = weft.analyze(tmp_path / "t.json").to_json()["ranks"][0]["collectives"][0]
        assert row["bytes"] is None or row["bytes"] >= 0


@pytest.mark.parametrize("ts", ["4611686018427387.9", "-4611686018427387", "-1e15", "1e15", "4e15"])
@pytest.mark.parametrize("dur", ["4611686018427387.9", "1e15", "1e12", "0"])
def test_extreme_times(tmp_path, ts, dur):
    built = small()
    for name in (NCCL, GEMM):
        built.gpu(name, 0, 1, launch=0)
        built.events[-2] |= {"ts": f"@{ts}@", "dur": f"@{dur}@"}
    path = built.write(tmp_path / "t.json")
    survives(path)
    figures = weft.analyze(path).ranks[0].figures
    assert 0 <= figures.overlap_ns <= figures.comm_ns <= figures.span_ns
    assert 0 <= figures.idle_ns <= figures.span_ns
