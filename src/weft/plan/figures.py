"""Figures: the fitted constants and the documented facts of each training framework (`data/figures.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from weft.checks import unknown_name
from weft.errors import InputError
from weft.gpu.network import LINKS, Links
from weft.gpu.specs import GpuSpec

FIGURES_FILE = Path(__file__).parent / "data" / "figures.json"
PUBLISHED_ATTENTION = {
    # Dao, arXiv:2307.08691 (A100) and Shah et al., arXiv:2407.08608 (H100): causal, head dimension 128, 8k.
    ("flash2", "ampere"): 0.60,
    ("flash2", "hopper"): 0.37,
    ("flash3", "ampere"): 0.60,
    ("flash3", "hopper"): 0.58,
    # The two matmuls of attention in cuBLAS; softmax is counted separately as memory traffic.
    ("unfused", "ampere"): 0.50,
    ("unfused", "hopper"): 0.50,
}
"""Fraction of the 16-bit peak that an attention kernel reaches forward, by kernel and GPU generation."""
_MEMORY_SHARE = 0.85
"""Fraction of the data sheet's memory bandwidth that large kernels reach: assumed, not fitted."""
POWER_LIMIT = {"h100-96gb": 500 / 700}
"""Power limit as a fraction of the data sheet's, where a publication states it (torchtitan: 500 W)."""
LAYER_LAUNCHES = 15
"""Kernels of a dense layer's forward pass: norms, matmuls, rotation, attention, activation, residuals."""
ROUTER_LAUNCHES, EXPERT_LAUNCHES = 30, 4
"""Kernels that an MoE layer adds: for router, counts and reordering, and for each expert on the rank."""
CAST_PASSES = {"delayed": 1.0, "tensorwise": 2.0, "rowwise": 4.0, "blockwise": 2.0}
"""Passes over a matmul's input to convert it to 8 or 4 bits, by method: known scale; one scale per tensor,
after a search for the maximum; a scale per row, in both orientations; a scale per block."""


BETWEEN_NODES = ("ring_us", "network_us", "network_share", "congestion")
"""Constants shared with node profiles; their values come from `weft.gpu.network.LINKS`."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The free constants of the model, fitted to published runs. Each has a physical meaning."""

    gemm_a100: float
    """Fraction of the 16-bit peak that large matmuls reach in training on Ampere (and Volta, CDNA 2)."""
    gemm_h100: float
    """The same on Hopper and later."""
    gemm_fp8: float
    """The same in 8 bits and below."""
    power: float
    """Exponent of the fraction of a layer's time in matmuls: the larger the fraction, the lower the clock."""
    power_limit: float
    """Exponent of a lowered power limit in the rate of matmuls: between 1/3 (f V^2 at the limit) and 1."""
    native: float
    """Rate of PyTorch's own matmul path, relative to Transformer Engine and Megatron."""
    attention: float
    """Rate of attention in training, relative to the published rate of its kernel."""
    elementwise: float
    """Memory traffic of norms, activations and residuals, relative to the minimum with perfect fusion."""
    eager: float
    """Factor on `elementwise` without a compiler or fused kernels."""
    cast: float
    """Memory traffic of conversions to 8 bits, relative to the passes of `CAST_PASSES`."""
    routing: float
    """Memory traffic of sorting tokens by expert, relative to one copy each way."""
    gap_us: float
    """Idle time per kernel of a layer, in µs: the gap between launches."""
    fusion: float
    """Fraction of the hideable part of a tensor-parallel collective that kernels fused with it hide."""
    skew: float
    """Fraction of the step lost for each doubling of the number of nodes: stragglers and jitter."""
    ring_us: float
    """One hop inside a domain, in a ring that spans domains: NCCL's protocol for the network is slower."""
    network_us: float
    """One hop between domains, on top of the network's own latency."""
    network_share: float
    """Fraction of the rail bandwidth between domains that large collectives reach."""
    congestion: float
    """Fraction of the bandwidth between domains that is lost for each doubling of a group's span."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training framework at a point in time: documented facts, and the constants that apply to it."""

    name: str
    title: str
    kernels: str
    """`fused` (Transformer Engine, Megatron), `compiled` (torch.compile, XLA) or `eager`."""
    native: bool
    """Whether matmuls take PyTorch's own path."""
    attention: str
    """`flash2`, `flash3` (also for cuDNN), or `unfused`, which writes the scores to memory."""
    selective: str
    """What selective recomputation repeats: `attention`; `half`: every other matmul; `projections`: all but
    the projections to queries, keys and values and the matmuls whose output the backward pass does not need;
    `cheap`: norms, up-projections and activations."""
    grad_bytes: float
    """Bytes of a gradient element on the wire."""
    hides: frozenset[str]
    """Collectives that overlap with compute: `tp` (fused with their GEMM), `tp_backward`, `cp`, `ep`, `pp`,
    `grads`, `params`."""
    context_balanced: bool = True
    """Whether context parallelism gives each rank an equal share of the causal triangle."""
    gathers_fp8: bool = False
    """Whether activations are converted to fp8 before a tensor-parallel gather: half the bytes, less work."""
    joins_maxima: bool = False
    """Whether fp8 all-reduces the maxima over the ranks in every pass over a chunk (delayed scaling)."""
    scaling: str = "delayed"
    """How 8-bit scales are found: a key of `CAST_PASSES`."""
    dispatch: str = "copies"
    """How tokens travel to experts: `copies` (one copy per expert), `node` (one per node), `node-fp8`."""
    gathers_per_layer: int = 1
    """Number of collectives that gather the fully sharded parameters of a layer."""
    regathers: bool = False
    """Whether full recomputation gathers fully sharded parameters a third time."""
    offloads: bool = False
    """Whether the inputs of recomputed layers are offloaded to the host."""
    speed: float = 1.0
    """Rate of matmuls, relative to the GPU's `gemm` constant. The constants set this and the next three."""
    attention_efficiency: float = 1.0
    """Rate of attention, relative to the published rate of its kernel."""
    elementwise: float = 1.0
    """Memory traffic of norms, activations, dropouts and residuals, relative to perfect fusion."""
    layer_us: float = 0.0
    """Overhead that no kernel accounts for, in µs per layer, micro-batch and forward pass."""

    def attention_share(self, gpu: GpuSpec, head_dim: int = 128) -> float:
        """Fraction of the 16-bit peak that attention reaches forward on a GPU.

        On Hopper, narrow heads leave the tensor cores waiting for softmax: the published rate at a width of
        64 is two thirds of that at 128 (arXiv:2407.08608, figure 5).
        """
        generation = "hopper" if modern(gpu) else "ampere"
        share = PUBLISHED_ATTENTION[self.attention, generation] * self.attention_efficiency
        if generation == "hopper" and self.attention != "unfused" and head_dim < 128:
            share *= 2 * head_dim / (head_dim + 128)
        return min(1.0, share)


def modern(gpu: GpuSpec) -> bool:
    """Whether a GPU is of Hopper's generation or later (AMD: CDNA 3)."""
    return gpu.compute_capability >= (9, 0) if gpu.vendor == "nvidia" else bool(gpu.throughput.fp8_tflops)


def half_rate(gpu: GpuSpec) -> float:
    """Peak FLOP/s of 16-bit matmuls: bf16, or fp16 on GPUs without bf16."""
    return gpu.flops("bf16" if gpu.throughput.bf16_tflops else "fp16")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a prediction."""

    constants: Constants
    software: Mapping[str, Software]

    @cached_property
    def links(self) -> Links:
        known = {**asdict(LINKS), **asdict(self.constants)}
        return Links(**{field.name: known[field.name] for field in fields(Links)})

    @property
    def memory_share(self) -> float:
        return _MEMORY_SHARE

    def gemm_share(self, gpu: GpuSpec, precision: str) -> float:
        """Fraction of the peak that large matmuls reach; for an unmeasured GPU, that of a related one."""
        c = self.constants
        share = c.gemm_h100 if modern(gpu) else c.gemm_a100
        if precision in ("fp8", "mxfp8", "nvfp4"):
            share = c.gemm_fp8
        return float(share * POWER_LIMIT.get(gpu.name, 1.0) ** c.power_limit)

    def relative(self, gpu: GpuSpec) -> str:
        """The GPU whose fractions of the peak apply to this one."""
        return "h100" if modern(gpu) else "a100-80gb"

    def but(self, **changes: float) -> Figures:
        """These figures with other constants; the software's figures follow from them."""
        return compose(replace(self.constants, **changes), self.software.values())

    def with_software(self, name: str, **changes: Any) -> Figures:
        """These figures with changes to one software."""
        return replace(self, software={**self.software, name: replace(self.software[name], **changes)})

    def find(self, name: str) -> Software:
        """The software of that name. Raises UsageError with the nearest valid name."""
        if name not in self.software:
            raise unknown_name("software", name, self.software)
        return self.software[name]


def compose(constants: Constants, software: Any) -> Figures:
    """Figures from constants: each software gets the constants that its facts call for."""
    found = {}
    for one in software:
        eager = constants.eager if one.kernels == "eager" else 1.0
        found[one.name] = replace(
            one,
            speed=constants.native if one.native else 1.0,
            attention_efficiency=constants.attention,
            elementwise=constants.elementwise * eager,
            layer_us=LAYER_LAUNCHES * constants.gap_us,
        )
    return Figures(constants=constants, software=found)


def from_dict(document: Mapping[str, Any]) -> Figures:
    """Figures from their JSON document."""
    try:
        software = [
            Software(name=name, **{**entry, "hides": frozenset(entry["hides"])})
            for name, entry in document["software"].items()
        ]
        shared = {name: getattr(LINKS, name) for name in BETWEEN_NODES}
        return compose(Constants(**{**shared, **document["constants"]}), software)
    except (KeyError, TypeError) as error:
        raise InputError(f"the figures of the planner are incomplete: {error}") from None


@cache
def shipped() -> Figures:
    """The figures that come with weft."""
    return from_dict(json.loads(FIGURES_FILE.read_text(encoding="utf-8")))
