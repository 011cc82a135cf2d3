"""The NCCL layer against a fake library: argument order, groups, configuration and errors."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from weft.comm import nccl
from weft.errors import UnavailableError, UsageError, WeftError


class Buffer:
    """The parts of a tensor that weft.comm.nccl uses, backed by numpy."""

    dtype = "torch.float32"

    def __init__(self, values):
        self.values = np.ascontiguousarray(values, dtype=np.float32)

    def data_ptr(self):
        return self.values.ctypes.data

    def numel(self):
        return self.values.size

    def __getitem__(self, part):
        view = Buffer.__new__(Buffer)
        view.values = self.values[part]
        return view


class Stream:
    cuda_stream = 0


def ranks_of(path, size, ctas=8):
    return nccl.NcclRanks(nccl.load_nccl(path), size, ctas)


@pytest.fixture(params=[2, 3, 4])
def setup(request, fake_nccl):
    size = request.param
    rng = np.random.default_rng(size)
    return size, ranks_of(fake_nccl, size), [Stream()] * size, rng


def empty(size, count):
    return [Buffer(np.full(count, np.nan)) for _ in range(size)]


def test_the_config_has_the_layout_that_nccl_expects():
    config = nccl.make_config(12)
    assert ctypes.sizeof(nccl.Config) == 48
    assert (config.size, config.magic, config.maxCTAs) == (48, 0xCAFEBEEF, 12)
    assert nccl.make_config(None).maxCTAs == -(2**31)


def test_all_reduce(setup):
    size, ranks, streams, rng = setup
    send = [Buffer(rng.integers(0, 9, 33)) for _ in range(size)]
    recv = empty(size, 33)
    ranks.all_reduce(send, recv, streams)
    for out in recv:
        np.testing.assert_array_equal(out.values, sum(s.values for s in send))
    ranks.all_reduce(send, recv, streams, op="max")
    np.testing.assert_array_equal(recv[0].values, np.max([s.values for s in send], axis=0))


def test_all_gather_counts_what_is_sent(setup):
    size, ranks, streams, rng = setup
    send = [Buffer(rng.integers(0, 9, 5)) for _ in range(size)]
    recv = empty(size, 5 * size)
    ranks.all_gather(send, recv, streams)
    for out in recv:
        np.testing.assert_array_equal(out.values, np.concatenate([s.values for s in send]))


def test_reduce_scatter_counts_what_is_received(setup):
    size, ranks, streams, rng = setup
    send = [Buffer(rng.integers(0, 9, 5 * size)) for _ in range(size)]
    recv = empty(size, 5)
    ranks.reduce_scatter(send, recv, streams)
    total = sum(s.values for s in send)
    for rank, out in enumerate(recv):
        np.testing.assert_array_equal(out.values, total[rank * 5 : rank * 5 + 5])


def test_all_to_all(setup):
    size, ranks, streams, rng = setup
    send = [Buffer(rng.integers(0, 9, 3 * size)) for _ in range(size)]
    recv = empty(size, 3 * size)
    ranks.all_to_all(send, recv, streams)
    for j, out in enumerate(recv):
        np.testing.assert_array_equal(out.values, np.concatenate([s.values[3 * j : 3 * j + 3] for s in send]))


def test_broadcast(setup):
    size, ranks, streams, rng = setup
    send = [Buffer(rng.integers(0, 9, 4)) for _ in range(size)]
    recv = empty(size, 4)
    ranks.broadcast(send, recv, streams, root=1)
    for out in recv:
        np.testing.assert_array_equal(out.values, send[1].values)


def test_a_failing_call_closes_the_group_and_names_the_reason(setup):
    size, ranks, streams, rng = setup
    send = [Buffer(rng.integers(0, 9, 4 + (rank == 1))) for rank in range(size)]
    with pytest.raises(WeftError, match=r"ncclGroupEnd failed: invalid argument \(told by the fake\)"):
        ranks.all_reduce(send, empty(size, 5), streams)
    good = [Buffer([1.0])] * size
    recv = empty(size, 1)
    ranks.all_reduce(good, recv, streams)  # the group was closed, so this one works
    assert recv[0].values[0] == size
    ranks.close()
    ranks.close()


def test_an_unknown_dtype_is_named(setup):
    size, ranks, streams, _ = setup
    odd = Buffer([1.0])
    odd.dtype = "torch.complex64"
    with pytest.raises(UsageError, match="complex64"):
        ranks.all_reduce([odd] * size, [odd] * size, streams)


def test_too_old_for_several_ranks(fake_nccl, monkeypatch):
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22809")
    with pytest.raises(UnavailableError, match=r"NCCL 2\.28\.9 .* 2\.30 or newer: set WEFT_NCCL"):
        ranks_of(fake_nccl, 2)


def test_the_library_is_found(fake_nccl, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_NCCL", fake_nccl)
    assert nccl.load_nccl().version_text == "2.32.3"
    monkeypatch.setenv("WEFT_NCCL", str(tmp_path / "missing.so"))
    with pytest.raises(UnavailableError, match=r"missing\.so: no such file"):
        nccl.load_nccl()
    with pytest.raises(UnavailableError, match="set WEFT_NCCL"):
        nccl.load_nccl(str(tmp_path / "missing.so"))
    with pytest.raises(UnavailableError, match="is not NCCL"):
        nccl.load_nccl("libm.so.6")


def test_a_single_rank_is_rejected(fake_nccl):
    with pytest.raises(UsageError, match="ranks 1"):
        ranks_of(fake_nccl, 1)
