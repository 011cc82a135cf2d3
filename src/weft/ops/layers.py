"""Linear layers for tensor and sequence parallelism, and the plan that puts them into a model.

Between the two layers of a pair every rank has all tokens and some features; outside, some tokens and all
features. Tokens are the first dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from weft.errors import UsageError
from weft.ops.functions import all_gather_matmul, matmul_reduce_scatter
from weft.ops.schedule import split
from weft.ops.teams import Team, team_of


class _Held:
    """A process group in a module: a copy of the module shares it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, _: Any) -> _Held:
        return self


class _Parallel(nn.Linear):  # type: ignore[misc,unused-ignore]
    """A linear layer of which this rank holds a part."""

    part = ""  # which feature dimension is divided

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        team = team_of(group)
        sizes = {"in": in_features, "out": out_features}
        sizes[self.part] = split(sizes[self.part], team.size)[team.rank]
        super().__init__(sizes["in"], sizes["out"], bias, device, dtype)
        self._held: _Held = _Held(group)
        self.options: dict[str, Any] = _options({}, {"in": in_features, "out": out_features}[self.part], team)

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Any = None, **options: Any) -> Any:
        """This rank's part of a layer that is whole on every rank."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update(_parameters=dict(linear._parameters), training=linear.training)
        cls.convert(made, group, **options)
        return made

    @classmethod
    def convert(cls, layer: nn.Linear, group: Any, **options: Any) -> None:
        """Make a whole layer this rank's part, in place."""
        team = team_of(group)
        weight, bias = layer.weight, layer.bias
        layer.__class__ = cls
        dim = 0 if cls.part == "out" else 1
        counts = split(weight.shape[dim], team.size)
        layer.weight = _piece(weight, dim, counts, team.rank)
        if bias is not None and cls.part == "out":
            layer.bias = _piece(bias, 0, counts, team.rank)
        layer.out_features, layer.in_features = layer.weight.shape
        layer._held, layer.options = _Held(group), _options(options, sum(counts), team)

    @property
    def group(self) -> Any:
        return self._held.group


def _options(given: dict[str, Any], features: int, team: Team) -> dict[str, Any]:
    """Ranks that hold different sizes cannot each find the schedule from its own: there it is fixed."""
    if features % team.size and not {"schedule", "policy"} & set(given):
        return {**given, "schedule": "hetero-fused-1d"}
    return dict(given)


def _piece(whole: nn.Parameter, dim: int, counts: tuple[int, ...], rank: int) -> nn.Parameter:
    data = whole.detach().split(counts, dim)[rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(data, requires_grad=whole.requires_grad)


class ColumnParallelLinear(_Parallel):
    """All-gathers the tokens and computes this rank's output features: `all_gather(x) @ weight.T + bias`.

    x: this rank's tokens, … by in_features. Result: all tokens, … by this rank's output features.
    """

    part = "out"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = all_gather_matmul(x, self.weight.t(), self.group, **self.options)
        return made if self.bias is None else made + self.bias.to(made.dtype)


class RowParallelLinear(_Parallel):
    """Multiplies this rank's input features, adds up over ranks, keeps this rank's tokens.

    x: all tokens, … by this rank's input features. Result: this rank's tokens, … by out_features. The bias is
    the same on every rank, and so is its gradient.
    """

    part = "in"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = matmul_reduce_scatter(x, self.weight.t(), self.group, **self.options)
        return made if self.bias is None else made + _SharedBias.apply(self.bias, self.group).to(made.dtype)


class _SharedBias(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """A bias that each rank adds to its own tokens: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.team = team_of(group)
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.team.size > 1:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.team.group)
        return grad, None


class _Style(ParallelStyle):  # type: ignore[misc,unused-ignore]
    layer: type[_Parallel]

    def __init__(self, **options: Any) -> None:
        """`options`: schedule, engine, pieces or policy of the operation."""
        super().__init__()
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UsageError(f"{type(self).__name__} is for nn.Linear, not {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise UsageError(f"{type(self).__name__} needs a mesh of one dimension, not {device_mesh.ndim}")
        self.layer.convert(module, device_mesh.get_group(), **self.options)
        return module


class SequenceColumnwise(_Style):
    """`parallelize_module` style: makes a layer a ColumnParallelLinear. Its input is sharded by tokens."""

    layer = ColumnParallelLinear


class SequenceRowwise(_Style):
    """`parallelize_module` style: makes a layer a RowParallelLinear. Its result is sharded by tokens."""

    layer = RowParallelLinear
