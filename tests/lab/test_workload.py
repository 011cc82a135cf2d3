"""Workloads: sizes, shapes, names, JSON, and invalid values."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import UsageError
from weft.workload import COLLECTIVES, Compute, Workload, named, named_workloads, parse_bytes, parse_shape


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("896MiB", 896 << 20),
        ("896 MB", 896 * 10**6),
        ("1.5GiB", 3 << 29),
        ("4kB", 4000),
        ("4KiB", 4096),
        ("17", 17),
        ("17b", 17),
        ("1TB", 10**12),
        (33, 33),
    ],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1MB", "1e3", "12 QB", "1,5GiB", "0x10", "9" * 400])
def test_invalid_sizes(text):
    with pytest.raises(UsageError, match="KiB/MiB/GiB"):
        parse_bytes(text)


def test_shapes():
    assert parse_shape("8192x57344x8192") == (8192, 57344, 8192)
    assert parse_shape("8X4", ("X", "Y")) == (8, 4)
    assert parse_shape("1\u00d72\u00d73") == (1, 2, 3)
    for text in ("8192x8192", "0x1x1", "axbxc", "1x2x3x4", "-1x2x3", "1.5x2x3"):
        with pytest.raises(UsageError, match="MxNxK"):
            parse_shape(text)


def test_the_papers_workloads():
    cb = named("cb-ar")
    assert cb.compute.shape == (8192, 8192, 8192)
    assert cb.compute.tile == (64, 64, 64)
    assert cb.bytes == 8192 * 57344 * 2
    assert cb.compute.tiles() == (128, 128)
    mb = named("mb-a2a-opt1")
    assert (mb.compute.shape, mb.compute.tile, mb.collective) == (
        (8192, 57344, 8192),
        (64, 64, 32),
        "all_to_all",
    )
    assert mb.compute.tiles() == (896, 128)
    assert len(named_workloads()) == 12
    with pytest.raises(UsageError, match=r"'cb-rs' is not known; use one of cb-ar"):
        named("cb-rs")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"collective": "bcast"}, "collective 'bcast' is not known"),
        ({"bytes": 0}, "bytes 0 is not valid"),
        ({"bytes": 2.5}, "bytes 2.5"),
        ({"ranks": 1}, "ranks 1 is not valid"),
        ({"iterations": 0}, "iterations 0"),
        ({"compute_streams": 17}, "compute_streams 17"),
        ({"compute_streams": True}, "compute_streams True"),
    ],
)
def test_impossible_workloads(values, words):
    with pytest.raises(UsageError, match=words):
        Workload(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "fft"}, "compute kind 'fft'"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"shape": (1, 2)}, "gemm needs MxNxK"),
        ({"shape": (1, 2, 0)}, "gemm K 0"),
        ({"kind": "callable"}, "module:function"),
        ({"tile": (64, 64, 64)}, "tile and grid are for triton_gemm"),
        ({"kind": "triton_gemm", "tile": (64, 64, 48)}, "powers of two"),
        ({"kind": "triton_gemm", "tile": (64, 64)}, "powers of two"),
        ({"kind": "triton_gemm", "tile": (512, 512, 64)}, "KiB of shared memory"),
        ({"kind": "triton_gemm", "grid": (0, 4)}, "grid 0"),
        ({"kind": "triton_gemm", "grid": (4, 65536)}, "grid 65536"),
        ({"kind": "triton_gemm", "warps": 3}, "warps 3"),
        ({"kind": "triton_gemm", "dtype": "fp64"}, "computes in bf16 or fp16"),
        ({"kind": "triton_mlp", "grid": (2, 2)}, "grid"),
        ({"repeat": 0}, "repeat 0"),
    ],
)
def test_impossible_compute(values, words):
    with pytest.raises(UsageError, match=words):
        Compute(**values)


def test_json_and_changes():
    workload = named("cb-ar-opt1").but(grid=(8, 8), ranks=2, iterations=3)
    assert workload.compute.grid == (8, 8)
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload
    with pytest.raises(UsageError, match="unknown key 'colour'"):
        Workload.from_dict({"colour": 1})
    with pytest.raises(UsageError, match=r"compute: unknown key 'call'"):
        Workload.from_dict({"compute": {"call": "x"}})
    with pytest.raises(UsageError, match="module:function"):
        Workload(compute=Compute(kind="callable", call=print)).to_dict()


@examples()
@given(
    st.sampled_from(COLLECTIVES), st.integers(1, 10**9), st.integers(2, 9), st.sampled_from(["bf16", "fp64"])
)
def test_buffers_are_rounded_up_to_whole_equal_parts(collective, size, ranks, dtype):
    workload = Workload(compute=Compute(dtype=dtype), collective=collective, bytes=size, ranks=ranks)
    item = {"bf16": 2, "fp64": 8}[dtype]
    assert workload.elements * item >= size
    assert workload.elements * item < size + ranks * item
    if collective != "all_reduce":
        assert workload.elements % ranks == 0
    assert 0 < workload.wire_bytes < 2 * (size + ranks * item)


def test_flops_and_traffic_of_a_call():
    assert Compute(shape=(2, 3, 5)).flops == 60
    assert Compute(shape=(2, 3, 5), repeat=2).traffic_bytes == 2 * 2 * (10 + 15 + 6)
    assert Compute(kind="gelu", shape=(4, 8)).flops == 0
    assert Compute(kind="attention", shape=(1, 2, 8, 16)).flops == 2 * 2 * 64 * 16
    assert "repeat" not in str(Compute())
    assert "x3" in str(Compute(repeat=3))
