"""Controls: changes policies in a running process, and profiles it."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.comm.node import NODE_VARIABLE
from weft.policy import Policy
from weft.ranks import launched_ranks
from weft.shim import apply, binding, communicators, layout, nccl_binding, spans, stats, tracer
from weft.tuning.candidates import cta_choices
from weft.tuning.entry import nodes_of
from weft.tuning.live import start_trial
from weft.tuning.live.costs import CommCosts, comm_costs
from weft.tuning.live.frameworks import Choices, Frameworks
from weft.tuning.live.options import Facts, Kernel

_FREE_BYTES = 2 << 30  # free GPU memory required for the buffers of new communicators
SM_SHARE = 2  # collectives of all ranks on the GPU may together take 1 in SM_SHARE of its SMs
SHARED_CTAS = 8  # limit per rank if processes share a GPU: 16 with high priority made collectives hang
REPORTED_KERNELS, REPORTED_NAME = 32, 200
MOST_SIZES = 32
RULE_PATHS = ("config", "tuner")
_PER_RANK = ("all_gather", "reduce_scatter")
Counts = dict[str, tuple[int, int, int, int, str]]


class LaunchControls:
    """Controls kernel launches and NCCL communicators through this process's shim."""

    def __init__(self, default: Policy, world: int, parameters: int = 0, *, models: bool = False) -> None:
        """`models`: whether steps end with an optimizer step, where DDP and FSDP2 models can be changed."""
        self.default, self._world, self._parameters = default, world, parameters
        self._before: Counts = {}
        self._calls = 0
        self._traces = False
        self.copied_bytes = binding.copied_bytes()
        self._frameworks = Frameworks(default) if models else None
        apply.handle_framework(self._frameworks.apply if self._frameworks else None)
        tracer.watch_tracer()

    def learn(self) -> None:
        self._traces = tracer.start()
        apply.shape_launches(self.default, track=True)
        self._before, self._calls = _counts(), _last_call()
        if self._frameworks is not None:
            self._frameworks.learn()

    def facts(self, steps: int) -> Facts:
        (profile, costs), after = self._profile(steps), _counts()
        times = profile.kernels if profile else {}
        seen = {name: _less(now, self._before.get(name)) for name, now in after.items()}
        comm = {name: row for name, row in seen.items() if row[4] == "comm" and row[0]}
        kernels = tuple(
            _kernel(symbol, launches / steps, beside / steps, blocks, times)
            for symbol, (launches, beside, blocks, _, kind) in seen.items()
            if kind == "compute" and launches
        )
        calls = [call for call in communicators.calls() if call.number > self._calls]
        ctas = max((row[3] for row in comm.values()), default=0)
        why, most = self._why_no_ctas(), 0
        choices: tuple[int, ...] = ()
        at_start: tuple[int, ...] = ()
        if not why:
            limits = [found.max_ctas for found in _used() if found.max_ctas]
            ctas, most = min(limits, default=ctas), _most_ctas(_used())
            if _free_bytes() < _FREE_BYTES:
                most = ctas  # fewer CTAs need no new communicator
            choices = tuple(count for count in cta_choices(ctas, _most_ctas(_used())) if count <= most)
        elif ctas and _used() and not _order_of_sums_matters(_used()):
            at_start = cta_choices(ctas, _most_ctas(_used()))
        apply.shape_launches(None)
        return Facts(
            launches=bool(seen),
            collectives=sum(row[0] for row in comm.values()) / steps,
            ctas=ctas or None,
            cta_choices=choices,
            most_ctas=most,
            why_no_ctas=why,
            framework=self._framework_choices(),
            cta_choices_at_start=at_start,
            start_settings=_start_settings(profile, self._world) if seen and comm and _used() else (),
            kernels=_to_report(kernels),
            span_ms=profile.span_ms if profile else None,
            comm_ms=profile.comm_ms if profile else None,
            exposed_ms=profile.exposed_ms if profile else None,
            costs=costs,
            rules=bool(_used()) and all(found.path in RULE_PATHS for found in _used()),
            calls=_sizes(calls, steps),
            deterministic=_deterministic(),
            world=self._world,
            one_rank_per_gpu=_ranks_of_a_node(),
            workload=self._workload(kernels, Counter(call.operation for call in calls), steps),
        )

    def _profile(self, steps: int) -> tuple[spans.StepProfile | None, CommCosts | None]:
        """Profile and costs since `learn`; None if the tracer could not record (it may be in use)."""
        recording = tracer.stop() if self._traces else None
        self._traces = False
        if recording is None:
            return None, None
        costs = comm_costs(spans.spans_of(recording), steps, _sms()) if _used() else None
        return spans.span_profile(recording, steps), costs

    def _workload(self, kernels: Sequence[Kernel], calls: Mapping[str, int], steps: int) -> str:
        names = "\n".join(sorted(kernel.symbol for kernel in kernels if kernel.launches >= 1))
        mark = hashlib.sha256(names.encode()).hexdigest()[:12]
        each = ", ".join(f"{count // steps} {name}" for name, count in sorted(calls.items()))
        size = f"{self._world} ranks, {self._parameters} parameters"
        return f"job of {size}, {each or 'no collective'} a step, kernels {mark}"

    def _why_no_ctas(self) -> str:
        if not communicators.available():
            return nccl_binding.NO_COMMUNICATOR
        used = _used()
        if not used:
            return "no NCCL communicator has carried a collective"
        refused = next((found.why_not for found in used if found.why_not), None)
        if refused:
            return f"the collectives' CTAs cannot be changed in this run: {refused}"
        if communicators.why_no_rules() and _free_bytes() < _FREE_BYTES:
            return "the collectives' CTAs were not tried: less than 2 GiB of the GPU's memory is free"
        if _order_of_sums_matters(used):
            return (
                "the program asks for deterministic algorithms; with more than 2 ranks, other CTAs may "
                "change the order of a collective's sums"
            )
        return ""

    def _framework_choices(self) -> Choices:
        if self._frameworks is None:
            return {}
        used = _used()
        return self._frameworks.choices(same_sums=bool(used) and _order_of_sums_matters(used))

    def preparable(self) -> list[tuple[str, int]]:
        return communicators.preparable() if communicators.available() else []

    def prepare(self, policy: Policy, keys: Sequence[str] | None) -> None:
        if self._frameworks is not None:
            self._frameworks.prepare(policy)
        if policy.max_ctas is not None and policy.max_ctas != self.default.max_ctas:
            communicators.prepare(policy.max_ctas, apply.PREPARE_S, keys)

    def apply(self, policy: Policy) -> None:
        if self._traces:  # the tuning ended while it was profiling
            self._traces = False
            tracer.drop()
        if self._frameworks is not None:  # it learns even where the tracer cannot record
            self._frameworks.stop_learning()
        apply.apply(policy, self.default)

    def harmless(self) -> None:
        apply.shape_launches(Policy())

    def release(self) -> None:
        if communicators.available():
            communicators.release()
        if self._frameworks is not None:
            self._frameworks.release()
        tracer.unwatch()

    def synchronize(self) -> None:
        apply.synchronize()

    def mark(self) -> Any:
        import torch

        if not torch.cuda.is_initialized():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: Any, end: Any) -> float:
        if isinstance(start, float):
            return 1e3 * (float(end) - start)
        end.synchronize()
        return float(start.elapsed_time(end))

    def clock(self) -> dict[str, int]:
        if not communicators.available():
            return {}
        return {
            f"communicator {found.key}": found.collectives
            for found in communicators.communicators()
            if found.key
        }


def _to_report(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The kernels that overlap most, with names shortened: all ranks send them through the store."""
    beside = [(k.beside_ms or 0.0, k.beside) for k in kernels]
    ranked = sorted(zip(beside, kernels, strict=True), key=lambda pair: pair[0], reverse=True)
    most = [kernel for weight, kernel in ranked if any(weight)][:REPORTED_KERNELS]
    return tuple(replace(k, name=k.name[:REPORTED_NAME], symbol=k.symbol[:REPORTED_NAME]) for k in most)


def _kernel(
    symbol: str, launches: float, beside: float, blocks: int, times: Mapping[str, tuple[float, float]]
) -> Kernel:
    name = stats.demangle(symbol)
    ms, beside_ms = times.get(symbol, (None, None))
    return Kernel(name, symbol, launches, beside, blocks or None, ms, beside_ms)


def _used() -> list[communicators.Communicator]:
    """Communicators that have carried collectives, except single-rank ones, which do not communicate."""
    return [found for found in communicators.communicators() if found.collectives and found.size != 1]


def _most_ctas(used: Sequence[communicators.Communicator]) -> int:
    """Most CTAs per rank that leave room for the program's own work, for all ranks that share the GPU."""
    import torch

    sms = _sms()
    here = Counter((found.key, found.device) for found in used)
    own = max(here.values())
    processes = 1 if _ranks_of_a_node() else launched_ranks("LOCAL_WORLD_SIZE")
    sharing = max(own, -(-processes // max(1, torch.cuda.device_count())))
    most = SHARED_CTAS if sharing > own else communicators.MOST_CTAS
    return int(min(most, sms // SM_SHARE // sharing))


def _ranks_of_a_node() -> bool:
    """Whether the other ranks are ghost ranks of a node profile, each of which represents its own GPU."""
    return bool(os.environ.get(NODE_VARIABLE))


def _sms() -> int:
    """Number of SMs of the GPU that collectives run on."""
    import torch

    known = [found.device for found in _used() if found.device is not None]
    device = known[0] if known else torch.cuda.current_device()
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _sizes(calls: Sequence[communicators.CommunicatorCall], steps: int) -> tuple[tuple[str, int, float], ...]:
    """Kind, bytes (as NCCL's tuner plugin counts) and calls per step of the most frequent collectives."""
    size = {found.key: max(1, found.size) for found in communicators.communicators()}
    found = Counter(
        (call.operation, call.bytes * (size.get(call.key, 1) if call.operation in _PER_RANK else 1))
        for call in calls
    )
    return tuple((kind, total, count / steps) for (kind, total), count in found.most_common(MOST_SIZES))


def _deterministic() -> bool:
    import torch

    return bool(torch.are_deterministic_algorithms_enabled())


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _start_settings(profile: spans.StepProfile | None, world: int) -> tuple[str, ...]:
    return start_trial.offered(
        os.environ,
        free_bytes=_free_bytes(),
        one_node=nodes_of(world) == 1,
        exposed_ms=profile.exposed_ms if profile else None,
        step_ms=profile.span_ms if profile else None,
    )


def _order_of_sums_matters(used: Sequence[communicators.Communicator]) -> bool:
    return _deterministic() and max(found.size for found in used) > 2


def _counts() -> Counts:
    """By the driver's kernel name: launches, launches during collectives, blocks per SM, grid and kind."""
    path = binding.attach()
    if path is None:
        return {}
    process, found = binding.read_process(path), Counts()
    for row, cells in process.rows():
        name = row.name.decode(errors="replace")
        launches, beside, blocks, grid, _ = found.get(name, (0, 0, 0, 0, ""))
        found[name] = (
            launches + sum(cell.launches for cell in cells),
            beside + sum(cell.beside for cell in cells),
            max(blocks, row.natural_blocks),
            max(grid, row.grid_blocks),
            layout.KINDS[row.kind] if row.kind < len(layout.KINDS) else "",
        )
    return found


def _less(now: tuple[int, int, int, int, str], before: Any) -> tuple[int, int, int, int, str]:
    launches, beside = (before[0], before[1]) if before else (0, 0)
    return now[0] - launches, now[1] - beside, *now[2:]


def _last_call() -> int:
    calls = communicators.calls()
    return calls[-1].number if calls else 0
