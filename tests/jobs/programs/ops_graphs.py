"""Checks of how weft.ops replaces a program's collectives; `ops_layers.py` runs them.

Functions with functional collectives are traced; their fused graphs must give the same results. A DTensor
whose gather is pending must behave like the gathered one.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import weft.ops.compiled  # noqa: F401
from weft.ops import matmul_reduce_scatter
from weft.ops.adopt_styles import PendingGather, can_defer, defer
from weft.ops.fuse_graph import fuse_graph
from weft.ops.inductor_pass import FusedCollectives
from weft.shim.inject import BY_PICK, OPS_VARIABLE, REPLACE_ALL


def gather(x, dim, *weights, more=None, bias=None):
    whole = functional.all_gather_tensor(x, dim, dist.group.WORLD)
    made = [torch.nn.functional.linear(whole, w, bias if i == 0 else None) for i, w in enumerate(weights)]
    return [*made, *([] if more is None else [more(whole)])]


def scatter(dim, *pairs, op="sum", more=None):
    total = functools.reduce(torch.add, [torch.nn.functional.linear(x, w) for x, w in pairs])
    made = functional.reduce_scatter_tensor(total, op, dim, dist.group.WORLD)
    return [made, *([] if more is None else [more(total)])]


def scatter_along(dim):
    return lambda x, w: scatter(dim, (x, w))


def average(x, w):
    return scatter(0, (x, w), op="avg")  # gloo has no avg: only the graph is checked


def cases(ranks):
    """A function, its arguments, and how many (gathers, scatters, matmuls) its graph must have replaced."""

    def new(*shape):
        return torch.randn(*shape)

    yield lambda x, w: gather(x, 0, w), [new(3, 6), new(5, 6)], (1, 0, 1)
    yield lambda x, w: gather(x, 1, w), [new(2, 3, 6), new(5, 6)], (1, 0, 1)
    yield lambda x, w: gather(x, 1, w), [new(1, 3, 6), new(5, 6)], (1, 0, 1)
    yield lambda x, w: gather(x, 1, w, more=lambda y: y.sum(1)), [new(1, 3, 6), new(5, 6)], (1, 0, 1)
    yield lambda x, w, v, u: gather(x, 1, w, v, u), [new(2, 3, 6), *(new(n, 6) for n in (5, 2, 4))], (1, 0, 3)
    yield lambda x, w, b: gather(x, 1, w, bias=b), [new(2, 3, 6), new(5, 6), new(5)], (1, 0, 1)
    yield lambda x, w: gather(x, 1, w, more=lambda y: y.sum(0)), [new(2, 3, 6), new(5, 6)], (1, 0, 1)
    yield lambda x, w: gather(x, 2, w), [new(2, 3, 6), new(5, 6 * ranks)], (0, 0, 0)
    yield lambda x: gather(x, 0, more=torch.exp), [new(3, 6)], (0, 0, 0)
    yield lambda x: gather(x, 0, more=lambda y: y @ y.t()), [new(3, 6)], (0, 0, 0)
    for dim, shape in ((0, (2 * ranks, 6)), (1, (3, 2 * ranks, 6)), (0, (ranks, 3, 6))):
        yield scatter_along(dim), [new(*shape), new(5, 6)], (0, 1, 1)
    pair = [new(3, 2 * ranks, 6), new(5, 6), new(3, 2 * ranks, 4), new(5, 4)]
    yield lambda x, w, y, v: scatter(1, (x, w), (y, v)), pair, (0, 1, 2)
    yield average, [new(2 * ranks, 6), new(5, 6)], (0, 0, 0)
    yield lambda x, w: scatter(0, (x, w), more=torch.exp), [new(2 * ranks, 6), new(5, 6)], (0, 0, 0)
    yield lambda x, w: scatter(0, (torch.exp(x), w)), [new(2 * ranks, 6), new(5, 6)], (0, 1, 1)


def check_graphs(rank, ranks):
    torch.manual_seed(rank)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed these; older ones cannot
    count = 0
    for number, (function, arguments, wanted) in enumerate(cases(ranks)):
        plain = None if function is average else function(*arguments)
        traced = make_fx(function, tracing_mode="fake")(*arguments)
        done = fuse_graph(traced.graph, lambda *_: True, "hetero-fused-1d")
        found = done.gathers, done.scatters, done.matmuls
        assert found == wanted, f"case {number}: {found}, not {wanted}\n{traced.graph}"
        if plain is None:
            continue
        traced.recompile()
        for got, want in zip(traced(*arguments), plain, strict=True):
            torch.testing.assert_close(got, want, msg=lambda m, n=number: f"case {n}: {m}")
        small = make_fx(function, tracing_mode="fake")(*arguments)
        skipped = fuse_graph(small.graph, lambda *_: False)
        assert (skipped.gathers, skipped.scatters) == (0, 0)
        assert len(skipped.skipped) == sum(wanted[:2])
        count += 1
    assert count == 16
    check_cache_keys(rank, ranks)


def check_cache_keys(rank, ranks):
    """Inductor reuses a cached graph if text and passes match: whatever else matters must be part of them."""
    texts = []

    def keep(module, inputs):
        texts.append(module.code)
        return module.forward

    def uneven(x, w):
        return matmul_reduce_scatter(x, w, schedule="serial")

    x = torch.randn(ranks + 1, 6)
    made = torch.compile(uneven, backend=keep, fullgraph=True)(x, torch.randn(6, 5))
    assert made.shape[0] == (2 if rank == 0 else 1)
    assert f"{rank} of {ranks} in " in texts[0], texts
    keys = []
    for mode in (REPLACE_ALL, BY_PICK):
        os.environ[OPS_VARIABLE] = mode
        keys.append(FusedCollectives().uuid())
    del os.environ[OPS_VARIABLE]
    (sources, for_all, _), (same_sources, by_pick, _) = keys
    assert sources == same_sources
    assert for_all == (REPLACE_ALL, ())
    assert by_pick == (BY_PICK, (dist.group.WORLD.group_name,))  # gloo moves no GPU tensors
    assert FusedCollectives([lambda graph: None]).uuid() is None
    assert FusedCollectives([FusedCollectives(), None]).uuid() != FusedCollectives().uuid()


USES = (
    lambda x: x + 1,
    lambda x: x.reshape(-1, 4).sum(0),
    lambda x: x.to_local() * 2,
    lambda x: x[:, :2],
    lambda x: x.redistribute(placements=[Shard(0)]),
    copy.deepcopy,
)


def check_pending(rank, ranks):
    os.environ[OPS_VARIABLE] = REPLACE_ALL
    mesh = init_device_mesh("cpu", (ranks,))
    leaf = torch.full((2, 3, 4), rank + 1.0, requires_grad=True)
    x = DTensor.from_local(leaf, mesh, [Shard(1)])
    assert can_defer(x)
    assert not can_defer(x.redistribute(placements=[Shard(2)]))
    assert not can_defer(leaf)
    for use in USES:
        found = []
        for whole in (defer(x), x.redistribute(placements=[Replicate()])):
            made = use(whole.detach() if use is copy.deepcopy else whole)
            made = made.full_tensor() if isinstance(made, DTensor) else made
            leaf.grad = None
            if made.requires_grad:
                made.sum().backward(retain_graph=True)
            found.append((made.detach(), torch.zeros(()) if leaf.grad is None else leaf.grad))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
    pending = defer(x)
    assert type(pending) is PendingGather
    assert pending.shape == (2, 3 * ranks, 4)
    assert type(pending.to_local()) is torch.Tensor
    assert type(pending) is DTensor
    del os.environ[OPS_VARIABLE]
