"""Memory: bytes of the fullest GPU by kind, and the refusal of what does not fit."""

from __future__ import annotations

from weft.errors import UsageError
from weft.plan.collectives import group
from weft.plan.compression import kept_bytes
from weft.plan.config import TrainingJob
from weft.plan.figures import Figures
from weft.plan.pipeline import Stage, in_flight, stages

RESERVED_BYTES = 3 << 30  # the CUDA context, NCCL's buffers and the allocator's slack


def stage_params(job: TrainingJob, stage: Stage) -> tuple[float, float]:
    """Parameters on one rank: those that data parallelism repeats everywhere, and those of experts."""
    m = job.model
    shared = stage.layers * m.attention_params + stage.dense_layers * m.mlp_params
    shared += stage.moe_layers * m.shared_params
    if stage.embedding:
        shared += (m.vocab + m.positions) * m.hidden
    if stage.head and not (m.tied and stage.embedding):
        shared += m.vocab * m.hidden
    experts = stage.moe_layers * m.experts * m.expert_params
    return shared / job.tp, experts / (job.ep * max(1, job.expert_tp))


def activation_bytes(job: TrainingJob, figures: Figures, *, moe: bool) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward pass (after Korthikanti et al.)."""
    m, software = job.model, figures.find(job.software)
    tokens = job.micro_batch * job.seq_len / job.cp
    rows = tokens / job.tp if job.sequence_parallel else tokens
    if job.recompute == "full":
        return 2 * rows * m.hidden
    attention = 2.0 * tokens * (2 * m.heads * m.query_dim + m.kv_heads * (m.query_dim + m.value_dim)) / job.tp
    if moe:
        width = (m.expert_ffn * m.experts_per_token + m.shared_ffn) / job.tp
        routed = 2.0 * tokens * m.experts_per_token * m.hidden / job.tp
    else:
        width, routed = m.ffn / job.tp, 0.0
    inner = 2.0 * tokens * width * (3 if m.gated else 2)
    if job.recompute == "selective" and software.selective == "half":
        attention, inner = attention / 2, inner / 2
    if job.recompute == "selective" and software.selective == "projections":
        return attention - 2.0 * tokens * m.heads * m.query_dim / job.tp + 2 * rows * m.hidden
    masks = 2.0 if software.attention == "unfused" else 0.0
    wide = (8.0 + masks) * rows * m.hidden
    total = wide + attention + inner + routed
    if software.attention == "unfused" and job.recompute == "none":
        total += 5.0 * m.heads / job.tp * tokens * job.seq_len
    return total


def memory_bytes(job: TrainingJob, figures: Figures) -> dict[str, float]:
    """Bytes by kind on the GPU that needs most."""
    return max(
        (_of_stage(job, figures, stage) for stage in stages(job)), key=lambda kinds: sum(kinds.values())
    )


def _of_stage(job: TrainingJob, figures: Figures, stage: Stage) -> dict[str, float]:
    shared, experts = stage_params(job, stage)
    replicas = job.shard_ranks
    # Gradients that are summed over micro-batches stay whole until the last, unless each layer is scattered.
    scattered = job.sharding in ("zero2", "zero3") and job.micro_batches == 1

    def held(bytes_each: float, sharded: bool) -> float:
        if not sharded:
            return bytes_each * (shared + experts)
        return bytes_each * (shared / replicas + experts / min(replicas, job.expert_replicas))

    layers = stage.dense_layers * activation_bytes(job, figures, moe=False)
    layers += stage.moe_layers * activation_bytes(job, figures, moe=True)
    # Layers are rebuilt one at a time, and the gathered parameters of two of them are there at once.
    moe = stage.moe_layers > 0
    scratch = activation_bytes(job.but(recompute="none"), figures, moe=moe)
    scratch -= activation_bytes(job, figures, moe=moe)
    if job.gathers_layers and job.shard_ranks > 1:
        scratch += 2 * 2 * (shared + experts) / max(1, stage.layers)
    logits = 0.0
    if stage.head:
        logits = 6.0 * job.micro_batch * job.seq_len / job.cp * job.model.vocab / job.tp
    flight = in_flight(job) if stage.embedding or not stage.head else 1.0
    return {
        "parameters": held(2, job.gathers_layers),
        "gradients": held(figures.find(job.software).grad_bytes, job.gathers_layers or scattered),
        "optimizer": held(12, job.sharding != "none"),
        "activations": layers * flight,
        "working": scratch + logits,
        "compression": _for_compression(job, figures, shared + experts),
        "reserved": float(RESERVED_BYTES),
    }


def _for_compression(job: TrainingJob, figures: Figures, params: float) -> float:
    software, ranks = figures.find(job.software), group(job.shard_ranks, job.tp, job.network)
    return kept_bytes(
        job.compression, params, software.grad_bytes, node=ranks.per_domain, nodes=ranks.domains
    )


def check_fits(job: TrainingJob, kinds: dict[str, float]) -> None:
    """Raises UsageError with the number where the fullest GPU has too little memory."""
    total = sum(kinds.values())
    if total <= job.gpu.memory_bytes:
        return
    most = max(kinds, key=lambda kind: kinds[kind])
    states = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer"))
    raise UsageError(
        f"{job} needs {total / 2**30:.0f} GiB on its fullest GPU, {job.gpu.title} has "
        f"{job.gpu.memory_bytes / 2**30:.0f} GiB ({most} take {kinds[most] / 2**30:.0f}); "
        f"{_fix(job, states > total / 2)}"
    )


def _fix(job: TrainingJob, states: bool) -> str:
    if not states:
        if job.recompute != "full":
            return "recompute more (recompute full), or raise tp, cp or use a smaller micro_batch"
        return "raise tp or cp, or use a smaller micro_batch"
    if job.sharding != "zero3" and job.pp == 1 and job.dp * job.cp > 1:
        return "shard more (sharding zero3), or raise tp or pp"
    return "raise tp or pp, or use more GPUs"
