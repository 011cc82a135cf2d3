"""A pass over graphs of torch.compile: collectives and the matmuls next to them become one operation.

| found | becomes |
| --- | --- |
| all-gather along any dimension but the last, then matmuls with it | a gather with several weights |
| a matmul, or a sum of several, then a reduce-scatter (sum) | a reduce-scatter with several inputs |

These are the graphs of `SequenceParallel`, `ColwiseParallel` and `RowwiseParallel`, forward and backward.
Where the gathered tensor has other uses (the gradient of the weight), the operation returns it as well. All
ranks have the same graph, and what is replaced depends only on sizes that they have in common.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.ops.call import Call
from weft.ops.operands import DTYPES

_log = logging.getLogger("weft.ops")

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)

Wanted = Callable[[str, int, int, int, torch.Tensor], bool]
"""Whether to replace: operation, rows, columns that move, ranks, a (fake) tensor of them."""


@dataclass(frozen=True)
class _Gather:
    """An all-gather: its input, the node of its result, and all nodes between."""

    shard: Node
    result: Node
    dim: int
    ranks: int
    group: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class _Scatter:
    """A reduce-scatter: the summed tensor, the node of the result, and all nodes between."""

    summed: Node
    result: Node
    dim: int
    ranks: int
    group: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class _Matmul:
    """A matmul of two matrices; `a` has the shape that it had before it was flattened."""

    node: Node
    a: Node
    b: Node
    bias: Node | None = None


@dataclass
class Replaced:
    """What a pass has replaced."""

    gathers: int = 0
    scatters: int = 0
    matmuls: int = 0
    skipped: list[str] = field(default_factory=list)


def fuse_graph(graph: Graph, wanted: Wanted, schedule: str | None = None) -> Replaced:
    """Replace in place; the order of collectives stays that of the graph."""
    done = Replaced()
    for node in list(graph.nodes):
        try:
            if node.target is c10d.all_gather_into_tensor.default:
                gather = _find_gather(node)
                if gather is not None:
                    _fuse_gather(graph, gather, wanted, schedule, done)
            elif node.target is c10d.reduce_scatter_tensor.default:
                scatter = _find_scatter(node)
                if scatter is not None:
                    _fuse_scatter(graph, scatter, wanted, schedule, done)
        except Exception as error:  # before anything uses a new node: the graph still computes the same
            _log.debug("%s is left unchanged", node, exc_info=True)
            done.skipped.append(f"{node}: {error}")
    if done.gathers or done.scatters:
        graph.lint()
    return done


def _find_gather(node: Node) -> _Gather | None:
    shard, ranks, group = node.args
    wait = _only_user(node)
    if wait is None or wait.target is not c10d.wait_tensor.default or not isinstance(ranks, int):
        return None
    assert isinstance(shard, Node)
    parts = _parts_in_order(wait, 0, ranks)
    if parts is None:
        return _Gather(shard, wait, 0, ranks, str(group), (node, wait))
    between, joined = parts
    dim = _argument(joined, 1, "dim", 0) % _value(joined).dim()
    return _Gather(shard, joined, dim, ranks, str(group), (node, wait, *between, joined))


def _find_scatter(node: Node) -> _Scatter | None:
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
    return _Scatter(summed, wait, dim, ranks, str(group), (*between, node, wait))


def _parts_in_order(whole: Node, dim: int, ranks: int) -> tuple[tuple[Node, ...], Node] | None:
    """The pieces of `whole` along a dimension, and the node that joins them all, in order, along another."""
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
    """The tensor whose equal pieces `join` concatenates; no piece has another use."""
    pieces = join.args[0]
    if not isinstance(pieces, (list, tuple)) or len(pieces) != ranks or _only_user(join) is None:
        return None
    first = pieces[0]
    cutter = first.args[0] if isinstance(first, Node) and first.target is operator.getitem else first
    if not isinstance(cutter, Node) or cutter.target not in (*_SPLITS, aten.slice.Tensor):
        return None
    whole, position = cutter.args[0], 2 if cutter.target in _SPLITS else 1
    assert isinstance(whole, Node)
    dim = _argument(cutter, position, "dim", 0) % _value(whole).dim()
    if list(pieces) != _ordered(whole, dim, ranks, join) or any(len(each.users) != 1 for each in pieces):
        return None
    cut = () if cutter is first else (cutter,)
    return whole, dim, (*cut, *pieces, join)


def _ordered(whole: Node, dim: int, ranks: int, join: Node) -> list[Node] | None:
    """The nodes that `join` must have to hold all equal pieces of `whole` along `dim`, in order."""
    size = _value(whole).shape[dim]
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
    rank = _value(whole).dim()
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


def _fuse_gather(graph: Graph, gather: _Gather, wanted: Wanted, schedule: str | None, done: Replaced) -> None:
    value = _value(gather.result)
    matmuls = [each for each in _matmuls_of(gather.result) if not _depends(each.b, gather.result)]
    if not matmuls or gather.dim >= value.dim() - 1 or value.dtype not in DTYPES:
        return
    columns, rows = value.shape[-1], _rows(value)
    if not wanted("all_gather_matmul", rows, columns, gather.ranks, value):
        done.skipped.append(f"all_gather_matmul {rows} rows by {columns}")
        return
    replaced = {each.node for each in matmuls}
    elsewhere = any(user not in replaced for user in _users_through_reshapes(gather.result))
    call = Call("all_gather_matmul", schedule=schedule, return_gathered=elsewhere, dim=gather.dim)
    first = gather.nodes[0]
    _raise_before(graph, first, [each.b for each in matmuls])
    with graph.inserting_before(first):
        shard = _moved(graph, gather.shard, gather.dim, 0)
        made = _call(
            graph,
            torch.ops.weft.fused_matmul.default,
            (shard, [each.b for each in matmuls], [], call.encode(), gather.group, None, None),
        )
        for i, each in enumerate(matmuls):
            y = _moved(graph, _call(graph, operator.getitem, (made, i)), 0, gather.dim)
            if each.bias is not None:
                with graph.inserting_before(each.node):
                    y = _call(graph, aten.add.Tensor, (y, each.bias))
            _replace_matmul(graph, each.node, y)
        if elsewhere:
            got = _call(graph, operator.getitem, (made, len(matmuls)))
            _use_instead(gather.result, _moved(graph, got, 0, gather.dim))
    _erase(graph, [*gather.nodes, *_reshapes_of(gather.result), *replaced])
    done.gathers += 1
    done.matmuls += len(matmuls)


def _fuse_scatter(
    graph: Graph, scatter: _Scatter, wanted: Wanted, schedule: str | None, done: Replaced
) -> None:
    value = _value(scatter.summed)
    terms = _terms(scatter.summed)
    if terms is None or scatter.dim >= value.dim() - 1 or value.dtype not in DTYPES:
        return
    rows, columns = _rows(value), value.shape[-1]
    if not wanted("matmul_reduce_scatter", rows, columns, scatter.ranks, value):
        done.skipped.append(f"matmul_reduce_scatter {rows} rows by {columns}")
        return
    call = Call("matmul_reduce_scatter", schedule=schedule, dim=scatter.dim)
    lead = list(value.shape[:-1])
    with graph.inserting_before(scatter.nodes[-2]):
        xs = []
        for each in terms:
            a = each.a
            if list(_value(a).shape[:-1]) != lead:
                a = _call(graph, aten.reshape.default, (a, [*lead, _value(a).shape[-1]]))
            xs.append(_moved(graph, a, scatter.dim, 0))
        op = torch.ops.weft.fused_matmuls_reduce_scatter.default
        made = _call(graph, op, (xs, [each.b for each in terms], call.encode(), scatter.group, None))
        _use_instead(scatter.result, _moved(graph, made, 0, scatter.dim))
    added = _sum_nodes(scatter.summed)
    _erase(graph, [*scatter.nodes, *added, *(each.node for each in terms)])
    done.scatters += 1
    done.matmuls += len(terms)


def _matmuls_of(x: Node) -> Iterator[_Matmul]:
    """The matmuls whose first operand is `x`, as a matrix."""
    columns = _value(x).shape[-1]
    for matrix in (x, *_reshapes_of(x)):
        value = _value(matrix)
        if value.dim() != 2 or value.shape[-1] != columns:
            continue
        for user in list(matrix.users):
            found = _as_matmul(user)
            if found is not None and found.a is matrix:
                yield found


def _as_matmul(node: Node) -> _Matmul | None:
    bias = None
    if node.target is aten.mm.default:
        a, b = node.args[:2]
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, a, b = node.args[:3]
    else:
        return None
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b or _value(a).dtype != _value(b).dtype:
        return None
    if bias is not None and (not isinstance(bias, Node) or _value(bias).dim() != 1):
        return None
    return _Matmul(node, a, b, bias)


def _terms(summed: Node) -> list[_Matmul] | None:
    """The matmuls whose sum this is; None if it is anything else, or has another use."""
    node = summed
    if not _used_once(node):
        return None
    if node.target is aten.add.Tensor and not node.kwargs:
        left, right = node.args[:2]
        if not isinstance(left, Node) or not isinstance(right, Node) or left is right:
            return None
        if _value(left).shape != _value(right).shape:
            return None
        first, second = _terms(left), _terms(right)
        return None if first is None or second is None else [*first, *second]
    while node.target in _RESHAPES and isinstance(node.args[0], Node):
        node = node.args[0]
        if not _used_once(node):
            return None
    found = _as_matmul(node)
    if found is None or found.bias is not None or _value(node).shape[-1] != _value(summed).shape[-1]:
        return None
    a = found.a
    source = a.args[0] if a.target in _RESHAPES else None
    if isinstance(source, Node) and _value(source).shape[:-1] == _value(summed).shape[:-1]:
        a = source
    return [_Matmul(node, a, found.b)]


def _used_once(node: Node) -> bool:
    """By one node; being cut into pieces that are all joined again is one use."""
    users = list(node.users)
    return len(users) == 1 or (
        bool(users) and all(user.target is aten.slice.Tensor and len(user.users) == 1 for user in users)
    )


def _sum_nodes(summed: Node) -> list[Node]:
    """The additions and reshapes between the matmuls and their sum."""
    if summed.target is aten.add.Tensor:
        inner = [node for arg in summed.args[:2] if isinstance(arg, Node) for node in _sum_nodes(arg)]
        return [summed, *inner]
    if summed.target in _RESHAPES and isinstance(summed.args[0], Node):
        return [summed, *_sum_nodes(summed.args[0])]
    return []


def _replace_matmul(graph: Graph, matmul: Node, y: Node) -> None:
    """Use `y`, which has the shape before flattening, for the matrix and for reshapes of it to that shape."""
    shape = list(_value(y).shape)
    for user in list(matmul.users):
        if user.target in _RESHAPES and list(_value(user).shape) == shape:
            _use_instead(user, y)
            graph.erase_node(user)
    if matmul.users:
        with graph.inserting_after(y):
            flat = y
            if shape != list(_value(matmul).shape):
                flat = _call(graph, aten.reshape.default, (y, list(_value(matmul).shape)))
        _use_instead(matmul, flat)


def _use_instead(old: Node, new: Node) -> None:
    """Replace a node; views of it become reshapes, since the new tensor may have another memory order."""
    old.replace_all_uses_with(new)
    for user in new.users:
        if user.target in _RESHAPES:
            user.target = aten.reshape.default


def _reshapes_of(x: Node) -> list[Node]:
    return [user for user in x.users if user.target in _RESHAPES]


def _users_through_reshapes(x: Node) -> Iterator[Node]:
    for user in x.users:
        if user.target in _RESHAPES and _value(user).dim() == 2:
            yield from user.users
        else:
            yield user


def _depends(node: Node, on: Node) -> bool:
    """Whether a node needs another one's result."""
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


def _raise_before(graph: Graph, place: Node, nodes: Sequence[Node]) -> None:
    """Move nodes and their inputs before `place`, on which they must not depend."""
    order = {each: i for i, each in enumerate(graph.nodes)}
    late, waiting = set(), list(nodes)
    while waiting:
        each = waiting.pop()
        if each not in late and order[each] > order[place]:
            late.add(each)
            waiting.extend(each.all_input_nodes)
    for each in sorted(late, key=order.__getitem__):
        place.prepend(each)


def _moved(graph: Graph, node: Node, source: int, target: int) -> Node:
    """The tensor with one dimension moved to another place."""
    if source == target:
        return node
    order = list(range(_value(node).dim()))
    order.insert(target, order.pop(source))
    return _call(graph, aten.permute.default, (node, order))


def _call(graph: Graph, target: Any, args: tuple[Any, ...]) -> Node:
    """A new node, with the fake value that later passes need."""
    node = graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda each: each.meta["val"])
    mode = next(
        (each.fake_mode for each in torch.utils._pytree.tree_leaves(values) if hasattr(each, "fake_mode")),
        None,
    )
    if mode is None:
        node.meta["val"] = target(*values)
    else:
        with mode:
            node.meta["val"] = target(*values)
    return node


def _erase(graph: Graph, nodes: Sequence[Node]) -> None:
    """Erase nodes that nothing uses, last ones first."""
    order = {each: i for i, each in enumerate(graph.nodes)}
    for node in sorted({each for each in nodes if each in order}, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _rows(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape[:-1]:
        count *= size
    return count


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _value(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
