"""Memory: bytes by kind on the GPU that needs most, and the check that a job fits."""

from __future__ import annotations

from weft.errors import UsageError
from weft.gpu.collectives import group
from weft.plan.compression import kept_bytes
from weft.plan.config import TrainingJob
from weft.plan.figures import Figures, Software
from weft.plan.pipeline import Stage, in_flight, stages

RESERVED_BYTES = 3 << 30  # the CUDA context, NCCL's buffers and the allocator's slack
LOGIT_BYTES = {"fused": 6.0, "compiled": 12.0, "eager": 16.0}
"""Bytes per logit. Fused: the logit in 16 and in 32 bits. Compiled adds its log-softmax in 32 bits and its
gradient in 16 bits; eager adds the gradient in 32 bits as well."""
MARGIN = 0.92
"""Fraction of a GPU's memory that a recommendation may fill: one estimate in five is off by more."""
REFUSED = 1.25
"""Jobs above this fraction of memory are rejected: the estimates of some published runs are that high."""


def stage_params(job: TrainingJob, stage: Stage) -> tuple[float, float]:
    """Parameters on one rank: (those outside the experts, those of experts)."""
    m = job.model
    shared = stage.layers * m.attention_params + stage.dense_layers * m.mlp_params
    shared += stage.moe_layers * m.shared_params
    if stage.embedding:
        shared += (m.vocab + m.positions) * m.hidden
    if stage.head and not (m.tied and stage.embedding):
        shared += m.vocab * m.hidden
    experts = stage.moe_layers * m.experts * m.expert_params
    return shared / job.tp, experts / (job.ep * max(1, job.expert_tp))


def activation_bytes(job: TrainingJob, figures: Figures, *, moe: bool, recompute: str = "") -> float:
    """Bytes that one layer keeps for the backward pass of one micro-batch (after Korthikanti et al.).

    `recompute`: overrides the job's own; empty: no override.
    """
    m, software = job.model, figures.find(job.software)
    again = recompute or job.recompute
    tokens = job.micro_batch * job.seq_len / job.cp
    rows = tokens / job.tp if job.sequence_parallel else tokens
    if again == "full":
        return 2 * rows * m.hidden
    heads = 2.0 * tokens * m.heads * m.query_dim / job.tp
    keys = 2.0 * tokens * m.kv_heads * (m.query_dim + m.value_dim) / job.tp
    attention = 2 * heads + keys
    if moe:
        width = (m.expert_ffn * m.experts_per_token + m.shared_ffn) / job.tp
        routed = 2.0 * tokens * m.experts_per_token * m.hidden / job.tp
    else:
        width, routed = m.ffn / job.tp, 0.0
    inner = 2.0 * tokens * width * (3 if m.gated else 2)
    if again == "selective":
        if software.selective == "half":
            # Kept are the layer's input, the attention's output, and every other matmul's output: queries,
            # values, the first and the last of the MLP.
            return 2 * 2 * rows * m.hidden + 2 * heads + keys / 2 + 2.0 * tokens * width + routed
        if software.selective == "projections":
            return heads + keys + 2 * rows * m.hidden
        if software.selective == "cheap":
            # Norms, up-projections and the activation are recomputed; inputs of matmuls are kept in 8 bits.
            low = 2.0 * tokens * (m.mla.q_rank + m.mla.kv_rank + m.mla.rope_dim) if m.mla else keys + heads
            output = 2.0 * tokens * m.heads * m.value_dim / job.tp
            return 4 * rows * m.hidden + low + output + inner / 3 + routed / 2
    masks = 2.0 if software.attention == "unfused" else 0.0
    wide = (8.0 + masks) * rows * m.hidden
    total = wide + attention + inner + routed
    if software.attention == "unfused" and again == "none":
        total += 5.0 * m.heads / job.tp * tokens * job.seq_len
    return total


def memory_bytes(job: TrainingJob, figures: Figures) -> dict[str, float]:
    """Bytes by kind on the GPU of the stage that needs most."""
    return max(
        (_of_stage(job, figures, stage) for stage in stages(job)), key=lambda kinds: sum(kinds.values())
    )


def _of_stage(job: TrainingJob, figures: Figures, stage: Stage) -> dict[str, float]:
    shared, experts = stage_params(job, stage)
    replicas = job.shard_ranks
    # Gradients summed over micro-batches stay whole until the last one, unless each layer is scattered.
    scattered = job.sharding in ("zero2", "zero3") and job.micro_batches == 1

    def held(bytes_each: float, sharded: bool) -> float:
        if not sharded:
            return bytes_each * (shared + experts)
        return bytes_each * (shared / replicas + experts / min(replicas, job.expert_replicas))

    software = figures.find(job.software)
    layers = stage.dense_layers * activation_bytes(job, figures, moe=False)
    layers += stage.moe_layers * activation_bytes(job, figures, moe=True)
    logits = 0.0
    if stage.head:
        tokens = job.micro_batch * job.seq_len / job.cp
        logits = LOGIT_BYTES[software.kernels] * tokens * job.model.vocab / job.tp
    flight = in_flight(job) if stage.embedding or not stage.head else 1.0
    if software.offloads and job.recompute == "full":
        flight = 1 / max(1, stage.layers)
    # DualPipe keeps the parameters of two stages on each rank.
    copies = 2.0 if job.schedule == "dualpipe" else 1.0
    return {
        "parameters": copies * held(2, job.gathers_layers),
        "gradients": copies * held(software.grad_bytes, job.gathers_layers or scattered),
        "optimizer": held(12, job.sharding != "none"),
        "activations": layers * flight,
        "working": _sum_or_max(software, _working(job, figures, stage), logits),
        "compression": _for_compression(job, figures, shared + experts),
        "reserved": float(RESERVED_BYTES),
    }


def _sum_or_max(software: Software, layer: float, logits: float) -> float:
    """Logits are freed before layers run backward, but PyTorch's allocator keeps both blocks in its cache."""
    return layer + logits if software.native else max(layer, logits)


def _working(job: TrainingJob, figures: Figures, stage: Stage) -> float:
    """Bytes while one layer runs backward: recomputed activations, their gradients, gathered parameters."""
    moe, software = stage.moe_layers > 0, figures.find(job.software)
    kept = activation_bytes(job, figures, moe=moe)
    whole = activation_bytes(job, figures, moe=moe, recompute="none")
    if software.attention == "unfused" and software.gathers_per_layer > 1:
        # DeepSpeed runs a layer module by module: the scores are freed before the next module is gathered.
        tokens = job.micro_batch * job.seq_len / job.cp
        whole -= (1 - 1 / software.gathers_per_layer) * 5.0 * job.model.heads / job.tp * tokens * job.seq_len
    found = max(0.0, whole - kept)
    if software.native:
        found += whole / 2
        if job.sequence_parallel:
            # The inputs of both blocks, gathered, and their gradients.
            found += 2 * 2 * 2.0 * job.micro_batch * job.seq_len / job.cp * job.model.hidden
    if job.gathers_layers and job.shard_ranks > 1:
        shared, experts = stage_params(job, stage)
        found += 2 * 2 * (shared + experts) / max(1, stage.layers) / software.gathers_per_layer
    return found


def _for_compression(job: TrainingJob, figures: Figures, params: float) -> float:
    software, ranks = figures.find(job.software), group(job.shard_ranks, job.tp, job.network)
    return kept_bytes(
        job.compression, params, software.grad_bytes, node=ranks.per_domain, nodes=ranks.domains
    )


def check_fits(job: TrainingJob, kinds: dict[str, float], share: float = REFUSED) -> None:
    """Raise UsageError, with the sizes, if the GPU that needs most has far too little memory.

    Estimates are off by some percent, so a job slightly over its memory may run, and `tight` only warns about
    it. `share`: fraction of the memory that may be used; recommendations leave a margin.
    """
    total = sum(kinds.values())
    if total <= share * job.gpu.memory_bytes:
        return
    most = max(kinds, key=lambda kind: kinds[kind])
    states = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer"))
    raise UsageError(
        f"{job} needs {total / 2**30:.0f} GiB on its fullest GPU, {job.gpu.title} has "
        f"{job.gpu.memory_bytes / 2**30:.0f} GiB ({most}: {kinds[most] / 2**30:.0f} GiB); "
        f"{_fix(job, states > total / 2)}"
    )


def tight(job: TrainingJob, kinds: dict[str, float]) -> list[str]:
    """A warning if the estimate is near or above the GPU's memory; else empty."""
    total, limit = sum(kinds.values()), job.gpu.memory_bytes
    if total <= MARGIN * limit:
        return []
    return [
        f"memory is tight: {total / 2**30:.0f} of {limit / 2**30:.0f} GiB by an estimate that is off by more "
        f"than 10% for one run in six; {_fix(job, False)}"
    ]


def _fix(job: TrainingJob, states: bool) -> str:
    if not states:
        if job.recompute != "full":
            return "recompute more (recompute full), or raise tp, cp or use a smaller micro_batch"
        return "raise tp or cp, or use a smaller micro_batch"
    if job.sharding != "zero3" and job.pp == 1 and job.dp * job.cp > 1:
        return "shard more (sharding zero3), or raise tp or pp"
    return "raise tp or pp, or use more GPUs"
