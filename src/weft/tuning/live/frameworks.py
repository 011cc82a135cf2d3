"""Frameworks: applies a policy's `framework` controls to a running job's DDP and FSDP2 models.

Changes concern all ranks: each must make them between the same two steps, after `prepare` succeeded on all
ranks. A model that is wrapped in a way weft does not understand is left unchanged; a debug line says why.
"""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import replace
from typing import Any

from weft.errors import UnavailableError
from weft.policy import FRAMEWORK, Policy
from weft.tuning.live import ddp, fsdp
from weft.tuning.live.cached_memory import CachedMemory, allocator_stats

MARGIN_BYTES = 2 << 30  # least GPU memory that always stays free
COMMUNICATOR_BYTES = 1 << 30
Choices = dict[str, list[dict[str, Any]]]
"""Policy changes by lever."""
_log = logging.getLogger("weft.live")


class Frameworks:
    """The DDP and FSDP2 models of this process."""

    def __init__(self, default: Policy | None = None) -> None:
        """`default`: the policy that the job started with."""
        self._default = default or Policy()
        self._buckets: ddp.Buckets | None = None
        self._sharding: fsdp.Sharding | None = None
        self._cached = CachedMemory()
        self._models_now = self._default.models

    def learn(self) -> None:
        """Find the models, at the end of a step, and record the order of their modules from now on."""
        if self._buckets is None or self._sharding is None:
            replicas, shards, compiled = find_models()
            self._buckets = ddp.Buckets(replicas, compiled)
            self._sharding = fsdp.Sharding(shards)
            for name, count, why in (
                ("DDP", len(replicas), self._buckets.why_not),
                ("FSDP2", len(shards), self._sharding.why_not),
            ):
                if why:
                    _log.debug("%s (%d modules) is left unchanged: %s", name, count, why)
        self._buckets.watch()
        self._sharding.watch_order()

    def choices(self, *, same_sums: bool = False) -> Choices:
        """What can be changed in the models; call at least one step after `learn`.

        `same_sums`: return only changes that keep the order of sums.
        """
        if self._buckets is None or self._sharding is None:
            return {}
        self._sharding.order_seen()
        spare = spare_bytes()
        try:
            found = self._sharding.choices(spare, COMMUNICATOR_BYTES)
        except Exception:  # gc may still hold a model whose process group was destroyed
            _log.debug("FSDP2 is left unchanged: its models cannot be examined", exc_info=True)
            found = {}
        if same_sums:
            _log.debug("DDP's buckets are left unchanged: they may change the order of sums")
        elif size := self._buckets.bytes:
            # Keep room for one more set: a reducer allocates its buckets a second time when it reorders them.
            sets = min(spare / size - 1, ddp.MOST_CHOICES)
            found["buckets"] = self._buckets.choices(max(0, int(sets)))
        return {name: changes for name, changes in found.items() if changes}

    def stop_learning(self) -> None:
        """Undo `learn`, if nothing has been learnt since."""
        if self._sharding is not None:
            self._sharding.unwatch_order()

    def prepare(self, policy: Policy) -> None:
        """Create what a policy needs. Raises UnavailableError if that is not possible."""
        buckets, sharding = self._models(policy)
        self._note_memory(policy)
        if buckets is not None and (policy.bucket_mb is not None or policy.first_bucket_mb is not None):
            buckets.prepare(policy.bucket_mb, policy.first_bucket_mb)
        if sharding is None:
            return
        try:
            sharding.prepare(policy)
        except UnavailableError as error:  # raised on all ranks
            if policy.engine == self._default.engine == "dma":
                _log.warning("comm.engine dma: FSDP2 gathers with SM kernels: %s", error)
                sharding.prepare(replace(policy, engine="sm"))
            else:
                raise

    def apply(self, policy: Policy) -> None:
        """Run the models under a policy from the next step on. Raises before any change."""
        buckets, sharding = self._models(policy)
        if sharding is not None:
            sharding.check(policy)
        if buckets is not None:
            buckets.check(policy.bucket_mb, policy.first_bucket_mb)
        self._note_memory(policy)
        if sharding is not None:
            sharding.use(policy)
        if buckets is not None:
            buckets.use(policy.bucket_mb, policy.first_bucket_mb)
        self._models_now = policy.models

    def release(self) -> None:
        """Release what the policy in force does not need."""
        if self._buckets is not None:
            self._buckets.release()
        if self._sharding is not None:
            self._sharding.release()
        self._cached.give_back()

    def _note_memory(self, policy: Policy) -> None:
        """Record the allocator's memory before the first trial of framework controls: only they take some."""
        if policy.models not in (self._default.models, self._models_now):
            self._cached.before()

    def _models(self, policy: Policy) -> tuple[ddp.Buckets | None, fsdp.Sharding | None]:
        """The models that can be changed (None if none). Raises if the policy needs others."""
        buckets = self._buckets if self._buckets is not None and self._buckets.changeable else None
        sharding = self._sharding if self._sharding is not None and self._sharding.changeable else None
        wanted = {name for name in FRAMEWORK if getattr(policy, name) is not None}
        of_ddp = {"bucket_mb", "first_bucket_mb"}
        if wanted & of_ddp and buckets is None:
            raise UnavailableError(_why("DDP", self._buckets))
        if wanted - of_ddp and sharding is None:
            raise UnavailableError(_why("FSDP2", self._sharding))
        return buckets, sharding


def _why(name: str, found: ddp.Buckets | fsdp.Sharding | None) -> str:
    reason = found.why_not if found is not None and found.why_not else "no such model was found"
    return f"{name} cannot be changed in this job: {reason}"


def find_models() -> tuple[list[Any], list[Any], list[Any]]:
    """This process's DDP modules, FSDP2 modules, and the modules that torch.compile was called on.

    Compares types instead of calling `isinstance`, which may run code of proxy objects.
    """
    import torch

    replica = torch.nn.parallel.DistributedDataParallel
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    optimized = getattr(compiler, "OptimizedModule", None)
    replicas, shards, compiled = [], [], []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, replica):
            replicas.append(thing)
        elif sharded is not None and issubclass(kind, sharded):
            shards.append(thing)
        elif optimized is not None and issubclass(kind, optimized):
            compiled.append(thing.__dict__.get("_modules", {}).get("_orig_mod"))
    return replicas, shards, compiled


def spare_bytes() -> float:
    """Bytes of GPU memory unused at the job's peak, minus a margin; infinite without a GPU."""
    import torch

    if not torch.cuda.is_initialized():
        return float("inf")
    free, total = torch.cuda.mem_get_info()
    stats = allocator_stats()
    reserved = stats.get("reserved_bytes.all.current", 0)
    peak = max(stats.get("allocated_bytes.all.peak", 0), stats.get("allocated_bytes.all.current", 0))
    return float(free + max(0, reserved - peak) - max(MARGIN_BYTES, 0.02 * total))
