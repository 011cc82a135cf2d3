"""Symmetric memory and zero-CTA groups where neither exists: a clear message, no crash."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weft.comm import symmetric  # noqa: E402
from weft.errors import UnavailableError  # noqa: E402


def test_no_symmetric_memory_is_said_in_one_line():
    class Group:
        group_name = "nobody"

    with pytest.raises(UnavailableError, match="no symmetric memory between these GPUs") as error:
        symmetric.SymmetricBuffer(1024, torch.device("cpu"), Group(), 1.0)
    assert "\n" not in str(error.value)


def test_matrices_lie_aligned_one_after_the_other():
    offsets, size = symmetric.layout([(3, 5), (1, 1), (100, 100)], 2)
    assert offsets == [0, 256, 512]
    assert size == 512 + 20224
    assert all(offset % symmetric.ALIGNMENT == 0 for offset in offsets)


def test_a_zero_cta_group_asks_nccl_for_its_policy(monkeypatch):
    import torch.distributed as dist

    class Options:
        class config:  # noqa: N801
            cta_policy = None

    class Nccl:
        NCCL_CTA_POLICY_ZERO = 2

    Nccl.Options = Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend, pg_options: (ranks, backend, pg_options))
    ranks, backend, options = symmetric.zero_cta_group([0, 1])
    assert (ranks, backend, options.config.cta_policy) == ([0, 1], "nccl", 2)
    monkeypatch.delattr(Nccl, "NCCL_CTA_POLICY_ZERO")
    with pytest.raises(UnavailableError, match=r"NCCL 2\.28"):
        symmetric.zero_cta_group()
