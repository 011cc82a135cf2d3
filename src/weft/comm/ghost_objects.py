"""Python objects that ghost ranks send to this rank: pipeline stages describe their tensors to each other.

A ghost stage is assumed to have the shapes of this stage, so it sends the objects that this rank sent last.
Gradients have the shapes of the outputs that they belong to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from typing import Any

_STAGE = "torch.distributed.pipelining.stage"


class GhostObjects:
    """Keeps the objects that this rank sent last, and returns them when this rank receives from a ghost."""

    def __init__(self) -> None:
        self._sent: list[Any] = []

    def sending(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A `send_object_list` that remembers the objects it sends."""

        @wraps(real)
        def send(object_list: list[Any], *args: Any, **options: Any) -> Any:
            self._sent = deepcopy(object_list)
            _answer_pipelines()
            return real(object_list, *args, **options)

        return send

    def receiving(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A `recv_object_list` that gives the objects sent last; torch's own if their number differs."""

        @wraps(real)
        def receive(object_list: list[Any], *args: Any, **options: Any) -> Any:
            if len(object_list) != len(self._sent):
                return real(object_list, *args, **options)
            object_list[:] = deepcopy(self._sent)
            return args[0] if args else options.get("src", options.get("group_src"))

        return receive


def _answer_pipelines() -> None:
    """Answer a stage that asks the next one for the shapes of its gradients (since torch 2.13)."""
    stage = sys.modules.get(_STAGE)
    kind, answer = getattr(stage, "PipelineStage", None), getattr(stage, "_StageBackwardMeta", None)
    real = getattr(kind, "_recv_meta", None)
    if kind is None or answer is None or real is None or getattr(real, "of_ghosts", False):
        return

    @wraps(real)
    def receive(self: Any, src_stage: int) -> Any:
        if src_stage < self.stage_index:
            return real(self, src_stage)
        outputs = self._stage_meta.outputs or ()
        return answer(tuple(replace(o, requires_grad=False) if o.requires_grad else None for o in outputs))

    receive.of_ghosts = True  # type: ignore[attr-defined]
    kind._recv_meta = receive
