"""Traffic: the collectives of a step, and the compute that each can overlap with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.gpu.collectives import Group, group
from weft.gpu.network import usual_network
from weft.plan.compression import Matrix, Traffic, apply_compression
from weft.plan.compute import LOW, Pass, Work
from weft.plan.config import TrainingJob
from weft.plan.figures import Software
from weft.plan.memory import stage_params
from weft.plan.pipeline import Stage

BUCKET_ELEMENTS = 40e6  # fewest gradient elements in a bucket, as in Megatron by default,
BUCKET_PER_RANK = 1e6  # and fewest per rank of the group, so that latency does not dominate
MAXIMA = 12  # scaled tensors of a layer: input, weight and gradient of four matmuls


@dataclass(frozen=True)
class Need:
    """A collective of a stage."""

    name: str
    """What the collective is for: `tp`, `cp`, `ep`, `pp`, `grads`, `params` or `amax`."""
    kind: str
    group: Group
    bytes: float
    count: float
    """Number of collectives per micro-batch or, if `each_step`, per step."""
    window: Work
    """Compute that one collective can overlap with."""
    floor: float = 0.0
    """Fraction of the collective that has nothing to overlap with."""
    hidden: bool = False
    """Whether the software overlaps it with compute."""
    each_step: bool = False
    kernels_s: float = 0.0
    """Seconds of compute that compression adds to each collective."""
    flow_bytes: float = 0.0
    """Bytes of all buckets, if this is one of several consecutive buckets; 0: it is a single collective."""


def hides(job: TrainingJob, software: Software, name: str) -> bool:
    """Whether the job or its software overlaps this kind of collective with compute."""
    if job.hide is None and job.schedule == "dualpipe" and name in ("ep", "pp"):
        return True  # DualPipe is designed to hide these
    return name in (job.hide if job.hide is not None else software.hides)


def needs(
    job: TrainingJob, software: Software, fusion: float, stage: Stage, dense: Pass, moe: Pass
) -> list[Need]:
    """All collectives of one stage, per micro-batch or per step."""
    found: list[Need] = []
    for count, layer, routed in ((stage.dense_layers, dense, False), (stage.moe_layers, moe, True)):
        if count:
            found += _tensor(job, software, fusion, layer, count, routed)
            found += _context(job, software, layer, count)
            found += _expert(job, software, layer, count) if routed else []
    found += _stages(job, software, dense * stage.dense_layers + moe * stage.moe_layers)
    found += _data(job, software, stage, dense, moe)
    if job.precision in LOW and software.joins_maxima:
        ranks = group(job.tp * job.cp * job.dp, 1, job.network)
        size = 4.0 * MAXIMA * stage.layers / job.interleave
        found.append(Need("amax", "all_reduce", ranks, size, 2 * job.interleave, Work()))
    return [need for need in found if need.group.ranks > 1 and need.bytes > 0 and need.count > 0]


def _tokens(job: TrainingJob) -> float:
    return job.micro_batch * job.seq_len / job.cp


def _tensor(
    job: TrainingJob, software: Software, fusion: float, layer: Pass, layers: int, routed: bool
) -> Iterator[Need]:
    """The tensor-parallel collectives of a layer: one pair for attention and one for the MLP."""
    ranks = group(job.tp, 1, job.network)
    size = 2.0 * _tokens(job) * job.model.hidden
    sites = [size] if job.model.parallel_block and not routed else [size, size]
    if routed:
        sites[1] = size * job.model.experts_per_token if job.expert_tp > 1 else 0.0
    again = 1 if job.recompute == "full" else 0
    # If every other matmul's output is kept ("half"), the input is gathered again for the recomputation.
    regather = 1 if job.recompute == "selective" and software.selective == "half" else again
    forward = layer.forward.gemm / len(sites)
    backward = layer.backward.gemm / len(sites)
    fused, behind = hides(job, software, "tp"), hides(job, software, "tp_backward")
    for bytes_ in sites:
        if job.sequence_parallel:
            # Fused kernels send the last of `tp` pieces with nothing left to compute. They are not used
            # across domains: Transformer Engine and symmetric memory need NVLink.
            fused = hides(job, software, "tp") and ranks.scope == "domain"
            reach = 1.0 if software.kernels == "fused" else fusion
            edge = 1 - reach * (1 - 1 / job.tp)
            eight = job.precision in LOW and software.gathers_fp8
            gathered = bytes_ / 2 if eight else bytes_
            # Megatron keeps only this rank's part of the input and gathers it again for the weight gradient.
            once_more = software.selective != "half"
            after, before = Work(gemm=forward / 2), Work(gemm=backward / (3 if once_more else 2))
            for kind, size, times in (
                ("all_gather", gathered, 1 + regather),
                ("reduce_scatter", bytes_, 1 + again),
            ):
                yield Need("tp", kind, ranks, size, layers * times, after, edge, fused)
                yield Need("tp", kind, ranks, size, layers, before, edge, fused or behind)
            if once_more:
                yield Need("tp", "all_gather", ranks, gathered, layers, before, 0.0, fused or behind)
        else:
            yield Need(
                "tp", "all_reduce", ranks, bytes_, layers * (1 + again), Work(gemm=forward), 1.0, fused
            )
            window = Work(gemm=backward / 2)
            yield Need("tp", "all_reduce", ranks, bytes_, layers, window, 0.0, fused or behind)


def _context(job: TrainingJob, software: Software, layer: Pass, layers: int) -> Iterator[Need]:
    """Keys and values travel around the ring; each hop overlaps with attention over the current part."""
    m = job.model
    pair = Group(2, 1, 2) if job.tp * job.cp > job.network.domain else Group(2, 2, 2)
    width = (m.mla.kv_rank + m.mla.rope_dim) if m.mla else m.kv_heads * (m.query_dim + m.value_dim) / job.tp
    size = 2.0 * _tokens(job) * width
    hidden = hides(job, software, "cp")
    steps = layers * (job.cp - 1)
    again = 2 if job.recompute == "full" else 1
    yield Need(
        "cp", "p2p", pair, size, steps * again, Work(attention=layer.forward.attention / job.cp), 0.0, hidden
    )
    window = Work(attention=layer.backward.attention / job.cp)
    yield Need("cp", "p2p", pair, 2 * size, steps, window, 0.0, hidden)


def _expert(job: TrainingJob, software: Software, layer: Pass, layers: int) -> Iterator[Need]:
    """All-to-alls that send tokens to their experts and back."""
    stride = job.tp if job.expert_tp > 1 else 1
    ranks = group(job.ep, stride, job.network)
    m = job.model
    copies = token_copies(m.experts_per_token, ranks, software.dispatch.removesuffix("-fp8"), m.most_nodes)
    size = 2.0 * _tokens(job) * copies * m.hidden / job.tp
    low = job.precision in LOW and software.dispatch.endswith("-fp8")
    again = 2 if job.recompute == "full" else 1
    hidden = hides(job, software, "ep")
    # In each pass, one of the two all-to-alls is in 8 bits if the software does so: forward the dispatch,
    # backward the gradient of the combine.
    for work, times in ((layer.forward, again), (layer.backward, 1)):
        window = Work(attention=work.attention / 2, gemm=work.gemm / 2)
        for bytes_ in (size / 2 if low else size, size):
            yield Need("ep", "all_to_all", ranks, bytes_, layers * times, window, 0.0, hidden)


def _stages(job: TrainingJob, software: Software, stage: Pass) -> Iterator[Need]:
    """Activations to the next stage, gradients to the previous one."""
    if job.pp == 1:
        return
    stride = job.tp * job.cp * job.dp
    pair = Group(2, 2, 2) if stride * 2 <= job.network.domain else Group(2, 1, 2 * stride)
    size = 2.0 * _tokens(job) * job.model.hidden / job.tp
    hidden = hides(job, software, "pp")
    for work in (stage.forward, stage.backward):
        yield Need("pp", "p2p", pair, size, job.interleave, work * (1 / job.interleave), 0.0, hidden)


def _data(job: TrainingJob, software: Software, stage: Stage, dense: Pass, moe: Pass) -> Iterator[Need]:
    shared, experts = stage_params(job, stage)
    stage_pass = dense * stage.dense_layers + moe * stage.moe_layers
    replicas = job.dp * job.cp
    parts = [(shared, replicas, job.tp)]
    if experts:
        parts.append((experts, job.expert_replicas, job.tp * job.ep))
    sent = sum(params for params, ranks, _ in parts if ranks > 1)
    for params, ranks, stride in parts:
        # Expert and other gradients use the same rails, so they share the compute that hides them.
        window = stage_pass * (params / sent) if ranks > 1 else stage_pass
        if job.gathers_layers:
            yield from _fully_sharded(job, software, stage, params, ranks, stride, window)
        else:
            shapes = _matrices(job, stage, routed=params is not shared)
            yield from _replicated(job, software, params, ranks, stride, window, shapes)
    if job.pp > 1 and job.model.tied and (stage.embedding or stage.head):
        pair = Group(2, 1, job.gpus)
        size = job.model.vocab * job.model.hidden / job.tp * software.grad_bytes
        yield Need("grads", "all_reduce", pair, size, 1, Work(), 1.0, False, each_step=True)


def _replicated(
    job: TrainingJob,
    software: Software,
    params: float,
    ranks: int,
    stride: int,
    stage: Pass,
    matrices: tuple[Matrix, ...],
) -> Iterator[Need]:
    """Reduce gradients once per step; if the optimizer is sharded, gather the parameters back."""
    shards = min(ranks, job.shard_ranks)
    ranks_of = group(shards if job.sharding != "none" else ranks, stride, job.network)
    # With interleaving, the gradients of all chunks but the last overlap with the remaining micro-batches.
    chunks = job.interleave
    times = 1 + job.pp * (chunks - 1) / chunks if chunks > 1 else 1.0
    grads, gathered = params * software.grad_bytes, params * 2.0
    plain = Need(
        "grads",
        "reduce_scatter" if job.sharding != "none" else "all_reduce",
        ranks_of,
        grads,
        1,
        stage.backward * times,
        hidden=hides(job, software, "grads"),
        each_step=True,
    )
    yield from _compressed(job, software, plain, "gradient", params, matrices)
    if job.sharding == "none":
        return
    if ranks > shards:
        across = group(ranks // shards, stride * shards, job.network)
        window = stage.backward * times
        hidden = hides(job, software, "grads")
        need = Need("grads", "all_reduce", across, grads / shards, 1, window, hidden=hidden, each_step=True)
        yield _bucketed(need, software)
    hidden = hides(job, software, "params")
    window = stage.forward * times
    need = Need("params", "all_gather", ranks_of, gathered, 1, window, hidden=hidden, each_step=True)
    yield _bucketed(need, software)


def _compressed(
    job: TrainingJob,
    software: Software,
    plain: Need,
    purpose: str,
    elements: float,
    matrices: tuple[Matrix, ...] = (),
) -> Iterator[Need]:
    """A collective of gradients or parameters, under the job's compression."""
    g = plain.group
    width = plain.bytes / elements if elements else 0.0
    payload = Traffic(plain.kind, purpose, elements, width, g.ranks, g.per_domain, matrices)
    found = apply_compression(job.compression, payload, job.gpu)
    # The pieces share the window in proportion to their time on the usual network, so that a faster network
    # never hurts.
    fabric = job.gpu.fabric_bytes_per_s
    rail = usual_network(job.gpu.name).rail_bytes_per_s
    shares = [
        piece.bytes / (fabric if piece.ranks_per_node == piece.ranks else rail * piece.ranks_per_node)
        for piece in found.pieces
    ]
    for at, piece in enumerate(found.pieces):
        near = piece.ranks_per_node == piece.ranks
        ranks = Group(piece.ranks, piece.ranks_per_node, piece.ranks if near else g.span)
        sent = replace(
            plain,
            kind=piece.kind,
            group=g if piece.ranks == g.ranks else ranks,
            bytes=piece.bytes,
            window=plain.window * (shares[at] / sum(shares) if sum(shares) else 1.0),
            kernels_s=found.compute_s if at == 0 else 0.0,
        )
        yield _bucketed(sent, software)


def _bucketed(need: Need, software: Software) -> Need:
    """Split a collective that overlaps with compute into buckets: the last one is exposed, each has latency.

    If only the job hides it, not the software, the latency is that of one collective, so that hiding it is
    never slower than not hiding it.
    """
    if not need.each_step or not (need.hidden or need.name in software.hides):
        return need
    bucket = max(BUCKET_ELEMENTS, BUCKET_PER_RANK * need.group.ranks) * 2.0
    buckets = max(1, round(need.bytes / bucket))
    if need.name not in software.hides:
        return replace(need, floor=1 / buckets)
    return replace(
        need,
        bytes=need.bytes / buckets,
        count=need.count * buckets,
        window=need.window * (1 / buckets),
        floor=1 / buckets,
        kernels_s=need.kernels_s / buckets,
        flow_bytes=need.bytes,
    )


def _matrices(job: TrainingJob, stage: Stage, *, routed: bool) -> tuple[Matrix, ...]:
    """Shapes of one rank's gradient matrices."""
    m, found = job.model, []
    if not routed:
        found += [(g, stage.layers) for g in m.attention_gemms(1, job.tp)]
        found += [(g, stage.dense_layers) for g in m.mlp_gemms(1, job.tp)]
    elif stage.moe_layers:
        moe = m.moe_gemms(1, job.tp, job.ep, job.expert_tp)
        found += [(g, stage.moe_layers) for g in moe]
    return tuple(Matrix(g.n, g.k, g.count * layers) for g, layers in found if layers)


def _fully_sharded(
    job: TrainingJob, software: Software, stage: Stage, params: float, ranks: int, stride: int, work: Pass
) -> Iterator[Need]:
    """Gather each layer's parameters before its forward and backward passes; scatter its gradients after."""
    layers, pieces = stage.layers, software.gathers_per_layer
    shards = min(ranks, job.shard_ranks)
    ranks_of = group(shards, stride, job.network)
    each = params / layers / pieces
    edge = 1 / layers
    share = edge / pieces
    forward, backward = work.forward * share, (work.backward + work.recompute) * share
    gathers, sums = hides(job, software, "params"), hides(job, software, "grads")
    gather = Need("params", "all_gather", ranks_of, each * 2.0, layers * pieces, forward, edge, gathers)
    yield from _compressed(job, software, gather, "weight", each)
    # In the backward pass, the gathers of one layer and the reduction of another share the window.
    third = software.regathers and job.recompute == "full"
    window = backward * (1 / 3 if third else 1 / 2)
    for _ in range(2 if third else 1):
        again = replace(gather, window=window)
        yield from _compressed(job, software, again, "weight-backward", each)
    size = each * software.grad_bytes
    reduce = Need("grads", "reduce_scatter", ranks_of, size, layers * pieces, window, edge, sums)
    yield from _compressed(job, software, reduce, "gradient", each)
    if ranks > shards:
        across = group(ranks // shards, stride * shards, job.network)
        size = params * software.grad_bytes / shards
        yield Need("grads", "all_reduce", across, size, 1, work.backward, edge, sums, each_step=True)


def token_copies(top_k: int, g: Group, dispatch: str, most_nodes: int = 0) -> float:
    """How many copies of a token are sent to its `top_k` experts, which are spread evenly over a group.

    `copies`: one per expert. `node`: one per distinct node if the group spans nodes, one per distinct rank if
    not (the expected number). `most_nodes`: the router's own limit on nodes; 0: none.
    """
    if dispatch == "copies":
        return float(top_k)
    places = g.domains if g.domains > 1 else g.ranks
    distinct = places * (1.0 - (1.0 - 1.0 / places) ** top_k)
    return min(distinct, float(most_nodes)) if most_nodes and g.domains > 1 else distinct
