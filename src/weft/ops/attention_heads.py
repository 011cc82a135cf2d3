"""Over how many ranks an attention can be divided: each rank has whole heads, and uses only its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn

from weft.errors import UsageError

HEAD_COUNT = re.compile(r"(n|num)_(local_)?((q|query|k|kv|key_value|v|attention|attn)_)?heads?")
"""How models name the number of heads of all ranks."""


def check_attention(path: str, attention: nn.Module, columns: Sequence[str], ranks: int) -> None:
    """Raise an error, before anything is changed, if the attention cannot be divided over so many ranks."""
    name = _head_count(type(attention))
    if name is not None and ranks > 1:
        raise UsageError(
            f"{path} ({type(attention).__name__}) cannot be divided: its forward pass uses {name}, which "
            "counts the heads of all ranks; views with -1 and head_dim work"
        )
    head = getattr(attention, "head_dim", None)
    if not isinstance(head, int) or head < 1:
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


def _head_count(kind: type[Any]) -> str | None:
    """A name in the forward pass, or in the methods of the class that it calls, that counts all heads."""
    waiting, known = ["forward"], {"forward"}
    while waiting:
        function = inspect.unwrap(getattr(kind, waiting.pop()))
        for name in _names(getattr(function, "__code__", None)):
            if HEAD_COUNT.fullmatch(name):
                return name
            if name not in known and inspect.isfunction(inspect.getattr_static(kind, name, None)):
                known.add(name)
                waiting.append(name)
    return None


def _names(code: CodeType | None) -> Iterator[str]:
    """Attributes and globals that a function uses, also in the functions inside it."""
    if code is None:
        return
    yield from sorted(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
