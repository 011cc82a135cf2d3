"""State that other ranks contribute to a checkpoint: optimizer shards (ZeRO) and shard layouts (FSDP1).

A ghost has no state of its own. Its optimizer state has the shapes of its parameters and is zero, as at the
start of training. Its shards of a tensor come after rank 0's and have the same number of rows.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import partial, wraps
from itertools import count
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.ghost_group import GhostGroup
from weft.errors import UsageError

_log = logging.getLogger("weft.comm")


def consolidate_with_ghosts(zero: ModuleType) -> None:
    """Make `ZeroRedundancyOptimizer.consolidate_state_dict` use made-up state for ghosts."""
    kind = zero.ZeroRedundancyOptimizer
    real, broadcast = kind.consolidate_state_dict, zero._broadcast_object

    def receive(optimizer: Any, given: Any, src_rank: int, group: Any, device: Any) -> Any:
        if src_rank == dist.get_rank():
            return broadcast(given, src_rank, group, device)
        return _ghost_optimizer_state(optimizer, dist.get_group_rank(group, src_rank))

    @wraps(real)
    def consolidate(self: Any, to: int = 0) -> None:
        if isinstance(self.process_group, GhostGroup):
            zero._broadcast_object = partial(receive, self)  # type: ignore[attr-defined]
            _log.warning("the optimizer's state has rank 0's shard only: the other ranks are ghosts")
        try:
            real(self, to)
        finally:
            zero._broadcast_object = broadcast  # type: ignore[attr-defined]

    kind.consolidate_state_dict = consolidate


def _ghost_optimizer_state(optimizer: Any, rank: int) -> dict[str, Any]:
    """The optimizer state dict for a ghost's part of the parameters."""
    own = optimizer.optim.state_dict()
    parts = optimizer._partition_parameters()
    mine = [p for group in parts[optimizer.rank] for p in group["params"]]
    example = next(((p, optimizer.optim.state[p]) for p in mine if optimizer.optim.state.get(p)), None)
    numbers = count()
    groups, state = [], dict[int, Any]()
    for settings, group in zip(own["param_groups"], parts[rank], strict=True):
        places = {next(numbers): parameter for parameter in group["params"]}
        groups.append({**settings, "params": list(places)})
        if example:
            state |= {at: _state_like(*example, parameter) for at, parameter in places.items()}
    return {"state": state, "param_groups": groups}


def _state_like(known: Any, values: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """The initial state of `parameter`, modelled on the state `values` of another parameter, `known`."""

    def one(value: Any) -> Any:
        if torch.is_tensor(value) and value.shape == known.shape and value.dim() > 0:
            return torch.zeros_like(parameter, dtype=value.dtype, device=value.device)
        return deepcopy(value)

    return {key: one(value) for key, value in values.items()}


def explain_missing_state(utils: ModuleType) -> None:
    """Raise a UsageError where FSDP1 with `use_orig_params` needs optimizer state of ghosts."""
    real = utils._optim_state_dict

    @wraps(real)
    def collect(*args: Any, **options: Any) -> Any:
        try:
            return real(*args, **options)
        except RuntimeError as error:
            if "is not in the optimizer state" not in str(error):
                raise
            raise UsageError(
                f"FSDP1's optimizer state of {str(error).split()[0]} is on another rank, and ghost ranks "
                "have none; save the model only, or use fully_shard"
            ) from error

    utils._optim_state_dict = collect  # type: ignore[attr-defined]


def save_in_a_thread(saver: ModuleType) -> None:
    """Save asynchronous checkpoints in a thread: a separate process would wait for other ranks' processes."""
    saver._ProcessBasedAsyncCheckpointExecutor = (  # type: ignore[attr-defined]
        saver._ThreadBasedAsyncCheckpointExecutor
    )


def lay_out_ghost_shards(api: ModuleType) -> None:
    """Make a ShardedTensor describe distinct shards for the ghosts, which all report rank 0's shard."""
    real = api.build_global_metadata

    @wraps(real)
    def build(gathered: Any, *args: Any, **options: Any) -> Any:
        first = gathered[0]
        if len(gathered) > 1 and first is not None and all(one == first for one in gathered):
            gathered = [first, *(_shards_of(first, rank) for rank in range(1, len(gathered)))]
        return real(gathered, *args, **options)

    api.build_global_metadata = build  # type: ignore[attr-defined]


def _shards_of(first: Any, rank: int) -> Any:
    """The metadata of a rank's shards, derived from rank 0's; None if no rows are left for this rank."""
    found = deepcopy(first)
    kept = []
    for shard in found.shards_metadata:
        rows = shard.shard_sizes[0]
        start = shard.shard_offsets[0] + rank * rows
        if start >= found.size[0]:
            continue
        shard.shard_offsets = [start, *shard.shard_offsets[1:]]
        shard.shard_sizes = [min(rows, found.size[0] - start), *shard.shard_sizes[1:]]
        place = str(shard.placement).rpartition("/")[2]
        shard.placement = type(shard.placement)(f"rank:{rank}/{place}")
        kept.append(shard)
    found.shards_metadata = kept
    return found if kept else None
