"""The step: turns a TrainingJob into a Prediction that accounts for every second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weft.gpu.collectives import Group, collective_s
from weft.gpu.network import Network, usual_network
from weft.plan.compute import Pass, head, layer, optimizer_s
from weft.plan.config import AUTO, TrainingJob
from weft.plan.figures import Figures, half_rate, shipped
from weft.plan.memory import check_fits, memory_bytes, stage_params, tight
from weft.plan.overlap import Hidden, hide, simulated_gpu
from weft.plan.pipeline import Stage, span_s, stages
from weft.plan.traffic import Need, needs
from weft.policy import Policy

MEASURED = ("a100-80gb", "h100", "h100-96gb", "h200", "h800", "v100")
"""GPUs with published runs that the constants were fitted to."""

Predict = Callable[[TrainingJob], "Prediction"]
PlanProgress = Callable[[int, int], None]
"""Called with the number of finished parts of a plan and the total."""


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step, on the slowest stage; seconds are per step."""

    name: str
    kind: str
    group: Group
    bytes: float
    """Bytes of one collective: the larger buffer of a rank."""
    count: float
    """Collectives in a step."""
    alone_s: float
    hidden_s: float
    exposed_s: float
    slows_compute_by_s: float
    policy: Policy | None
    """None: the collectives overlap with nothing."""


@dataclass(frozen=True)
class Prediction:
    """A predicted step. Simulated: nothing was measured."""

    job: TrainingJob
    step_s: float
    tflops_per_gpu: float
    """Model FLOPs (attention as a full square, no recomputation) per second and GPU."""
    mfu_pct: float
    """`tflops_per_gpu` as a percentage of the bf16 peak, whatever the precision."""
    exposed_comm_s: float
    breakdown: dict[str, float]
    """Seconds by kind; they add up to `step_s`."""
    collectives: tuple[Collective, ...]
    memory_bytes: dict[str, float]
    """Bytes by kind on the GPU that needs most."""
    policy: dict[str, Policy | None]
    """Policy of each collective; None: it overlaps with nothing."""
    notes: tuple[str, ...] = ()
    simulated: bool = field(default=True, init=False)

    @property
    def compute_s(self) -> float:
        """Seconds of the slowest stage's kernels without contention."""
        return sum(self.breakdown[k] for k in ("gemm", "attention", "elementwise", "recompute", "optimizer"))

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.job.tokens / self.step_s / self.job.gpus


def predict(job: TrainingJob, figures: Figures | None = None, *, check_memory: bool = True) -> Prediction:
    """Predict the step of a job. Raises UsageError, with the sizes, if the job does not fit into memory."""
    known = figures or shipped()
    memory = memory_bytes(job, known)
    if check_memory:
        check_fits(job, memory)
    dense = layer(job, known)
    moe = layer(job, known, moe=True) if job.model.moe_layers else Pass()
    kinds = stages(job)
    parts = {stage: _part(job, known, stage, dense, moe) for stage in kinds}
    times = {stage: part.micro_batch_s for stage, part in parts.items()}
    slowest = max(parts.values(), key=lambda part: part.micro_batch_s * job.micro_batches + part.step_s)
    busy, bubble = span_s(times, kinds, job)
    breakdown = slowest.breakdown(job.micro_batches)
    breakdown["bubble"] = bubble + busy - slowest.micro_batch_s * job.micro_batches
    nodes = math.log2(max(1.0, job.gpus / job.network.domain))
    breakdown["skew"] = known.constants.skew * nodes * sum(breakdown.values())
    step = sum(breakdown.values())
    flops = job.model.flops(job.tokens, job.seq_len)
    found = slowest.collectives(job.micro_batches)
    return Prediction(
        job=job,
        step_s=step,
        tflops_per_gpu=flops / step / job.gpus / 1e12,
        mfu_pct=100 * flops / step / job.gpus / half_rate(job.gpu),
        exposed_comm_s=sum(c.exposed_s for c in found),
        breakdown=breakdown,
        collectives=found,
        memory_bytes=memory,
        policy={f"{c.name} {c.kind}": c.policy for c in found},
        notes=(*_notes(job, known), *tight(job, memory)),
    )


@dataclass(frozen=True)
class _Part:
    """One stage: its compute and its collectives, for a micro-batch and for the step."""

    work: Pass
    optimizer_s: float
    traffic: tuple[tuple[Need, Hidden], ...]

    @property
    def micro_batch_s(self) -> float:
        rest = sum(n.count * (h.cost_s + n.kernels_s) for n, h in self.traffic if not n.each_step)
        return self.work.total + rest

    @property
    def step_s(self) -> float:
        rest = sum(n.count * (h.cost_s + n.kernels_s) for n, h in self.traffic if n.each_step)
        return rest + self.optimizer_s

    def breakdown(self, micro_batches: int) -> dict[str, float]:
        both = self.work.forward + self.work.backward
        found = {
            "gemm": both.gemm * micro_batches,
            "attention": both.attention * micro_batches,
            "elementwise": both.elementwise * micro_batches,
            "recompute": (self.work.recompute.total - self.work.recompute.overhead) * micro_batches,
            "overhead": (both.overhead + self.work.recompute.overhead) * micro_batches,
            "optimizer": self.optimizer_s,
            "compression": sum(
                n.count * n.kernels_s * (1 if n.each_step else micro_batches) for n, _ in self.traffic
            ),
        }
        collectives = self.collectives(micro_batches)
        for name in ("tp", "cp", "ep", "pp", "grads", "params", "amax"):
            found[name] = sum((c.exposed_s for c in collectives if c.name == name), 0.0)
        found["contention"] = sum((c.slows_compute_by_s for c in collectives), 0.0)
        return found

    def collectives(self, micro_batches: int) -> tuple[Collective, ...]:
        found: dict[tuple[object, ...], Collective] = {}
        for need, hidden in self.traffic:
            times = need.count * (1 if need.each_step else micro_batches)
            key = (need.name, need.kind, need.group, need.bytes, hidden.policy)
            one = Collective(
                need.name,
                need.kind,
                need.group,
                need.bytes,
                times,
                hidden.alone_s * times,
                hidden.hidden_s * times,
                hidden.exposed_s * times,
                hidden.slows_compute_by_s * times,
                hidden.policy,
            )
            found[key] = _merged(found[key], one) if key in found else one
        return tuple(found.values())


def _merged(a: Collective, b: Collective) -> Collective:
    return replace(
        a,
        count=a.count + b.count,
        alone_s=a.alone_s + b.alone_s,
        hidden_s=a.hidden_s + b.hidden_s,
        exposed_s=a.exposed_s + b.exposed_s,
        slows_compute_by_s=a.slows_compute_by_s + b.slows_compute_by_s,
    )


def _part(job: TrainingJob, figures: Figures, stage: Stage, dense: Pass, moe: Pass) -> _Part:
    software = figures.find(job.software)
    work = dense * stage.dense_layers + moe * stage.moe_layers
    if stage.head:
        work = work + head(job, figures)
    traffic = []
    usual = job.network.but(
        rail_bytes_per_s=max(job.network.rail_bytes_per_s, usual_network(job.gpu.name).rail_bytes_per_s)
    )
    for need in needs(job, software, figures.constants.fusion, stage, dense, moe):
        alone = _alone_s(need, job, job.network, figures)
        if need.hidden:
            most = alone
            if need.group.scope == "network" and job.network.rail_bytes_per_s < usual.rail_bytes_per_s:
                most = _alone_s(need, job, usual, figures)
            found = hide(need.kind, alone, need.window, need.floor, job.gpu, need.group, job.policy, most)
        else:
            found = Hidden(alone, 0.0, alone, 0.0, None)
        traffic.append((need, found))
    shared, experts = stage_params(job, stage)
    shards = job.shard_ranks if job.sharding != "none" else 1
    return _Part(
        work,
        optimizer_s(shared / shards + experts / min(shards, job.expert_replicas), job, figures),
        tuple(traffic),
    )


def _alone_s(need: Need, job: TrainingJob, network: Network, figures: Figures) -> float:
    """Seconds of a collective without overlap."""
    return collective_s(
        need.kind, need.bytes, need.group, job.gpu, network, figures.links, flow_bytes=need.flow_bytes
    )


def _notes(job: TrainingJob, figures: Figures) -> tuple[str, ...]:
    found = [f"software: {figures.find(job.software).title}"]
    if simulated_gpu(job.gpu) not in (job.gpu.name, "a100-40gb"):
        found.append(f"contention is simulated with the profile of {simulated_gpu(job.gpu)}")
    if job.gpu.name not in MEASURED:
        found.append(f"rates of matmuls: shares of the peak as on {figures.relative(job.gpu)}")
    if job.sharding == "zero3" and not job.gathers_layers:
        found.append("with pipeline stages weights are gathered once a step and stay whole, as with zero1")
    sizes = {stage.layers for stage in stages(job)}
    if len(sizes) > 1:
        found.append(f"uneven stages: {min(sizes)} to {max(sizes)} layers")
    if job.policy == AUTO:
        found.append("policies are the best of the simulated candidates, collective by collective")
    return tuple(found)
