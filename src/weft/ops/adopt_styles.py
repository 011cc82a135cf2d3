"""Fused operations in models sharded with torch's own styles, without code changes (`weft run --ops`).

`ColwiseParallel`, `RowwiseParallel` and `PrepareModuleInput` keep their parameters, placements and hooks.
Only the collective is deferred: an input that a style would gather becomes a `PendingGather`, a DTensor that
is gathered when its local tensor is read. A column-parallel layer with such an input gathers and multiplies
in one operation; for any other reader, torch gathers it as before. A row-parallel layer whose result a style
would scatter multiplies and scatters in one operation. If no gain is expected, and inside torch.compile (see
`weft.ops.fuse_graph`), torch's own path runs. If a program uses torch.compile anywhere, modules get no
pending inputs, because each would cause compiled code to be recompiled.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim.optimizer import register_optimizer_step_post_hook

from weft.ops.call import Call
from weft.ops.layers import ColumnParallelLinear, RowParallelLinear, compute_columns
from weft.ops.promise import forced_schedule, promised, replaces_on
from weft.ops.replacements import Replacements
from weft.ops.steps import Problem
from weft.ops.teams import team_of

_log = logging.getLogger("weft.ops")

_counted = Replacements()
_PLAIN = (torch.Tensor, nn.Parameter, AsyncCollectiveTensor)


class PendingGather(DTensor):  # type: ignore[misc,unused-ignore]
    """A replicated DTensor that is gathered when anything but a fused operation reads its local tensor."""

    source: DTensor
    """The DTensor sharded along one dimension; it receives the gradient of the gathered tensor."""
    consumers: list[weakref.ref[nn.Module]]
    """The layers that have multiplied this tensor, in order."""
    results: dict[int, Any]
    """Results computed together with the first layer's and not fetched yet, by layer id."""
    state: Any
    """Gradient and autocast mode in which `results` were computed."""
    fused: bool | None
    """Whether fused operations multiply this tensor. The first layer decides for all; None: not decided."""
    observed: bool
    """Whether hooks received the tensors that autograd saved when it was made, as in torch's checkpoints."""

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override,unused-ignore]
        """Gather the tensor when torch reads it. After that, this is an ordinary DTensor."""
        with torch.no_grad():
            gathered = self.source.detach().redistribute(placements=[Replicate()]).to_local()
        self.__class__ = DTensor
        self._local_tensor = gathered
        return gathered

    @_local_tensor.setter
    def _local_tensor(self, _: torch.Tensor) -> None:
        """Ignore the tensor that torch's constructor sets: nothing is gathered yet."""

    def __deepcopy__(self, memo: Any) -> DTensor:
        _ = self._local_tensor
        made: DTensor = copy.deepcopy(self, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ = self._local_tensor
        return self.__reduce_ex__(protocol)


class _Defer(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """Makes a PendingGather from a sharded DTensor."""

    @staticmethod
    def forward(ctx: Any, given: DTensor, source: _Source) -> PendingGather:
        ctx.placements = given.placements
        spec = DTensorSpec(given.device_mesh, (Replicate(),), tensor_meta=given._spec.tensor_meta)
        nothing = torch.empty(0, dtype=given.dtype, device=given.device)
        made = PendingGather(nothing, spec, requires_grad=False)
        made.source, made.consumers, made.results = source.tensor, [], {}
        made.state, made.fused, made.observed = None, None, _saving_is_observed()
        return made

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore[override,unused-ignore]
        return grad.redistribute(placements=ctx.placements), None


class _Source:
    """Hides a tensor from autograd, which inspects a function's arguments."""

    def __init__(self, tensor: DTensor) -> None:
        self.tensor = tensor


def defer(source: DTensor) -> DTensor:
    """The result of `source.redistribute(placements=[Replicate()])`, but gathered later, or never."""
    made: DTensor = _Defer.apply(source, _Source(source))
    return made


def can_defer(x: Any) -> bool:
    """Whether x is a DTensor sharded along a dimension that a fused operation can gather."""
    if not isinstance(x, DTensor) or x.device_mesh.ndim != 1 or x.device_mesh.size() == 1:
        return False
    (placement,) = x.placements
    if type(placement) is not Shard or not 0 <= placement.dim < x.dim() - 1:
        return False
    if not replaces_on(x.device) or torch._C._functorch.peek_interpreter_stack():
        return False
    return type(x) is DTensor and type(x._local_tensor) in _PLAIN and _works(x)


_working: bool | None = None


def _works(x: DTensor) -> bool:
    """Whether this version of torch handles a pending DTensor; tested once, with nothing to gather."""
    global _working
    if _working is None:
        try:
            nothing = torch.empty(2, 2, dtype=x.dtype, device=x.device)
            whole = DTensor.from_local(nothing, x.device_mesh, [Replicate()], run_check=False)
            made = defer(whole)
            local = made._local_tensor
            _working = type(made) is DTensor and local.shape == whole.shape and made._local_tensor is local
        except (AttributeError, TypeError, NotImplementedError):
            _log.debug("inputs are gathered by torch: no pending DTensor in this version", exc_info=True)
            _working = False
    return _working


_Followers: TypeAlias = "weakref.WeakKeyDictionary[nn.Module, Sequence[weakref.ref[nn.Module]]]"
_seen: _Followers = weakref.WeakKeyDictionary()
"""By layer: the layers that multiplied the same tensor the last time this layer was the first to do so."""
_settled: _Followers = weakref.WeakKeyDictionary()
"""The state of `_seen` at the last optimizer step; passes with gradients use it. Activation checkpointing
repeats a forward pass and expects it to save the same tensors, so entries must not change within a step."""


def _settle(*_: Any) -> None:
    """Update `_settled`. Called after each optimizer step; steps inside a backward pass are ignored."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
        for layer, followers in _seen.items():
            _settled[layer] = tuple(followers)


class AdoptedColumn(ColumnParallelLinear):
    """A layer under torch's ColwiseParallel that may gather and multiply its input in one operation."""

    tokens_first = False  # results are contiguous, like torch's: the program may view them

    def forward(self, x: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling() and type(x) is PendingGather:
            result = _compute(self, x)
            if result is not None:
                return result
        return nn.Linear.forward(self, x)


class AdoptedRow(RowParallelLinear):
    """A layer under torch's RowwiseParallel that may compute and scatter its result in one operation."""

    tokens_first = False

    def forward(self, x: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling() and isinstance(x, DTensor) and _rows_fit(self, x):
            return super().forward(x)
        return nn.Linear.forward(self, x)


def _compute(layer: AdoptedColumn, pending: PendingGather) -> Any:
    """A layer's result; None if torch should compute it.

    Also computes the results of the layers that shared this layer's input last time, unless hooks receive the
    tensors that autograd saves: torch's checkpoints repeat a forward pass, and raise an error if it saves
    other tensors the second time.
    """
    state = torch.is_grad_enabled(), torch.is_autocast_enabled(pending.device.type)
    observed = _saving_is_observed()
    if observed and not pending.observed:
        return None  # when the checkpoint is recomputed, the tensor may already be gathered
    layers = [layer] if observed else _noted(layer, pending)
    result = pending.results.pop(id(layer), None) if pending.state == state else None
    if result is not None or not _weight_fits(layer, pending.source, Shard(0)):
        return result
    if pending.fused is None:
        pending.fused = _columns_promised(layers, pending.source)
    if not pending.fused:
        return None
    (placement,) = pending.source.placements
    made = compute_columns(layers, pending.source, placement.dim)
    pending.state = state
    pending.results.update({id(each): y for each, y in zip(layers[1:], made[1:], strict=True)})
    return made[0]


def _noted(layer: AdoptedColumn, pending: PendingGather) -> list[Any]:
    """This layer and, if it is the first to use this input, the layers that followed it last time."""
    layers: list[Any] = [layer]
    if not pending.consumers:
        known = [each() for each in (_settled if torch.is_grad_enabled() else _seen).get(layer, ())]
        others = [each for each in known if each is not None and each is not layer]
        layers += [each for each in others if _weight_fits(each, pending.source, Shard(0))]
        _seen[layer] = pending.consumers
    if all(each() is not layer for each in pending.consumers):
        pending.consumers.append(weakref.ref(layer))
    return layers


def _saving_is_observed() -> bool:
    """Whether hooks receive the tensors that autograd saves now; true if torch does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _columns_promised(layers: list[Any], x: DTensor) -> bool:
    rows, ranks = x.numel() // x.shape[-1], x.device_mesh.size()
    columns = sum(-(-layer.out_features // ranks) for layer in layers)
    problem = Problem(m=rows, n=columns, k=x.shape[-1], ranks=ranks, itemsize=x.element_size())
    return _promised(layers[0], "all_gather_matmul", problem, x)


def _rows_fit(layer: AdoptedRow, x: DTensor) -> bool:
    dim = layer.sequence_dim % x.dim()
    last = tuple(x.placements) == (Shard(x.dim() - 1),)
    if not last or dim == x.dim() - 1 or not _weight_fits(layer, x, Shard(1)):
        return False
    if type(x._local_tensor) not in _PLAIN or not replaces_on(x.device):
        return False
    ranks = layer._mesh.value.size()
    columns = -(-layer.in_features // ranks)
    rows = x.numel() // x.shape[-1]
    problem = Problem(m=rows, n=layer.out_features, k=columns, ranks=ranks, itemsize=x.element_size())
    return _promised(layer, "matmul_reduce_scatter", problem, x)


def _weight_fits(layer: Any, x: DTensor, placement: Any) -> bool:
    weight = layer.weight
    return (
        isinstance(weight, DTensor)
        and weight.device_mesh == x.device_mesh
        and tuple(weight.placements) == (placement,)
        and (weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type))
        and x.numel() > 0
    )


def _promised(layer: Any, operation: str, problem: Problem, x: DTensor) -> bool:
    return promised(team_of(layer.group), Call(operation), problem, x._local_tensor)


def _adopt(module: nn.Module, kind: type[Any], mesh: Any, sequence_dim: int) -> None:
    """Let a layer that a style has sharded use the fused operation."""
    made: Any = module
    made.__class__ = kind
    made.sequence_dim, made.output_layout, made.use_local_output = sequence_dim, None, False
    schedule = forced_schedule()
    made._place(mesh, mesh.get_group(), {} if schedule is None else {"schedule": schedule})
    _counted.layers += 1


def install_styles(styles: Any, counted: Replacements) -> None:
    """Make torch's styles (the module `torch.distributed.tensor.parallel.style`) defer their gathers."""
    global _counted
    _counted = counted
    columns, rows, prepare = styles.ColwiseParallel, styles.RowwiseParallel, styles.PrepareModuleInput
    _wrap(columns, "_apply", _apply_columns)
    _wrap(columns, "_prepare_input_fn", _prepare_columns)
    _wrap(rows, "_apply", _apply_rows)
    _wrap(prepare, "_apply", _apply_prepare)
    _wrap(prepare, "_prepare_input_arg", _prepare_argument)
    register_optimizer_step_post_hook(_settle)


def _wrap(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Wrap a method and keep its signature, which torch inspects. `replacement` gets the original first."""
    plain = owner.__dict__[name]
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, staticmethod(wrapped) if isinstance(plain, staticmethod) else wrapped)


def _apply_columns(original: Any, style: Any, module: nn.Module, mesh: Any) -> nn.Module:
    made: nn.Module = original(style, module, mesh)
    if _can_adopt(style, "ColwiseParallel", made, mesh):
        _adopt(made, AdoptedColumn, mesh, 0)
    return made


def _apply_rows(original: Any, style: Any, module: nn.Module, mesh: Any) -> nn.Module:
    made: nn.Module = original(style, module, mesh)
    layout = style.output_layouts[0]
    if type(layout) is Shard and _can_adopt(style, "RowwiseParallel", made, mesh):
        _adopt(made, AdoptedRow, mesh, layout.dim)
    return made


def _can_adopt(style: Any, name: str, module: nn.Module, mesh: Any) -> bool:
    """Accept only torch's own styles and layers: subclasses may behave differently."""
    known = type(style).__name__ == name and type(style).__module__.startswith("torch.distributed.")
    return bool(known and type(module) is nn.Linear and mesh.ndim == 1 and mesh.size() > 1)


def _prepare_columns(original: Any, layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any) -> Any:
    if not torch.compiler.is_compiling() and isinstance(module, AdoptedColumn) and layouts != desired:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, layouts, run_check=False)
        if can_defer(x) and tuple(desired) == (Replicate(),):
            return defer(x)
    return original(layouts, desired, module, inputs, mesh)


def _apply_prepare(original: Any, style: Any, module: nn.Module, mesh: Any) -> nn.Module:
    """Apply a copy of the style, one per module, that refers to its module."""
    of_module = copy.copy(style)
    of_module._weft_module = weakref.ref(module)
    made: nn.Module = original(of_module, module, mesh)
    return made


def _prepare_argument(original: Any, style: Any, given: Any, mesh: Any, layout: Any, desired: Any) -> Any:
    if not torch.compiler.is_compiling() and _may_pass_pending(style) and layout is not None:
        x = given
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and layout != desired:
            x = DTensor.from_local(x, mesh, (layout,), run_check=False)
        if layout != desired and desired == Replicate() and can_defer(x):
            return defer(x)
    return original(style, given, mesh, layout, desired)


def _may_pass_pending(style: Any) -> bool:
    """Whether a style may pass a pending input to its module.

    The module must take DTensors and have a layer that can use it, and nothing in the program is compiled.
    """
    module = getattr(style, "_weft_module", lambda: None)()
    if module is None or style.use_local_output or _counted.compiles:
        return False
    return any(isinstance(each, AdoptedColumn) for each in module.modules())
