"""Lets layers with the same input (query, key, value; gate, up) share one gather, in an unmodified model.

The layer that is called first computes the results of all layers with one operation; the others fetch theirs.
A result is used once, and only for the tensor object it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class GatherOnce:
    """The shared gather of a group of layers. Holds no tensors once each layer has fetched its result."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self._x: Any = None
        self._state: Any = None
        self._results: list[Any] = []

    def __call__(self, layer: Any, x: torch.Tensor) -> Any:
        from weft.ops.layers import compute_columns

        index = next(i for i, each in enumerate(self.layers) if each is layer)
        state = self._now(x)
        if self._x is not x or self._state != state or self._results[index] is None:
            if not self._together():
                return compute_columns([layer], x)[0]
            self._results = compute_columns(self.layers, x)
            self._x, self._state = x, state
        result, self._results[index] = self._results[index], None
        if all(each is None for each in self._results):
            self._x, self._state, self._results = None, None, []
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Copy without results: a forward pass that raised an error may have left some."""
        return {"layers": self.layers, "_x": None, "_state": None, "_results": []}

    def _now(self, x: torch.Tensor) -> Any:
        """The state that must not change between the gather and the use of a result."""
        grad = torch.is_grad_enabled()
        if torch.compiler.is_compiling() or x.is_inference() or self.layers[0].weight.is_inference():
            return grad
        return grad, x._version, [layer.weight._version for layer in self.layers]

    def _together(self) -> bool:
        """Whether this rank has all weights unsharded now: FSDP may have sharded those of other layers."""
        first = self.layers[0]
        return first.mesh is None or all(
            layer.weight.device_mesh.ndim == 1
            for layer in self.layers
            if hasattr(layer.weight, "device_mesh")
        )
