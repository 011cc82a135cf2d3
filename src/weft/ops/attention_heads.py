"""Checks whether an attention can be divided over ranks: each rank has whole heads and uses only its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn

from weft.errors import UsageError

_KINDS = "local|all|total|q|query|k|kv|key|v|value|attention|attn"
HEAD_COUNT = re.compile(rf"_?((n|nb|num)_?)?(({_KINDS})_)*heads?(_({_KINDS}))?|nh|h|n_h")
"""Names that models use for the total number of heads."""
HEAD_SIZES = ("head_dim", "d_head", "dim_head", "head_size", "dim_per_head", "d_k")


def check_attention(path: str, attention: nn.Module, columns: Sequence[str], ranks: int) -> None:
    """Raise UsageError if the attention cannot be divided over this many ranks. Changes nothing."""
    name = _head_count(attention)
    if name is not None and ranks > 1:
        raise UsageError(
            f"{path} ({type(attention).__name__}) cannot be divided: its forward pass uses {name}, which "
            "counts the heads of all ranks; views with -1 and head_dim work"
        )
    sizes = (getattr(attention, each, None) for each in HEAD_SIZES)
    head = next((each for each in sizes if isinstance(each, int) and each > 0), None)
    if head is None:
        return
    heads = {each: getattr(attention, each).out_features // head for each in columns}
    if all(count % ranks == 0 for count in heads.values()):
        return
    most = max(n for n in range(1, ranks) if all(count % n == 0 for count in heads.values()))
    each, count = min(heads.items(), key=lambda item: (item[1] % ranks == 0, item[1]))
    heads_of_it = "1 head" if count == 1 else f"{count} heads"
    raise UsageError(
        f"{path}.{each} has {heads_of_it}, which {ranks} ranks cannot divide evenly (weft replicates "
        f"none); the most ranks below {ranks} that can: {most}"
    )


def _head_count(attention: nn.Module) -> str | None:
    """A name that counts all heads and is used in the forward pass; None if there is none.

    The search includes what the forward pass calls: methods of the class, functions of the model's files, and
    modules without parameters.
    """
    inner = [each for each in attention.modules() if not any(True for _ in each.parameters())]
    waiting: list[tuple[type[Any], Any]] = [
        (type(each), type(each).forward)
        for each in (attention, *inner)
        if not type(each).__module__.startswith("torch.")
    ]
    known: set[Any] = set()
    while waiting:
        owner, function = waiting.pop(0)
        function = inspect.unwrap(function)
        if function in known:
            continue
        known.add(function)
        for name in _names(getattr(function, "__code__", None)):
            called = inspect.getattr_static(owner, name, None)
            if not inspect.isfunction(called):
                called = getattr(function, "__globals__", {}).get(name)
            if inspect.isfunction(called):
                if not called.__module__.startswith("torch."):
                    waiting.append((owner, called))
            elif HEAD_COUNT.fullmatch(name):
                return name
    return None


def _names(code: CodeType | None) -> Iterator[str]:
    """Attributes and globals that a function uses, including those of nested functions."""
    if code is None:
        return
    yield from sorted(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
