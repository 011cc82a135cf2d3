"""Finds patterns in graphs of torch.compile: collectives, and the matmuls next to them.

An all-gather or reduce-scatter along any dimension but the first takes several nodes: torch cuts the tensor
into pieces and joins them again. Nothing here changes a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)


@dataclass(frozen=True)
class GraphCollective:
    """An all-gather or a reduce-scatter."""

    given: Node
    """Gather: this rank's shard. Scatter: the tensor to sum over ranks."""
    result: Node
    dim: int
    ranks: int
    group: str
    nodes: tuple[Node, ...]
    """Nodes from `given` (exclusive) to `result` (inclusive)."""


@dataclass(frozen=True)
class GraphMatmul:
    """A matmul `a @ b`."""

    node: Node
    a: Node
    b: Node
    bias: Node | None = None


def find_gather(node: Node) -> GraphCollective | None:
    shard, ranks, group = node.args
    wait = _only_user(node)
    if wait is None or wait.target is not c10d.wait_tensor.default or not isinstance(ranks, int):
        return None
    assert isinstance(shard, Node)
    parts = _parts_in_order(wait, 0, ranks)
    if parts is None:
        return GraphCollective(shard, wait, 0, ranks, str(group), (node, wait))
    between, joined = parts
    dim = _argument(joined, 1, "dim", 0) % value_of(joined).dim()
    return GraphCollective(shard, joined, dim, ranks, str(group), (node, wait, *between, joined))


def find_scatter(node: Node) -> GraphCollective | None:
    given, reduce_op, ranks, group = node.args
    wait = _only_user(node)
    if wait is None or wait.target is not c10d.wait_tensor.default or reduce_op != "sum":
        return None
    if not isinstance(given, Node) or not isinstance(ranks, int):
        return None
    summed, dim, between = given, 0, ()
    if given.target is aten.cat.default and _argument(given, 1, "dim", 0) == 0:
        found = _cut_in_order(given, ranks)
        if found is not None:
            summed, dim, between = found
    return GraphCollective(summed, wait, dim, ranks, str(group), (*between, node, wait))


def _parts_in_order(whole: Node, dim: int, ranks: int) -> tuple[tuple[Node, ...], Node] | None:
    """The nodes that cut `whole` into pieces along a dimension, and the node that joins the pieces in order.

    None if the users of `whole` are anything else.
    """
    users = list(whole.users)
    if len(users) == 1 and users[0].target in _SPLITS:
        pieces = sorted(users[0].users, key=lambda each: _argument(each, 1, "", 0))
        cut = (users[0], *pieces)
    elif len(users) == ranks:
        pieces = users
        cut = tuple(pieces)
    else:
        return None
    joined = {user for piece in pieces for user in piece.users}
    if len(joined) != 1:
        return None
    (join,) = joined
    if join.target is not aten.cat.default or list(join.args[0]) != _ordered(whole, dim, ranks, join):
        return None
    return cut, join


def _cut_in_order(join: Node, ranks: int) -> tuple[Node, int, tuple[Node, ...]] | None:
    """The tensor whose equal pieces `join` concatenates, their dimension, and the nodes in between.

    None if `join` is anything else, or a piece has another use.
    """
    pieces = join.args[0]
    if not isinstance(pieces, (list, tuple)) or len(pieces) != ranks or _only_user(join) is None:
        return None
    first = pieces[0]
    cutter = first.args[0] if isinstance(first, Node) and first.target is operator.getitem else first
    if not isinstance(cutter, Node) or cutter.target not in (*_SPLITS, aten.slice.Tensor):
        return None
    whole, position = cutter.args[0], 2 if cutter.target in _SPLITS else 1
    assert isinstance(whole, Node)
    dim = _argument(cutter, position, "dim", 0) % value_of(whole).dim()
    if list(pieces) != _ordered(whole, dim, ranks, join) or any(len(each.users) != 1 for each in pieces):
        return None
    cut = () if cutter is first else (cutter,)
    return whole, dim, (*cut, *pieces, join)


def _ordered(whole: Node, dim: int, ranks: int, join: Node) -> list[Node] | None:
    """The inputs of `join` if they are all equal pieces of `whole` along `dim`, in order; else None."""
    size = value_of(whole).shape[dim]
    given = join.args[0]
    assert isinstance(given, (list, tuple))
    if not isinstance(size, int) or size % ranks or len(given) != ranks:
        return None
    step = size // ranks
    for i, piece in enumerate(given):
        if not isinstance(piece, Node) or not _is_piece(piece, whole, dim, step, i, ranks):
            return None
    return list(given)


def _is_piece(piece: Node, whole: Node, dim: int, step: int, i: int, ranks: int) -> bool:
    rank = value_of(whole).dim()
    if piece.target is operator.getitem:
        cutter = piece.args[0]
        if not isinstance(cutter, Node) or cutter.target not in _SPLITS or cutter.args[0] is not whole:
            return False
        sizes = cutter.args[1]
        equal = sizes == step if isinstance(sizes, int) else list(sizes) == [step] * ranks
        return bool(equal) and piece.args[1] == i and _argument(cutter, 2, "dim", 0) % rank == dim
    if piece.target is not aten.slice.Tensor or piece.args[0] is not whole:
        return False
    start, end = _argument(piece, 2, "start", 0) or 0, _argument(piece, 3, "end", None)
    last = i == ranks - 1 and (end is None or end >= step * ranks)
    same = _argument(piece, 1, "dim", 0) % rank == dim and _argument(piece, 4, "step", 1) == 1
    return bool(same and start == i * step and (end == start + step or last))


def matmuls_of(x: Node) -> Iterator[GraphMatmul]:
    """The matmuls whose first operand is `x`, possibly reshaped to a matrix."""
    columns = value_of(x).shape[-1]
    for matrix in (x, *reshapes_of(x)):
        value = value_of(matrix)
        if value.dim() != 2 or value.shape[-1] != columns:
            continue
        for user in list(matrix.users):
            found = _as_matmul(user)
            if found is not None and found.a is matrix:
                yield found


def _as_matmul(node: Node) -> GraphMatmul | None:
    bias = None
    if node.target is aten.mm.default:
        a, b = node.args[:2]
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, a, b = node.args[:3]
    else:
        return None
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b or value_of(a).dtype != value_of(b).dtype:
        return None
    if bias is not None and (not isinstance(bias, Node) or value_of(bias).dim() != 1):
        return None
    return GraphMatmul(node, a, b, bias)


def terms_of(summed: Node) -> list[GraphMatmul] | None:
    """The matmuls that `summed` adds up; None if it is not such a sum, or has another use."""
    node = summed
    if not _used_once(node):
        return None
    if node.target is aten.add.Tensor and not node.kwargs:
        left, right = node.args[:2]
        if not isinstance(left, Node) or not isinstance(right, Node) or left is right:
            return None
        if value_of(left).shape != value_of(right).shape:
            return None
        first, second = terms_of(left), terms_of(right)
        return None if first is None or second is None else [*first, *second]
    while node.target in RESHAPES and isinstance(node.args[0], Node):
        node = node.args[0]
        if not _used_once(node):
            return None
    found = _as_matmul(node)
    if found is None or found.bias is not None or value_of(node).shape[-1] != value_of(summed).shape[-1]:
        return None
    a = found.a
    source = a.args[0] if a.target in RESHAPES else None
    if isinstance(source, Node) and value_of(source).shape[:-1] == value_of(summed).shape[:-1]:
        a = source
    return [GraphMatmul(node, a, found.b)]


def _used_once(node: Node) -> bool:
    """Whether a node has one use. Being cut into pieces with one use each also counts as one."""
    users = list(node.users)
    return len(users) == 1 or (
        bool(users) and all(user.target is aten.slice.Tensor and len(user.users) == 1 for user in users)
    )


def sum_nodes(summed: Node) -> list[Node]:
    """The additions and reshapes between the matmuls and their sum."""
    if summed.target is aten.add.Tensor:
        inner = [node for arg in summed.args[:2] if isinstance(arg, Node) for node in sum_nodes(arg)]
        return [summed, *inner]
    if summed.target in RESHAPES and isinstance(summed.args[0], Node):
        return [summed, *sum_nodes(summed.args[0])]
    return []


def reshapes_of(x: Node) -> list[Node]:
    """The reshapes of x that keep its rows, recursively: torch uses two for a batch of one sequence."""
    kept = [user for user in x.users if _keeps_rows(user, x)]
    return [each for user in kept for each in (user, *reshapes_of(user))]


def users_through_reshapes(x: Node) -> Iterator[Node]:
    """The users of x and of its reshapes that keep its rows, without these reshapes."""
    for user in x.users:
        if _keeps_rows(user, x):
            yield from users_through_reshapes(user)
        else:
            yield user


def _keeps_rows(node: Node, x: Node) -> bool:
    return node.target in RESHAPES and value_of(node).shape[-1:] == value_of(x).shape[-1:]


def depends_on(node: Node, on: Node) -> bool:
    """Whether `node` depends on the result of `on`."""
    order = {each: i for i, each in enumerate(node.graph.nodes)}
    waiting, known = [node], {node}
    while waiting:
        each = waiting.pop()
        if each is on:
            return True
        for source in each.all_input_nodes:
            if source not in known and order[source] >= order[on]:
                known.add(source)
                waiting.append(source)
    return False


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def value_of(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
