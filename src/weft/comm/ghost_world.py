"""A world of ghost ranks for unmodified programs: every group is a ghost group, whatever its backend.

A group of another backend, `monitored_barrier` and stores would wait for processes that do not exist. A
checkpoint (DCP) contains only rank 0's shards, which torch would reject. All of them are patched.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

from weft.comm.after_import import AfterImport
from weft.comm.ghost_calls import replace_function
from weft.comm.ghost_group import GhostGroup
from weft.comm.ghost_issue import BACKEND
from weft.comm.ghost_lane import GhostOptions
from weft.comm.ghost_objects import GhostObjects
from weft.comm.ghost_processes import make_stores_wait_for_nobody, reject_rpc, run_first_rank_here
from weft.comm.ghost_shards import (
    consolidate_with_ghosts,
    explain_missing_state,
    lay_out_ghost_shards,
    save_in_a_thread,
)
from weft.errors import UsageError

_log = logging.getLogger("weft.comm")
_PLANNER = "torch.distributed.checkpoint.default_planner"
_CHECK = "_validate_global_plan"
_STORE_WAIT = timedelta(seconds=30)
"""Timeout of the store: only another thread of this process can set a key that is waited for."""


def make_world_of_ghosts(ranks: int, local_ranks: int | None = None) -> None:
    """Make `init_process_group` and all that creates groups use ghost ranks, with this process as rank 0."""
    c10d = dist.distributed_c10d
    real_init, real_group, real_gather = (
        dist.init_process_group,
        c10d._new_process_group_helper,
        dist.gather_object,
    )
    names, process = inspect.signature(real_group), os.getpid()

    @wraps(real_init)
    def init_as_ghost(*_: Any, **__: Any) -> None:
        if os.getpid() != process:
            raise UsageError(
                "a child process is not a ghost rank: rank 0 is the process of the script itself"
            )
        store = dist.HashStore()
        store.set_timeout(_STORE_WAIT)
        real_init(BACKEND, rank=0, world_size=ranks, store=store)

    @wraps(real_group)
    def make_ghosts(*args: Any, **options: Any) -> Any:
        given = names.bind(*args, **options).arguments
        kept = given.get("backend_options")
        given["backend_options"] = kept if isinstance(kept, GhostOptions) else None
        return real_group(**{**given, "backend": dist.Backend(BACKEND)})

    @wraps(real_gather)
    def gather(*args: Any, **options: Any) -> Any:
        _accept_partial_checkpoints()
        return real_gather(*args, **options)

    c10d._new_process_group_helper = make_ghosts
    if hasattr(c10d, "_maybe_attach_flight_recorder"):  # since torch 2.15; works only with C++ backends
        c10d._maybe_attach_flight_recorder = _unless_ghosts(c10d._maybe_attach_flight_recorder)
    replace_function("init_process_group", init_as_ghost)
    replace_function("gather_object", gather)
    if hasattr(dist, "split_group"):  # since torch 2.5
        replace_function("split_group", _split(dist.split_group))
    replace_function("monitored_barrier", _barrier(dist.monitored_barrier))
    objects = GhostObjects()
    replace_function("send_object_list", objects.sending(dist.send_object_list))
    replace_function("recv_object_list", objects.receiving(dist.recv_object_list))
    make_stores_wait_for_nobody()
    run_first_rank_here({1, ranks, local_ranks or ranks})
    AfterImport(
        {
            "torch.distributed.rpc": reject_rpc,
            "torch.distributed.optim.zero_redundancy_optimizer": consolidate_with_ghosts,
            "torch.distributed._shard.sharded_tensor.api": lay_out_ghost_shards,
            "torch.distributed.fsdp._optim_utils": explain_missing_state,
            "torch.distributed.checkpoint.state_dict_saver": save_in_a_thread,
        }
    ).install()


def _split(real: Callable[..., Any]) -> Callable[..., Any]:
    """A `split_group` that makes a new group for this rank's part; torch would split NCCL communicators."""
    names = inspect.signature(real)

    @wraps(real)
    def split(*args: Any, **options: Any) -> Any:
        given = names.bind(*args, **options).arguments
        parent = given.get("parent_pg") or dist.group.WORLD
        own = next((part for part in given.get("split_ranks") or () if parent.rank() in part), None)
        if own is None:
            return None
        return dist.new_group(
            [dist.get_global_rank(parent, rank) for rank in sorted(own)], group_desc=given.get("group_desc")
        )

    return split


def _unless_ghosts(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def attach(group: Any, *args: Any, **options: Any) -> Any:
        return None if isinstance(group, GhostGroup) else real(group, *args, **options)

    return attach


def _barrier(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def barrier(group: Any = None, *args: Any, **options: Any) -> Any:
        own = group or dist.group.WORLD
        return dist.barrier(group) if isinstance(own, GhostGroup) else real(group, *args, **options)

    return barrier


def _accept_partial_checkpoints() -> None:
    """Make DCP save a checkpoint of rank 0's shards only.

    DCP gathers the plans of all ranks, assigns a part that several ranks have to one of them, and checks that
    the plans cover every tensor.
    """
    planner = sys.modules.get(_PLANNER)
    real_check, kind = getattr(planner, _CHECK, None), getattr(planner, "DefaultSavePlanner", None)
    if real_check is None or kind is None or getattr(real_check, "of_ghosts", False):
        return
    real_plan = kind.create_global_plan

    @wraps(real_check)
    def check(*args: Any) -> Any:
        found = real_check(*args)  # a list of problems; in older versions, True if there are none
        if found not in ([], True):
            _log.warning("the checkpoint has rank 0's shards only: the other ranks are ghosts")
        return [] if isinstance(found, list) else True

    @wraps(real_plan)
    def plan(self: Any, all_plans: list[Any]) -> Any:
        """Empty the plans of the ghosts: they equal rank 0's, so DCP would assign parts of it to ghosts."""
        return real_plan(self, [all_plans[0], *(replace(one, items=[]) for one in all_plans[1:])])

    check.of_ghosts = True  # type: ignore[attr-defined]
    setattr(planner, _CHECK, check)
    kind.create_global_plan = plan
