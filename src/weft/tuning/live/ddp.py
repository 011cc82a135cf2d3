"""DDP: changes the size of gradient buckets in a running job, without editing the program.

A reducer holds the buckets of a model. For other sizes, DDP's own code creates a second reducer, which
replaces the first between two steps. A reducer that is not in place ignores gradients: DDP arms only the one
in its module. So several can coexist, at the cost of their buckets' memory, and switching is free once a
reducer has seen two steps (in the second it orders its buckets by the gradients' arrival).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from weft.errors import UnavailableError

_MIB = 1 << 20
LADDER_MB = (1.0, 5.0, 25.0, 100.0, 400.0, 1600.0)
MOST_CHOICES = 4
Caps = tuple[int, int]
"""Size limits in bytes: of a bucket, and of the bucket that is reduced first."""
_log = logging.getLogger("weft.live")


class Buckets:
    """The DDP modules of this process. `why_not`: why their buckets are never changed, or empty."""

    def __init__(self, modules: Sequence[Any], compiled: Sequence[Any] = ()) -> None:
        self._made: WeakKeyDictionary[Any, dict[Caps, tuple[Any, Any]]] = WeakKeyDictionary()
        self._own: dict[int, Caps] = {}
        self.why_not = next((why for module in modules if (why := why_keep_buckets(module, compiled))), "")
        if not self.why_not:
            for module in modules:
                self._made[module] = {own_caps(module): (module.reducer, module.logger)}
                self._own[id(module)] = own_caps(module)

    def watch(self) -> None:
        """Track forward passes from now on: between one and its backward pass, no reducer may be replaced."""
        if self._made:
            _watch_forward()

    @property
    def changeable(self) -> bool:
        """Whether there is anything to change."""
        return bool(self._made)

    @property
    def bytes(self) -> int:
        """Bytes of all gradients: the size of one more set of buckets."""
        return sum(p.numel() * p.element_size() for module in self._made for p in _parameters(module)[0])

    def choices(self, most: int) -> list[dict[str, float]]:
        """Policy changes to other sizes that lead to different buckets; at most `most`."""
        if not self._made:
            return []
        own = {module: self._own[id(module)] for module in self._made}
        cap_mb, first_mb = (max(caps[place] for caps in own.values()) / _MIB for place in (0, 1))
        nearest = sorted(LADDER_MB, key=lambda size: abs(math.log2(size / cap_mb)))
        changes = [{"bucket_mb": size} for size in nearest]
        changes += [{"first_bucket_mb": cap_mb}] if first_mb < cap_mb else []
        seen, found = {self._layout({})}, list[dict[str, float]]()
        for change in changes:
            layout = self._layout(change)
            if layout not in seen:
                seen.add(layout)
                found.append(change)
        return found[: min(most, MOST_CHOICES)]

    def caps(self, module: Any, bucket_mb: float | None, first_mb: float | None) -> Caps:
        """A policy's sizes for a module; the program's own if the policy sets none."""
        own = self._own[id(module)]
        cap = own[0] if bucket_mb is None else int(bucket_mb * _MIB)
        if first_mb is not None:
            return cap, int(first_mb * _MIB)
        return cap, cap if own[0] == own[1] else min(own[1], cap)

    def prepare(self, bucket_mb: float | None, first_mb: float | None) -> None:
        """Create the reducers of these sizes, at least one step after `watch`. No pass may be running."""
        try:
            self._check(new=True)
        finally:
            self.watch()
        for module, made in self._made.items():
            caps = self.caps(module, bucket_mb, first_mb)
            if caps not in made:
                made[caps] = _new_reducer(module, caps)

    def use(self, bucket_mb: float | None, first_mb: float | None) -> None:
        """Switch to the reducers of these sizes, which `prepare` created. Raises before any change."""
        for module, caps in self.check(bucket_mb, first_mb).items():
            module.reducer, module.logger = self._made[module][caps]

    def check(self, bucket_mb: float | None, first_mb: float | None) -> dict[Any, Caps]:
        """Sizes by module for `use`; empty if nothing changes. Raises UnavailableError if `use` would."""
        wanted = {module: self.caps(module, bucket_mb, first_mb) for module in self._made}
        if all(module.reducer is self._made[module].get(caps, (None,))[0] for module, caps in wanted.items()):
            return {}
        self._check()
        if any(caps not in self._made[module] for module, caps in wanted.items()):
            raise UnavailableError("DDP buckets of this size were not prepared")
        return wanted

    def release(self) -> None:
        """Drop the reducers that are neither in use nor the program's own."""
        if all(module.reducer is made[self._own[id(module)]][0] for module, made in self._made.items()):
            unwatch_forward()
        for module, made in self._made.items():
            for caps in [caps for caps in made if caps != self._own[id(module)]]:
                if made[caps][0] is not module.reducer:
                    del made[caps]

    def _check(self, *, new: bool = False) -> None:
        """Raise UnavailableError if reducers cannot be replaced now; the program may have changed things.

        `new`: whether reducers are to be created; they would use the parameters as they are now.
        """
        for module, made in self._made.items():
            why = why_not_now(module, len(_parameters(module)[0]) if new else None) or _why_under_way(module)
            if not why and all(module.reducer is not reducer for reducer, _ in made.values()):
                why = "the program has created its own reducer"
            if not why and _gradients_held(module):
                why = "the program holds gradients that are views of its buckets"
            if why:
                raise UnavailableError(f"DDP buckets cannot be changed: {why}")

    def _layout(self, change: dict[str, float]) -> tuple[Any, ...]:
        """How gradients would be grouped if they arrive in the reverse order of their parameters."""
        import torch.distributed as dist

        found = []
        for module in self._made:
            cap, first = self.caps(module, change.get("bucket_mb"), change.get("first_bucket_mb"))
            parameters, sparse = _parameters(module)
            limits = [first, cap] if first != cap else [cap]
            groups, _ = dist._compute_bucket_assignment_by_size(parameters[::-1], limits, sparse[::-1])
            found.append(tuple(map(tuple, groups)))
        return tuple(found)


def why_keep_buckets(module: Any, compiled: Sequence[Any] = ()) -> str:
    """Why the buckets of a DDP module are left unchanged; empty if they can be changed."""
    import torch

    if type(module) is not torch.nn.parallel.DistributedDataParallel:
        return "it is a subclass of DDP"
    parameters, sparse = _parameters(module)
    whole = [module, *module.module.modules()]
    reasons = {
        "it has a static graph": module.static_graph,
        "it looks for unused parameters": module.find_unused_parameters,
        "it uses DDP's mixed precision": getattr(module, "mixed_precision", None) is not None,
        "it delays all-reduces": bool(getattr(module, "_delay_all_reduce_params", None)),
        "it sets the sizes of individual buckets": _single_sizes(module),
        "it uses the Python reducer": getattr(module, "_use_python_reducer", False),
        "it has an optimizer in its backward pass": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in parameters
        ),
        "it is compiled": any(_is_compiled(part) for part in whole)
        or any(part is other for part in whole for other in compiled),
        "it has sparse gradients": any(sparse),
    }
    return next((reason for reason, holds in reasons.items() if holds), why_not_now(module, len(parameters)))


def why_not_now(module: Any, parameters: int | None = None) -> str:
    """Why a change is not possible now; empty if it is. The program may cause this at any time.

    `parameters`: the number of parameters to reduce now; None if unknown. Takes a few microseconds.
    """
    try:
        about = module.logger._get_ddp_logging_data()
        hook, known = about.strs_map.get("comm_hook", ""), about.ints_map.get("num_parameter_tensors")
    except Exception:  # this interface of torch is private
        _log.debug("DDP's logging data could not be read", exc_info=True)
        return "its communication hook cannot be determined"
    reasons = {
        "it has a communication hook": bool(hook or getattr(module, "_comm_hooks", None)),
        "it is inside `join`": bool(getattr(getattr(module, "_join_config", None), "enable", False)),
        "it is inside `no_sync`": not module.require_backward_grad_sync,
        "its parameters have changed": None not in (parameters, known) and parameters != known,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# --- passes in progress ------------------------------------------------------------------------------------

_real: list[Any] = []
_forward: WeakKeyDictionary[Any, tuple[Any, list[int]]] = WeakKeyDictionary()
"""By module: the reducer that its latest forward pass armed, and that reducer's backward times before it."""


def _watch_forward() -> None:
    from torch.nn.parallel import DistributedDataParallel

    if _real:
        return
    real = DistributedDataParallel.__dict__["_post_forward"]
    _real.append(real)

    def post_forward(module: Any, output: Any) -> Any:
        import torch

        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            _forward[module] = module.reducer, module.reducer.get_backward_stats()
        return real(module, output)

    DistributedDataParallel._post_forward = post_forward


def unwatch_forward() -> None:
    """Stop observing forward passes: no reducer is replaced any more."""
    _forward.clear()
    if _real:
        from torch.nn.parallel import DistributedDataParallel

        DistributedDataParallel._post_forward = _real.pop()


def _why_under_way(module: Any) -> str:
    """Why the current reducer is still needed, or empty. Another would not reduce this pass's gradients."""
    import torch

    if not _real:
        return "its forward passes have not been observed yet"
    if torch._C._current_graph_task_id() != -1:
        return "a backward pass is running"
    armed, before = _forward.get(module, (None, []))
    if armed is module.reducer and armed.get_backward_stats() == before:
        return "its backward pass has not started"
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:
        return "its backward pass has not finished"
    return ""


def _gradients_held(module: Any) -> bool:
    """Whether the program holds gradients that are views of buckets, which another reducer would replace."""
    import torch

    if not module.gradient_as_bucket_view:
        return False
    other = torch.nn.Parameter(torch.zeros(1))
    other.grad = torch.zeros(1)
    free = sys.getrefcount(other.grad)
    return any(sys.getrefcount(p.grad) > free for p in _parameters(module)[0] if p.grad is not None)


def own_caps(module: Any) -> Caps:
    """The program's sizes, or DDP's defaults; at least 1: 0 asks for one bucket per parameter."""
    config = getattr(module, "_bucket_config", None)
    if config is not None:
        return max(1, int(config.bucket_bytes_cap)), max(1, int(config.first_bucket_bytes_cap))
    import torch.distributed as dist

    cap = max(1, int(module.bucket_bytes_cap))
    small_first = getattr(module, "bucket_bytes_cap_default", True)
    return cap, int(dist._DEFAULT_FIRST_BUCKET_BYTES) if small_first else cap


def _new_reducer(module: Any, caps: Caps) -> tuple[Any, Any]:
    """A reducer and its logger, created by DDP's own code; the module is left unchanged."""
    import torch.distributed as dist

    cap, first = caps
    names = ("reducer", "logger", "bucket_bytes_cap", "_bucket_config", "bucket_bytes_cap_default")
    before = {name: module.__dict__[name] for name in names if name in module.__dict__}
    first_before = dist._DEFAULT_FIRST_BUCKET_BYTES
    parameters, sparse = _parameters(module)
    try:
        module.bucket_bytes_cap = cap
        if "_bucket_config" in before:
            module._bucket_config = dataclasses.replace(
                before["_bucket_config"], bucket_bytes_cap=cap, first_bucket_bytes_cap=first
            )
        else:  # before torch 2.12, the first bucket's size is a process-wide setting
            module.bucket_bytes_cap_default = True
            dist._DEFAULT_FIRST_BUCKET_BYTES = first
        named = module._build_debug_param_to_name_mapping(parameters)
        module._ddp_init_helper(parameters, sparse, named, module.static_graph)
        return module.reducer, module.logger
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first_before
        for name, value in before.items():
            setattr(module, name, value)


def _parameters(module: Any) -> tuple[list[Any], list[bool]]:
    """What DDP passes to its reducer: the parameters, and which of them have sparse gradients."""
    parameters, sparse = module._build_params_for_reducer()
    return list(parameters), list(sparse)


def _single_sizes(module: Any) -> bool:
    return bool(getattr(getattr(module, "_bucket_config", None), "has_custom_per_bucket_caps", False))


def _is_compiled(module: Any) -> bool:
    frame = sys.modules.get("torch._dynamo.eval_frame")
    optimized = frame is not None and isinstance(module, frame.OptimizedModule)
    return optimized or getattr(module, "_compiled_call_impl", None) is not None
