"""Fuses a collective and the GEMM that depends on it into one operation; its shape determines the schedule.

The operations need torch. Names are loaded on first use, so that schedules, the simulator and the pick work
without torch.

Code map of the package, from the user's call down to the transfers:

| modules | contents |
| --- | --- |
| `adopt`, `adopt_styles`, `promise`, `replacements` | `weft run --ops`: replacements in unmodified programs |
| `inductor_pass`, `fuse_graph`, `graph_patterns` | replacements in graphs of torch.compile |
| `model`, `attention_heads`, `feed_forward`, `styles`, `layers`, `gather_once` | parallel models and layers |
| `functions`, `call`, `autograd`, `compiled` | public functions; gradients; custom operators |
| `run`, `prepare`, `operands`, `teams`, `choose` | one call: tensors, agreement of the ranks, schedule |
| `schedule`, `steps`, `builder`, `build_gather`, `build_scatter` | schedules as data; no torch |
| `program`, `run_messages`, `run_streams`, `engines`, `links`, `paced_link`, `collect` | run schedules |
| `case`, `simulate`, `estimate`, `pick`, `ficco` | schedules on a simulated node; the pick; no torch |
| `explore`, `explore_device`, `characterize`, `characterize_device`, `tuner` | all schedules, all losses |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

_HOMES = {
    "all_gather_matmul": "weft.ops.functions",
    "matmul_reduce_scatter": "weft.ops.functions",
    "all_to_all_matmul": "weft.ops.functions",
    "ColumnParallelLinear": "weft.ops.layers",
    "RowParallelLinear": "weft.ops.layers",
    "SequenceColumnwise": "weft.ops.styles",
    "SequenceRowwise": "weft.ops.styles",
    "HostPeers": "weft.comm.dma",
    "PacedPeers": "weft.comm.paced_peers",
    "parallelize": "weft.ops.model",
    "tune": "weft.ops.tuner",
}

__all__ = [
    "ColumnParallelLinear",
    "HostPeers",
    "PacedPeers",
    "RowParallelLinear",
    "SequenceColumnwise",
    "SequenceRowwise",
    "all_gather_matmul",
    "all_to_all_matmul",
    "matmul_reduce_scatter",
    "parallelize",
    "tune",
]

if TYPE_CHECKING:
    from weft.comm.dma import HostPeers
    from weft.comm.paced_peers import PacedPeers
    from weft.ops.functions import all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter
    from weft.ops.layers import ColumnParallelLinear, RowParallelLinear
    from weft.ops.model import parallelize
    from weft.ops.styles import SequenceColumnwise, SequenceRowwise
    from weft.ops.tuner import tune


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
