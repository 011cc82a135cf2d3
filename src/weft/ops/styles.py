"""Styles for `torch.distributed.tensor.parallel.parallelize_module` with fused gathers and scatters.

| style | replaces |
| --- | --- |
| `SequenceColumnwise` | `ColwiseParallel(input_layouts=Shard(sequence))` |
| `SequenceRowwise` | `RowwiseParallel(output_layouts=Shard(sequence))` |
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from weft.errors import UsageError
from weft.ops.layers import SEQUENCE_DIM, ColumnParallelLinear, RowParallelLinear


class SequenceStyle(ParallelStyle):  # type: ignore[misc,unused-ignore]
    """Base class of both styles."""

    layer: type[Any]

    def __init__(
        self,
        *,
        sequence_dim: int = SEQUENCE_DIM,
        output_layouts: Any = None,
        use_local_output: bool = True,
        **options: Any,
    ) -> None:
        """`sequence_dim`: the dimension of tokens; by default the second last.

        `output_layouts`: placement of the result; None: the natural one. `use_local_output`: return this
        rank's tensor rather than a DTensor. `options`: schedule, engine, pieces or policy of the operation.
        """
        super().__init__()
        self.settings = {
            "sequence_dim": sequence_dim,
            "output_layout": output_layouts,
            "use_local_output": use_local_output,
            **options,
        }

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UsageError(f"{type(self).__name__} is for nn.Linear, not {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise UsageError(f"{type(self).__name__} needs a mesh of one dimension, not {device_mesh.ndim}")
        self.layer.convert(module, device_mesh, src_data_rank=self.src_data_rank, **self.settings)
        return module


class SequenceColumnwise(SequenceStyle):
    """Turns a layer into a ColumnParallelLinear. Its input is sharded by tokens, its result by features."""

    layer = ColumnParallelLinear


class SequenceRowwise(SequenceStyle):
    """Turns a layer into a RowParallelLinear. Its input is sharded by features, its result by tokens."""

    layer = RowParallelLinear
