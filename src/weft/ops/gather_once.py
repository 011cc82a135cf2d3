"""Layers that have the same input (query, key, value; gate, up) share one gather, in an unmodified model.

The first of them that is called computes all, by one call of the operation; the others find their results. A
result is used once, and only for the very tensor it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class GatherOnce:
    """What the layers of one group share. Holds nothing once each layer has its result."""

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
        """Copies have no results: after a forward pass that raised an error some are left."""
        return {"layers": self.layers, "_x": None, "_state": None, "_results": []}

    def _now(self, x: torch.Tensor) -> Any:
        """What must not have changed between the gather and the use of a result."""
        grad = torch.is_grad_enabled()
        if torch.compiler.is_compiling() or x.is_inference() or self.layers[0].weight.is_inference():
            return grad
        return grad, x._version, [layer.weight._version for layer in self.layers]

    def _together(self) -> bool:
        """Whether all weights are whole on this rank now: FSDP may have divided those of other layers."""
        first = self.layers[0]
        return first.mesh is None or all(
            layer.weight.device_mesh.ndim == 1
            for layer in self.layers
            if hasattr(layer.weight, "device_mesh")
        )
