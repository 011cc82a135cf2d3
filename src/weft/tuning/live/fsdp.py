"""FSDP2: prefetch depth, resharding after the forward pass, a separate communicator for reduce-scatter, and
all-gathers by copy engines (`weft.tuning.live.copy_engines`).

All of these are FSDP2 settings that take effect in the next forward pass, do not change the arithmetic, and
can be restored in the same way. If parameters are gathered early or kept, every forward pass still starts
from the same state as without weft: parameters that an earlier pass gathered but did not use, or kept for a
backward pass that never ran, are gathered again. So no module computes with an earlier step's parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from weft.errors import UnavailableError
from weft.policy import Policy
from weft.tuning.live.copy_engines import CopyEngines, shard_ranks
from weft.tuning.live.fsdp_communicator import (
    GROUP,
    name_of_our_own,
    restore_reduce_scatter,
    route_reduce_scatter,
)

DEPTHS = (1, 2, 4)
_PREFETCH = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
_log = logging.getLogger("weft.live")


class Sharding:
    """The FSDP2 modules of this process. `why_not`: why they are left unchanged, or empty."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._states: WeakKeyDictionary[Any, _Before] = WeakKeyDictionary()
        self._order: list[list[int]] = [[], []]
        self._forward: list[ref[Any]] = []
        self._backward: list[ref[Any]] = []
        self._unwatch: Callable[[], None] = lambda: None
        self._communicators: dict[tuple[int, ...], Any] = {}
        self._keep = False
        self._setter: list[Any] = []
        self._engines = CopyEngines()
        states = [module._get_fsdp_state() for module in modules]
        self.why_not = next((why for state in states if (why := why_keep_sharding(state))), "")
        if not self.why_not:
            for state in states:
                self._states[state] = _Before(state)

    @property
    def changeable(self) -> bool:
        """Whether there is anything to change."""
        return bool(self._states)

    # --- the order of the modules -------------------------------------------------------------------------

    def watch_order(self) -> None:
        """Record the order in which parameter groups are used, until `order_seen` or `unwatch_order`."""
        if not self._states:
            return
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        kinds = ("pre_forward", "_record_post_forward")
        real = {name: FSDPParamGroup.__dict__[name] for name in kinds}
        self._order = [[], []]

        def noting(name: str, order: list[int]) -> Any:
            def called(group: Any, *args: Any, **options: Any) -> Any:
                if not _in_backward():  # activation checkpointing repeats forward passes there
                    order.append(id(group))
                return real[name](group, *args, **options)

            return called

        for name, order in zip(kinds, self._order, strict=True):
            setattr(FSDPParamGroup, name, noting(name, order))

        def unwatch() -> None:
            for name in kinds:
                setattr(FSDPParamGroup, name, real[name])

        self._unwatch = unwatch

    def unwatch_order(self) -> None:
        """Stop recording, if that has begun."""
        self._unwatch()
        self._unwatch = lambda: None

    def order_seen(self) -> None:
        """Stop recording; keep the order if every pass used all sharded modules in the same order."""
        self.unwatch_order()
        of = {id(group): state for state in self._states for group in _groups(state)}
        forward, back = ([of[g] for g in _cycle(order) if g in of] for order in self._order)
        sharded = {id(state) for state in self._states if _groups(state)}
        complete = {id(state) for state in forward} == {id(state) for state in back} == sharded
        self._forward = [ref(state) for state in forward] if complete else []
        self._backward = [ref(state) for state in reversed(back)] if complete else []

    # --- what can be changed ------------------------------------------------------------------------------

    def choices(self, spare_bytes: float, communicator_bytes: float) -> dict[str, list[dict[str, Any]]]:
        """Policy changes by lever that fit in `spare_bytes` of GPU memory."""
        sizes = sorted((unsharded_bytes(g) for state in self._states for g in _groups(state)), reverse=True)
        resharded = [
            g for state in self._states for g in _groups(state) if g.post_forward_mesh_info is not None
        ]
        found: dict[str, list[dict[str, Any]]] = {}
        deep = [depth for depth in DEPTHS if sum(sizes[:depth]) < spare_bytes and depth < len(self._forward)]
        if deep and not any(state._states_to_forward_prefetch for state in self._states):
            found["forward prefetch"] = [{"forward_prefetch": depth} for depth in deep]
        if not any(state._states_to_backward_prefetch for state in self._states):
            # FSDP2 prefetches one module ahead by default.
            depths = [depth for depth in deep if depth > 1]
            found["backward prefetch"] = [{"backward_prefetch": depth} for depth in depths]
        if 0 < sum(map(unsharded_bytes, resharded)) < spare_bytes:
            found["resharding"] = [{"reshard_after_forward": False}]
        if communicator_bytes < spare_bytes and self._may_have_group():
            found["reduce-scatter group"] = [{"reduce_scatter_group": True}]
        groups = self._all_groups()
        why = self._engines.why_not(groups)
        if why:
            _log.debug("copy engines are not tried: %s", why)
        elif communicator_bytes + self._engines.bytes(groups) < spare_bytes:
            found["copy engines"] = [{"engine": "dma"}]
        return {name: changes for name, changes in found.items() if changes}

    def _all_groups(self) -> list[Any]:
        return [group for state in self._states for group in _groups(state)]

    def _may_have_group(self) -> bool:
        groups = self._all_groups()
        taken = any(getattr(g.mesh_info, "reduce_scatter_process_group", None) is not None for g in groups)
        plain = all(type(g._reduce_scatter_comm).__name__ == "DefaultReduceScatter" for g in groups)
        return bool(groups) and plain and not taken

    # --- changes ------------------------------------------------------------------------------------------

    def prepare(self, policy: Policy) -> None:
        """Create the communicators that a policy needs. All ranks call this together."""
        if policy.engine == "dma":
            self._engines.prepare(self._all_groups())
        if not policy.reduce_scatter_group:
            return
        import torch.distributed as dist

        for ranks in sorted({shard_ranks(g) for state in self._states for g in _groups(state)}):
            if ranks not in self._communicators:
                with name_of_our_own():
                    self._communicators[ranks] = dist.new_group(
                        list(ranks), use_local_synchronization=True, group_desc="weft_reduce_scatter"
                    )

    def use(self, policy: Policy) -> None:
        """Apply a policy; settings that it leaves open become the program's. Raises before any change."""
        self.check(policy)
        ahead = _ahead(self._forward, policy.forward_prefetch)
        behind = _ahead(self._backward, policy.backward_prefetch)
        for state, before in list(self._states.items()):
            before.prefetch(state, ahead, behind)
            for group in _groups(state):
                mesh = before.mesh(group)
                before.reshard(group, mesh or (group.mesh_info if policy.reshard_after_forward else None))
                if policy.reduce_scatter_group:
                    group.__dict__[GROUP] = self._communicators[shard_ranks(group)]
                else:
                    group.__dict__.pop(GROUP, None)
        route_reduce_scatter()
        self._engines.use(self._all_groups(), policy.engine == "dma")
        self._keep = policy.reshard_after_forward is False
        self._watch_setter(policy.reshard_after_forward is not None)
        guarded = policy.forward_prefetch or policy.backward_prefetch or self._keep
        for state, before in self._states.items():
            if guarded:
                state.__dict__["_root_pre_forward"] = _guarded(state, self._start_forward)
            elif state.__dict__.pop("_root_pre_forward", None):
                for group in _groups(state):  # what the guard would have done in the next pass
                    _drop(group, resharded=before.mesh(group) is not None)

    def _watch_setter(self, on: bool) -> None:
        """Make the program's calls that set resharding act on its own settings, not on ours.

        Both use the same values: a program that asks for the value in force could not be detected otherwise.
        """
        from torch.distributed.fsdp import FSDPModule

        name = "set_reshard_after_forward"
        if on == bool(self._setter):
            return
        if not on:
            setattr(FSDPModule, name, self._setter.pop())
            return
        real = FSDPModule.__dict__[name]
        self._setter.append(real)

        def called(*args: Any, **options: Any) -> Any:
            for state, before in self._states.items():
                for group in _groups(state):
                    before.reshard(group, before.mesh(group))
            return real(*args, **options)

        setattr(FSDPModule, name, called)

    def _start_forward(self, model: Any) -> None:
        """Start a forward pass: drop an earlier pass's parameters, and apply the settings for this one.

        `model`: the context that one model's states share; other models may be in the middle of a pass.
        Parameters are kept only if a backward pass can follow; else the program would find them unsharded.
        """
        import torch

        keep = self._keep and torch.is_grad_enabled()
        for state, before in self._states.items():
            for group in _groups(state) if state._state_ctx is model else ():
                mesh = before.mesh(group)
                _drop(group, resharded=mesh is not None)
                if self._keep:
                    before.reshard(group, None if keep else mesh)

    def release(self) -> None:
        """Destroy communicators that are not in use. All ranks call this together."""
        import torch.distributed as dist

        self._engines.release()
        used = {id(g.__dict__[GROUP]) for s in self._states for g in _groups(s) if GROUP in g.__dict__}
        for ranks, group in list(self._communicators.items()):
            if id(group) not in used:
                del self._communicators[ranks]
                try:
                    dist.destroy_process_group(group)
                except Exception:  # harmless: nothing uses it any more
                    _log.debug("a communicator for reduce-scatter was not destroyed", exc_info=True)
        if not used:
            restore_reduce_scatter()

    def check(self, policy: Policy) -> None:
        """Raise UnavailableError if `use` would."""
        if (policy.forward_prefetch or policy.backward_prefetch) and not self._forward:
            raise UnavailableError("FSDP2 cannot prefetch more: its modules do not run in a fixed order")
        if policy.reduce_scatter_group:
            ranks = {shard_ranks(g) for state in self._states for g in _groups(state)}
            if not ranks <= set(self._communicators):
                raise UnavailableError("a communicator for reduce-scatter was not prepared")


class _Before:
    """The program's latest settings: any value that differs from what weft last set is the program's."""

    def __init__(self, state: Any) -> None:
        self._own: dict[Any, Any] = {}
        self._set: dict[Any, Any] = {}
        for name in _PREFETCH:
            self._program(name, getattr(state, name))
        for group in _groups(state):
            self.mesh(group)

    def prefetch(self, state: Any, ahead: Mapping[int, Any] | None, behind: Mapping[int, Any] | None) -> None:
        """Prefetch these states in the forward and backward pass; None restores the program's setting."""
        for name, wanted in zip(_PREFETCH, (ahead, behind), strict=True):
            own = self._program(name, getattr(state, name))
            self._set[name] = own if wanted is None else wanted.get(id(state), [])
            setattr(state, name, self._set[name])

    def mesh(self, group: Any) -> Any:
        """The mesh to which the program reshards a group after the forward pass; None if it does not."""
        return self._program(id(group), group.post_forward_mesh_info)

    def reshard(self, group: Any, mesh: Any) -> None:
        """Reshard a group to this mesh after the forward pass; None: do not reshard."""
        self.mesh(group)
        self._set[id(group)] = group.post_forward_mesh_info = mesh

    def _program(self, what: Any, now: Any) -> Any:
        if what not in self._set or self._set[what] is not now:
            self._own[what] = self._set[what] = now
        return self._own[what]


def why_keep_sharding(state: Any) -> str:
    """Why the settings of an FSDP2 state are left unchanged; empty if they can be changed."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    groups = _groups(state)
    dynamo = torch._dynamo.config if hasattr(torch, "_dynamo") else None
    reasons = {
        "it is a subclass of FSDP2": type(state) is not FSDPState,
        "it has not been used yet": state._is_root is None,
        "its hooks are compiled": dynamo is not None and not getattr(dynamo, "skip_fsdp_hooks", True),
        "it does not shard": not all(isinstance(group.mesh_info, FSDPMeshInfo) for group in groups),
        "it reshards to fewer ranks": any(
            g.post_forward_mesh_info is not None and g.post_forward_mesh_info != g.mesh_info for g in groups
        ),
        "it gathers asynchronously": any(group.unshard_async_op for group in groups),
        "it is between two backward passes of a step": not state._state_ctx.is_last_backward
        or any(not group.reduce_grads for group in groups),
        "its whole model is compiled": state._is_root is True and _is_compiled_root(state),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def unsharded_bytes(group: Any) -> int:
    """Bytes of a group's gathered parameters."""
    return sum(
        param._orig_size.numel() * (param.param_dtype or param.orig_dtype).itemsize
        for param in group.fsdp_params
    )


def _groups(state: Any) -> list[Any]:
    """The parameter groups of a state; before torch 2.12, at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _is_compiled_root(state: Any) -> bool:
    modules = getattr(state, "_modules", None) or ()
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)


def _cycle(order: Sequence[int]) -> list[int]:
    """One pass over all groups if `order` only repeats that pass; else an empty list."""
    once = list(dict.fromkeys(order))
    if not once or len(order) % len(once) or list(order) != once * (len(order) // len(once)):
        return []
    return once


def _ahead(order: Sequence[ref[Any]], depth: int | None) -> dict[int, list[Any]] | None:
    """By state, the next `depth` states in an order; None if `depth` is None."""
    if depth is None:
        return None
    states = [state for found in order if (state := found()) is not None]
    return {id(state): states[i + 1 : i + 1 + depth] for i, state in enumerate(states)}


# --- keeping out an earlier step's parameters --------------------------------------------------------------


def _guarded(state: Any, start: Callable[[Any], None]) -> Any:
    """FSDP2's own start of a forward pass, preceded by `start`."""
    real = type(state)._root_pre_forward

    def root_pre_forward(*args: Any, **options: Any) -> Any:
        if state._state_ctx.iter_forward_root is None and not _in_backward():
            start(state._state_ctx)
        return real(state, *args, **options)

    return root_pre_forward


def _drop(group: Any, resharded: bool) -> None:
    """Drop gathered parameters that were not used or, if `resharded`, that the program would not keep."""
    pending = group._all_gather_result
    if pending is not None:
        event, work = pending.all_gather_event, pending.all_gather_work
        if event is not None:
            group.device_handle.current_stream().wait_event(event)
        if work is not None and hasattr(work, "wait"):
            work.wait()
        group._all_gather_result = None
    if resharded and group.is_unsharded:
        group._to_sharded()


def _in_backward() -> bool:
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
