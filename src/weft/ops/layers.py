"""Linear layers for tensor and sequence parallelism, with the placements of torch's own styles.

Between the two layers of a pair, every rank has all tokens and some features; outside, some tokens and all
features. Parameters are DTensors: Shard(0) for a column-parallel weight and bias, Shard(1) for a row-parallel
weight, Replicate for its bias. Checkpoints, gradient norms, optimizers and FSDP2 therefore treat them like
those of `ColwiseParallel` and `RowwiseParallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from weft.errors import UsageError
from weft.ops.functions import all_gather_matmul, matmul_reduce_scatter
from weft.ops.gather_once import GatherOnce
from weft.ops.teams import team_of

SEQUENCE_DIM = -2
"""Default dimension of tokens, for (tokens, features) and for (batch, sequence, features)."""


class SharedByCopies:
    """Holds an object that copies of a module share, such as a mesh or a process group."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, _: Any) -> SharedByCopies:
        return self


class _ParallelLinear(nn.Linear):  # type: ignore[misc,unused-ignore]
    """A linear layer of which this rank computes a part."""

    placements: dict[str, Any]
    """Placement of each parameter."""
    sequence_dim: int
    output_layout: Any
    use_local_output: bool
    tokens_first = True
    """Whether a result keeps the operation's memory layout, in which tokens are the outermost dimension."""
    options: dict[str, Any]
    """`schedule`, `engine`, `pieces` or `policy` of the operation."""
    gather_once: GatherOnce | None
    _mesh: SharedByCopies
    _group: SharedByCopies

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        """`in_features`, `out_features`: sizes of the whole layer. `group`: a process group or a 1-D mesh."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self._divide(group, **settings)

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Any = None, **settings: Any) -> Any:
        """This rank's part of a layer that is whole on every rank; the weights are taken from rank 0."""
        _check_plain(cls.__name__, linear)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update(
            {**linear.__dict__, "_parameters": dict(linear._parameters), "training": linear.training}
        )
        made._divide(group, **settings)
        return made

    @classmethod
    def convert(cls, linear: nn.Linear, group: Any = None, **settings: Any) -> None:
        """Replace a whole layer by this rank's part, in place."""
        _check_plain(cls.__name__, linear)
        linear.__class__ = cls
        linear._divide(group, **settings)

    @classmethod
    def check(cls, name: str, linear: nn.Linear, ranks: int) -> None:
        """Raise UsageError, with `name`, if the layer cannot be divided over this many ranks."""
        _check_plain(name, linear)
        for each, placement in cls.placements.items():
            whole = linear._parameters.get(each)
            if whole is not None:
                _check_shards(name, whole, placement, ranks)

    def _divide(
        self,
        group: Any,
        *,
        sequence_dim: int = SEQUENCE_DIM,
        output_layout: Any = None,
        use_local_output: bool = True,
        src_data_rank: int | None = 0,
        **options: Any,
    ) -> None:
        self.sequence_dim = sequence_dim
        self.output_layout, self.use_local_output = output_layout, use_local_output
        mesh = mesh_of(group, self.weight.device.type)
        self._place(mesh, group if mesh is None else mesh.get_group(), options)
        if mesh is None:
            return
        for name, placement in self.placements.items():
            whole = self._parameters.get(name)
            if whole is not None:
                _check_shards(type(self).__name__, whole, placement, mesh.size())
                part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=src_data_rank)
                self.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))

    def _place(self, mesh: DeviceMesh | None, group: Any, options: dict[str, Any]) -> None:
        """Set the mesh, group and options of the layer's operation."""
        self._mesh, self._group = SharedByCopies(mesh), SharedByCopies(group)
        self.options, self.gather_once = options, None
        if mesh is None:
            return
        size = self.out_features if self.placements["weight"] == Shard(0) else self.in_features
        if size % mesh.size() and not {"schedule", "policy"} & set(options):
            # Ranks with different sizes could choose different schedules, so the schedule is fixed.
            self.options = {**options, "schedule": "hetero-fused-1d"}

    @property
    def group(self) -> Any:
        """The process group that the layer is divided over."""
        return self._group.value

    @property
    def mesh(self) -> DeviceMesh | None:
        return self._mesh.value

    def _as_output(self, y: torch.Tensor, natural: Any, shape: Sequence[int], dim: int) -> Any:
        """The local result or a DTensor of this shape, in the requested layout. `dim`: that of the tokens."""
        wanted = self.output_layout or natural
        if self.tokens_first:
            order = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
            strides = torch.empty(order, device="meta").movedim(0, dim).stride()
        else:
            y, strides = y.contiguous(), torch.empty(tuple(shape), device="meta").stride()
        if self.mesh is None or (self.use_local_output and wanted == natural):
            return y
        made = DTensor.from_local(
            y, self.mesh, [natural], run_check=False, shape=torch.Size(shape), stride=strides
        )
        if wanted != natural:
            made = made.redistribute(placements=[wanted])
        return made.to_local() if self.use_local_output else made


class ColumnParallelLinear(_ParallelLinear):
    """All-gathers the tokens and computes this rank's output features: `all_gather(x) @ weight.T + bias`.

    x: this rank's tokens, … by in_features, or a DTensor of all tokens. Result: all tokens, … by this rank's
    output features. sequence_dim: the dimension of tokens; the second last by default.
    """

    placements = {"weight": Shard(0), "bias": Shard(0)}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> Any:
        if self.gather_once is not None:
            return self.gather_once(self, x)
        return compute_columns([self], x)[0]


def compute_columns(layers: Sequence[Any], x: torch.Tensor, sequence_dim: int | None = None) -> list[Any]:
    """The results of column-parallel layers that share this input, which is gathered once."""
    first = layers[0]
    dim = (first.sequence_dim if sequence_dim is None else sequence_dim) % x.dim()
    shape, rows = list(x.shape), None
    if isinstance(x, DTensor):
        x, rows = _local(x, Shard(dim), first.mesh), _uneven(x.shape[dim], first.mesh)
    elif first.mesh is not None:
        shape[dim] *= first.mesh.size()
    made = all_gather_matmul(
        x,
        [_own(layer.weight).t() for layer in layers],
        first.group,
        gather_dim=dim,
        rows=rows,
        bias=[None if layer.bias is None else _own(layer.bias) for layer in layers],
        **first.options,
    )
    return [
        layer._as_output(y, Shard(y.dim() - 1), (*shape[:-1], layer.out_features), dim)
        for layer, y in zip(layers, made, strict=True)
    ]


class RowParallelLinear(_ParallelLinear):
    """Multiplies this rank's input features, sums over ranks and keeps this rank's tokens.

    x: all tokens, … by this rank's input features, or a DTensor of all features. Result: this rank's tokens,
    … by out_features; tokens are divided as by `torch.chunk`. The bias and its gradient are the same on every
    rank.
    """

    placements = {"weight": Shard(1), "bias": Replicate()}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> Any:
        dim = self.sequence_dim % x.dim()
        tokens = x.shape[dim]
        if isinstance(x, DTensor):
            x = _local(x, Shard(x.dim() - 1), self.mesh)
        y = matmul_reduce_scatter(
            x,
            _own(self.weight).t(),
            self.group,
            scatter_dim=dim,
            rows=None if self.mesh is None else _uneven(tokens, self.mesh),
            **self.options,
        )
        if self.bias is not None:
            y = y + _SharedBias.apply(_own(self.bias), self.group).to(y.dtype)
        shape = [*y.shape[:dim], tokens, *y.shape[dim + 1 :]]
        return self._as_output(y, Shard(dim), shape, dim)


class _SharedBias(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """A bias that each rank adds to its own tokens; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.group is None and not dist.is_initialized():
            return grad, None
        group = dist.group.WORLD if ctx.group is None else ctx.group
        return functional.all_reduce(grad.contiguous(), "sum", group), None


def mesh_of(group: Any, device_type: str) -> DeviceMesh | None:
    """The mesh of a group, by default of all ranks; None unless there is a process group of several ranks."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"a parallel layer needs a mesh of one dimension, not {group.ndim}")
        return group
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or team_of(group).size == 1:
        return None
    if device_type == "meta":
        device_type = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return DeviceMesh.from_group(group, device_type)


def _check_plain(name: str, linear: nn.Linear) -> None:
    """Reject layers other than `x @ weight.T + bias`, such as quantized, adapted or hooked ones."""
    if isinstance(linear, _ParallelLinear) or isinstance(linear._parameters.get("weight"), DTensor):
        raise UsageError(f"{name}: this layer is divided already")
    own = type(linear).forward is not nn.Linear.forward or "forward" in vars(linear)
    if own or linear._parameters.get("weight") is None:
        what = "a forward pass" if own else "a weight"
        raise UsageError(
            f"{name}: {type(linear).__name__} has {what} of its own, which a parallel layer would replace; "
            "divide the model before it is quantized, parametrized or hooked"
        )


def _check_shards(name: str, whole: torch.Tensor, placement: Any, ranks: int) -> None:
    if isinstance(placement, Shard):
        size = whole.shape[placement.dim]
        if (ranks - 1) * -(-size // ranks) >= size and ranks > 1:
            raise UsageError(
                f"{name}: {size} features leave some of {ranks} ranks without any; use fewer ranks"
            )


def _uneven(size: int, mesh: Any) -> list[int] | None:
    """Sizes of the parts into which `torch.chunk` and DTensor divide a dimension; None if all are equal."""
    ranks = mesh.size()
    if size % ranks == 0:
        return None
    most = -(-size // ranks)
    return [max(0, min(most, size - rank * most)) for rank in range(ranks)]


def _local(x: DTensor, placement: Any, mesh: Any) -> torch.Tensor:
    """This rank's part of x, redistributed to `placement` if necessary."""
    if x.device_mesh.ndim != 1 or x.device_mesh != mesh:
        raise UsageError(f"the input is on {x.device_mesh}, the layer on {mesh}; both must be on one mesh")
    if tuple(x.placements) != (placement,):
        x = x.redistribute(placements=[placement])
    local: torch.Tensor = x.to_local()
    return local


def _own(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
