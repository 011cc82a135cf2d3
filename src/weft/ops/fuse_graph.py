"""A pass over graphs of torch.compile that fuses collectives with the adjacent matmuls.

| pattern | replacement |
| --- | --- |
| all-gather along any dimension but the last, then matmuls with it | a gather with several weights |
| a matmul, or a sum of several, then a reduce-scatter (sum) | a reduce-scatter with several inputs |

These patterns come from `SequenceParallel`, `ColwiseParallel` and `RowwiseParallel`, forward and backward. If
the gathered tensor has other uses (the gradient of the weight), the operation returns it as well. All ranks
have the same graph, and the decision to replace depends only on sizes that they have in common.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.ops.call import Call
from weft.ops.compiled import place_in
from weft.ops.graph_patterns import (
    RESHAPES,
    GraphCollective,
    aten,
    c10d,
    depends_on,
    find_gather,
    find_scatter,
    matmuls_of,
    reshapes_of,
    sum_nodes,
    terms_of,
    users_through_reshapes,
    value_of,
)
from weft.ops.operands import DTYPES

_log = logging.getLogger("weft.ops")

Wanted = Callable[[str, int, int, int, torch.Tensor, str], bool]
"""Decides whether to replace: (operation, rows, columns, ranks, fake tensor, group) of the rows that move."""


@dataclass
class Replaced:
    """Counts of what a pass replaced, and what it skipped."""

    gathers: int = 0
    scatters: int = 0
    matmuls: int = 0
    skipped: list[str] = field(default_factory=list)


def fuse_graph(graph: Graph, wanted: Wanted, schedule: str | None = None) -> Replaced:
    """Replace patterns in place. The order of collectives does not change."""
    done = Replaced()
    for node in list(graph.nodes):
        try:
            if node.target is c10d.all_gather_into_tensor.default:
                gather = find_gather(node)
                if gather is not None:
                    _fuse_gather(graph, gather, wanted, schedule, done)
            elif node.target is c10d.reduce_scatter_tensor.default:
                scatter = find_scatter(node)
                if scatter is not None:
                    _fuse_scatter(graph, scatter, wanted, schedule, done)
        except Exception as error:  # raised before anything uses a new node, so the graph is still correct
            _log.debug("%s is left unchanged", node, exc_info=True)
            done.skipped.append(f"{node}: {error}")
    if done.gathers or done.scatters:
        graph.lint()
    return done


def _fuse_gather(
    graph: Graph, gather: GraphCollective, wanted: Wanted, schedule: str | None, done: Replaced
) -> None:
    matmuls = [each for each in matmuls_of(gather.result) if not depends_on(each.b, gather.result)]
    if not matmuls or not _is_wanted("all_gather_matmul", gather, gather.result, wanted, done):
        return
    replaced = {each.node for each in matmuls}
    elsewhere = any(user not in replaced for user in users_through_reshapes(gather.result))
    call = Call("all_gather_matmul", schedule=schedule, return_gathered=elsewhere, dim=gather.dim)
    first = gather.nodes[0]
    _raise_before(graph, first, [each.b for each in matmuls])
    with graph.inserting_before(first):
        shard = _moved(graph, gather.given, gather.dim, 0)
        made = _call(
            graph,
            torch.ops.weft.fused_matmul.default,
            (shard, [each.b for each in matmuls], [], call.encode(), place_in(gather.group), None, None),
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
    _erase(graph, [*gather.nodes, *reshapes_of(gather.result), *replaced])
    done.gathers += 1
    done.matmuls += len(matmuls)


def _fuse_scatter(
    graph: Graph, scatter: GraphCollective, wanted: Wanted, schedule: str | None, done: Replaced
) -> None:
    terms = terms_of(scatter.given)
    if terms is None or not _is_wanted("matmul_reduce_scatter", scatter, scatter.given, wanted, done):
        return
    call = Call("matmul_reduce_scatter", schedule=schedule, dim=scatter.dim)
    lead = list(value_of(scatter.given).shape[:-1])
    with graph.inserting_before(scatter.nodes[-2]):
        xs = []
        for each in terms:
            a = each.a
            if list(value_of(a).shape[:-1]) != lead:
                a = _call(graph, aten.reshape.default, (a, [*lead, value_of(a).shape[-1]]))
            xs.append(_moved(graph, a, scatter.dim, 0))
        op = torch.ops.weft.fused_matmuls_reduce_scatter.default
        made = _call(
            graph, op, (xs, [each.b for each in terms], call.encode(), place_in(scatter.group), None)
        )
        _use_instead(scatter.result, _moved(graph, made, 0, scatter.dim))
    added = sum_nodes(scatter.given)
    _erase(graph, [*scatter.nodes, *added, *(each.node for each in terms)])
    done.scatters += 1
    done.matmuls += len(terms)


def _is_wanted(
    operation: str, collective: GraphCollective, whole: Node, wanted: Wanted, done: Replaced
) -> bool:
    """Whether the operation can and should be fused. `whole`: the tensor with the rows of all ranks."""
    value = value_of(whole)
    if collective.dim >= value.dim() - 1 or value.dtype not in DTYPES:
        return False
    rows, columns = _rows(value), value.shape[-1]
    if wanted(operation, rows, columns, collective.ranks, value, collective.group):
        return True
    done.skipped.append(f"{operation} {rows} rows by {columns}")
    return False


def _replace_matmul(graph: Graph, matmul: Node, y: Node) -> None:
    """Use `y`, which has the unflattened shape, instead of the matmul and of its reshapes to that shape."""
    shape = list(value_of(y).shape)
    for user in list(matmul.users):
        if user.target in RESHAPES and list(value_of(user).shape) == shape:
            _use_instead(user, y)
            graph.erase_node(user)
    if matmul.users:
        with graph.inserting_after(y):
            flat = y
            if shape != list(value_of(matmul).shape):
                flat = _call(graph, aten.reshape.default, (y, list(value_of(matmul).shape)))
        _use_instead(matmul, flat)


def _use_instead(old: Node, new: Node) -> None:
    """Replace a node. Views of it become reshapes, because the new tensor may have another memory order."""
    old.replace_all_uses_with(new)
    for user in new.users:
        if user.target in RESHAPES:
            user.target = aten.reshape.default


def _raise_before(graph: Graph, place: Node, nodes: Sequence[Node]) -> None:
    """Move nodes and their inputs before `place`. They must not depend on `place`."""
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
    """The tensor with dimension `source` moved to `target`."""
    if source == target:
        return node
    order = list(range(value_of(node).dim()))
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
    """Erase those of the nodes that nothing uses, last ones first."""
    order = {each: i for i, each in enumerate(graph.nodes)}
    for node in sorted({each for each in nodes if each in order}, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _rows(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape[:-1]:
        count *= size
    return count
