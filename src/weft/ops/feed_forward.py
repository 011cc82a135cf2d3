"""Checks whether a feed-forward can be divided: its forward pass must treat each inner feature independently.

Each rank computes some of the inner features, and the ranks' results are added. If the forward pass mixes
features (a softmax or a norm over them, or gate and up in one layer), the result is silently wrong. The names
of layers do not reveal this, so the check runs the module's own forward pass with small random layers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.errors import UsageError

_log = logging.getLogger("weft.ops")

FEATURES = 4
"""Inner features per rank in the check."""
MOST_APART = 1e-3
"""Largest accepted difference between the whole result and the sum over ranks, in fp32, relative to the
largest value."""


def check_feed_forward(path: str, module: nn.Module, columns: Sequence[str], row: str, ranks: int) -> None:
    """Raise UsageError if the results of ranks with some inner features each do not add up to the whole.

    Skips modules with further parameters (norms of inner features, which are divided) and modules whose
    forward pass raises an error for so few features.
    """
    others = [child for name, child in module.named_children() if name not in (*columns, row)]
    if ranks == 1 or any(True for child in others for _ in child.parameters()):
        return
    widths = {module.get_submodule(each).out_features for each in columns}
    try:
        halved = len(widths) == 1 and widths != {module.get_submodule(row).in_features}
        apart = 1.0 if halved else _apart(module, columns, row, ranks)
    except Exception:
        _log.debug("%s: its forward pass could not be tried", path, exc_info=True)
        return
    if not apart <= MOST_APART:
        raise UsageError(
            f"{path} ({type(module).__name__}) cannot be divided: its forward pass mixes the features of "
            f"{', '.join(columns)}, of which each rank would have a part"
        )


@torch.no_grad()  # type: ignore[misc,unused-ignore,untyped-decorator]
def _apart(module: nn.Module, columns: Sequence[str], row: str, ranks: int) -> float:
    draws = torch.Generator("cpu").manual_seed(0)
    layers: dict[str, Any] = {each: module.get_submodule(each) for each in (*columns, row)}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float32, device="cpu")

    inner = FEATURES * ranks
    weights = {each: draw(inner, layers[each].in_features) for each in columns}
    weights[row] = draw(layers[row].out_features, inner)
    biases = {each: draw(inner) for each in columns if layers[each].bias is not None}
    x = draw(1, 3, layers[columns[0]].in_features) / layers[columns[0]].in_features ** 0.5

    def result(first: int, last: int) -> torch.Tensor:
        made = {each: _layer(weights[each][first:last], biases.get(each), first, last) for each in columns}
        made[row] = _layer(weights[row][:, first:last].contiguous(), None, 0, 0)
        return _forward(module, made, x)

    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        whole = result(0, inner)
        parts = [result(FEATURES * rank, FEATURES * (rank + 1)) for rank in range(ranks)]
    difference = (sum(parts) - whole).abs().max() / whole.abs().max()
    return float(difference)


def _layer(weight: torch.Tensor, bias: torch.Tensor | None, first: int, last: int) -> nn.Linear:
    made = nn.Linear(*weight.t().shape, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias[first:last], requires_grad=False)
    return made.eval()


def _forward(module: nn.Module, layers: dict[str, nn.Linear], x: torch.Tensor) -> torch.Tensor:
    """Run the module's forward pass in evaluation mode with other layers. The module is left unchanged."""
    tried = copy.copy(module)
    tried.__dict__["_modules"] = {
        name: layers.get(name) or copy.deepcopy(child).eval() for name, child in module.named_children()
    }
    tried.__dict__["training"] = False
    made: torch.Tensor = type(module).forward(tried, x)
    return made
