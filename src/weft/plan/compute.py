"""Compute: seconds of a layer's matmuls, attention and elementwise kernels on one GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from weft.gpu.cost import LARGE_TILE
from weft.gpu.specs import GpuSpec
from weft.plan.config import TrainingJob
from weft.plan.figures import (
    CAST_PASSES,
    EXPERT_LAUNCHES,
    LAYER_LAUNCHES,
    ROUTER_LAUNCHES,
    Figures,
    Software,
    half_rate,
)
from weft.plan.models import Gemm

TILE_M, TILE_N = LARGE_TILE
REFERENCE_RATE = 989.4e12 / 132  # FLOP/s of one SM of an H100 in bf16, for which `GEMM_K_HALF` holds
GEMM_K_HALF = 215.0  # depth K at which an H100 reaches half of its rate; see the closed form of weft.gpu.cost
GEMM_TAIL = 0.5  # exponent of the loss to a ragged last wave, 0 to 1: assumed, other kernels fill the gap
USUAL_SHARE = 0.75  # fraction of a layer's time in matmuls at which the fitted shares of the peak hold
BACKWARD_ATTENTION = 2.5  # flash attention recomputes the scores: five matmuls instead of two
LOW = ("fp8", "mxfp8", "nvfp4")
_WIDTH = {"fp8": 1.0, "mxfp8": 1.03125, "nvfp4": 0.5625}  # bytes per element, with its share of the scales


@dataclass(frozen=True)
class Work:
    """Seconds of one pass, by kind of work."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return self.gemm + self.attention + self.elementwise + self.overhead

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(self)))


@dataclass(frozen=True)
class Pass:
    """Forward, backward, and the recomputation before backward."""

    forward: Work = Work()
    backward: Work = Work()
    recompute: Work = Work()

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.recompute.total

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.forward + other.forward, self.backward + other.backward, self.recompute + other.recompute
        )

    def __mul__(self, times: float) -> Pass:
        return Pass(self.forward * times, self.backward * times, self.recompute * times)


def gemm_s(gemm: Gemm, gpu: GpuSpec, precision: str, figures: Figures, speed: float = 1.0) -> float:
    """Seconds of a matmul: waves of tiles at the rate that deep matmuls reach, combined with memory traffic.

    Filling and draining a tile takes the same time whatever the rate, so a faster GPU needs deeper matmuls.
    """
    peak = peak_rate(gpu, precision)
    tiles = math.ceil(gemm.m / TILE_M) * math.ceil(gemm.n / TILE_N) * gemm.count
    waves = tiles / gpu.sms
    tail = (math.ceil(waves) / waves) ** GEMM_TAIL if waves < 64 else 1.0
    half = GEMM_K_HALF * peak / gpu.sms / REFERENCE_RATE
    share = figures.gemm_share(gpu, precision) * speed * gemm.k / (gemm.k + half)
    padded = 2.0 * tiles * TILE_M * TILE_N * gemm.k if gemm.m < TILE_M or gemm.n < TILE_N else gemm.flops
    busy = padded / (peak * share) * tail
    size = _WIDTH.get(precision, 2.0)
    moved = (size * (gemm.m * gemm.k + gemm.n * gemm.k) + 2 * gemm.m * gemm.n) * gemm.count
    return math.hypot(busy, moved / _bandwidth(gpu, figures))


def peak_rate(gpu: GpuSpec, precision: str) -> float:
    """Peak FLOP/s of matmuls in a training precision."""
    if precision in ("bf16", "fp16"):
        return half_rate(gpu)
    return gpu.flops({"mxfp8": "fp8", "nvfp4": "fp4"}.get(precision, precision))


def gemm_passes(
    gemms: list[Gemm], job: TrainingJob, figures: Figures, precision: str = ""
) -> tuple[float, float]:
    """Forward and backward seconds of these matmuls; backward includes input and weight gradients."""
    software, kind = figures.find(job.software), precision or job.precision
    forward = backward = 0.0
    for g in gemms:
        forward += gemm_s(g, job.gpu, kind, figures, software.speed)
        for m, n, k in ((g.m, g.k, g.n), (g.n, g.k, g.m)):
            backward += gemm_s(Gemm(g.name, m, n, k, g.count), job.gpu, kind, figures, software.speed)
    return forward, backward


def layer(job: TrainingJob, figures: Figures, *, moe: bool = False) -> Pass:
    """One layer and one micro-batch on one rank, without communication."""
    software, m = figures.find(job.software), job.model
    tokens = job.micro_batch * job.seq_len // job.cp
    gemms = m.attention_gemms(tokens, job.tp)
    gemms += m.moe_gemms(tokens, job.tp, job.ep, job.expert_tp) if moe else m.mlp_gemms(tokens, job.tp)
    forward, backward = gemm_passes(gemms, job, figures)
    attention_f, attention_b = _attention(job, figures, software, tokens)
    rest = _elementwise_bytes(job, figures, software, tokens, moe=moe) / _bandwidth(job.gpu, figures)
    once = software.layer_us * 1e-6
    if moe:
        launches = ROUTER_LAUNCHES + EXPERT_LAUNCHES * max(1, m.experts // job.ep)
        once *= 1 + launches / LAYER_LAUNCHES
    work_f = Work(forward, attention_f, rest, once)
    work_b = Work(backward, attention_b, 2 * rest, 2 * once)
    share = (forward + backward) / (work_f.total + work_b.total)
    slower = (share / USUAL_SHARE) ** figures.constants.power
    work_f, work_b = replace(work_f, gemm=forward * slower), replace(work_b, gemm=backward * slower)
    return Pass(work_f, work_b, _recomputed(job, software, work_f, gemms))


def _recomputed(job: TrainingJob, software: Software, forward: Work, gemms: list[Gemm]) -> Work:
    if job.recompute == "full":
        return forward
    if job.recompute == "selective":
        if software.selective == "half":
            return Work(0.5 * forward.gemm, 0.0, forward.elementwise, 0.5 * forward.overhead)
        if software.selective == "cheap":
            up = sum(g.flops for g in gemms if g.name in ("q_up", "kv_up")) / sum(g.flops for g in gemms)
            return Work(up * forward.gemm, 0.0, forward.elementwise / 2, forward.overhead / 4)
        if software.selective == "projections":
            kept = sum(g.flops for g in gemms if g.name in ("qkv", "down", "expert_down"))
            share = 1 - kept / sum(g.flops for g in gemms)
            return Work(share * forward.gemm, forward.attention, forward.elementwise, forward.overhead)
        return Work(0.0, forward.attention, 0.0, 0.0)
    return Work()


def _bandwidth(gpu: GpuSpec, figures: Figures) -> float:
    return gpu.memory_bytes_per_s * figures.memory_share


def _attention(job: TrainingJob, figures: Figures, software: Software, tokens: int) -> tuple[float, float]:
    """Forward and backward seconds of scores, softmax and values on one rank."""
    m, peak = job.model, half_rate(job.gpu) * software.attention_share(job.gpu, job.model.query_dim)
    if software.attention != "unfused":
        seconds = m.attention_flops(job.seq_len) * tokens / job.tp / peak
        if not software.context_balanced:
            seconds *= 2 * job.cp / (job.cp + 1)  # the rank with the last part of the sequence computes most
        return seconds, BACKWARD_ATTENTION * seconds
    flops = m.attention_flops(job.seq_len, causal=False) * tokens / job.tp
    matmuls = flops / (peak * figures.gemm_share(job.gpu, "bf16"))
    # Scores are written, masked and normalised, dropped out, and read again, 2 bytes per element.
    scores = float(m.heads // job.tp) * tokens * job.seq_len
    passes = 8.0
    moved = 2.0 * passes * scores / _bandwidth(job.gpu, figures)
    return matmuls + moved, 2 * matmuls + 1.25 * moved


def _elementwise_bytes(
    job: TrainingJob, figures: Figures, software: Software, tokens: int, *, moe: bool
) -> float:
    """Forward memory traffic of a layer outside matmuls: the fewest passes times the software's factor."""
    m = job.model
    rows = tokens / job.tp if job.sequence_parallel else float(tokens)
    # One norm (a read, a write) and one residual addition with dropout (two reads, a write), 2 bytes per
    # element. A layer has two of each; the fitted factor `elementwise` makes up for the others.
    wide = 2 * (2 + 3) * rows * m.hidden
    width = m.expert_ffn * m.experts_per_token / job.tp if moe else m.ffn / job.tp
    inner = 2 * (3 if m.gated else 2) * tokens * (width + (m.shared_ffn / job.tp if moe else 0))
    rope = 2 * 2 * tokens * (m.heads + 2 * m.kv_heads) * m.head_dim / job.tp
    # Tokens are sorted by expert and back: a copy each way, which reads and writes 2 bytes per element.
    routed = 4 * 2 * tokens * m.experts_per_token * m.hidden * job.expert_tp / job.tp if moe else 0.0
    # Converting each matmul's input to 8 bits reads 2 bytes per element and writes 1, and 1 more transposed.
    gathered = rows if software.gathers_fp8 else tokens
    visits = tokens * m.experts_per_token * job.expert_tp / job.tp if moe else gathered
    inputs = (gathered + visits) * m.hidden
    cast = 4 * (inputs + tokens * (width + m.heads * m.value_dim / job.tp))
    c = figures.constants
    low = c.cast * CAST_PASSES[software.scaling] * cast if job.precision in LOW else 0.0
    return software.elementwise * (wide + inner + rope) + c.routing * routed + low


def head(job: TrainingJob, figures: Figures) -> Pass:
    """Output matmul and loss of one micro-batch, in 16 bits."""
    software, m = figures.find(job.software), job.model
    tokens = job.micro_batch * job.seq_len // job.cp
    forward, backward = gemm_passes([m.output_gemm(tokens, job.tp)], job, figures, "bf16")
    # Logits in 16 bits, loss in 32: written once, then read for the maximum, the sum and the gradient.
    loss = 14.0 * tokens * m.vocab / job.tp / _bandwidth(job.gpu, figures)
    once = software.layer_us * 1e-6
    return Pass(Work(forward, 0.0, loss / 2, once), Work(backward, 0.0, loss / 2, once))


def optimizer_s(params: float, job: TrainingJob, figures: Figures) -> float:
    """Seconds of Adam over `params` parameters: 16-bit gradients and parameters, three 32-bit states."""
    return params * (4 * 3 * 2 + 4 + 2) / _bandwidth(job.gpu, figures)
