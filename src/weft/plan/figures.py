"""Figures: what was fitted, or is known of a software generation. They come from `data/figures.json`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import InputError, UsageError
from weft.gpu.cost import NodeLinks
from weft.gpu.specs import GpuSpec

SHIPPED = Path(__file__).parent / "data" / "figures.json"


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training framework at a point in time."""

    name: str
    title: str
    speed: float
    """Rate of its matrix kernels against the GPU's `gemm` figure: 1 is the same."""
    attention: str
    """`flash`, or `unfused`: scores go through memory."""
    attention_efficiency: float
    """Share of the peak matrix rate that flash attention reaches forward, causal FLOPs."""
    elementwise: float
    """Memory traffic of norms, activations, dropouts and residuals against the fused least."""
    cast: float
    """Memory traffic of conversions to 8 bits against one pass over each product's input."""
    routing: float
    """Memory traffic of putting tokens in order for their experts against the least."""
    context_balanced: bool
    """Whether context parallelism gives each rank an equal share of the causal triangle."""
    network: float
    """Share of the network's bandwidth that its collectives reach, against the fitted `network_share`."""
    layer_us: float
    """Microseconds per layer, micro-batch and pass that no kernel accounts for."""
    grad_bytes: float
    """Bytes of a gradient element on the wire."""
    hides: frozenset[str]
    """Collectives that run beside compute: `tp` (fused with their GEMM), `tp_backward`, `cp`, `ep`, `pp`,
    `grads`, `params`."""
    fusion: float
    """Share that kernels fused with a tensor-parallel collective hide of what they could."""
    gathers_fp8: bool
    """Whether activations are converted to fp8 before a tensor-parallel gather: half the bytes, less work."""
    joins_maxima: bool
    """Whether fp8 joins the maxima of all ranks in every pass over a chunk (delayed scaling)."""
    selective: str
    """What selective recomputation repeats: `attention`; `half`: every other matrix product; `projections`:
    all but the projections to queries, keys and values, and what nothing needs again."""
    skew: float
    """Share of the step lost for each doubling of the number of nodes: skew and jitter."""
    skew_fp8: float
    """The same in fp8, where all ranks join their maxima in every micro-batch: nothing averages out."""


@dataclass(frozen=True, kw_only=True)
class Links(NodeLinks):
    """Collectives inside a node and between nodes: latency, and the share of the data sheet's bandwidth."""

    network_us: float
    """One step between domains, on top of the network's own latency."""
    network_share: float
    congestion: float
    """Share of the bandwidth between domains that is lost for each doubling of a group's span."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a prediction."""

    gemm: Mapping[str, Mapping[str, float]]
    """By GPU and precision: share of the peak that a large matrix product reaches in training."""
    gemm_k_half: float
    """Depth of a product at which an H100 reaches half of that in bf16."""
    gemm_tail: float
    """How much of a ragged last wave is lost: 0 nothing, 1 all of it."""
    power: float
    """How much slower matrix products get the more of the time they fill: a GPU at its power limit lowers its
    clock. Exponent of their share of a layer's time."""
    memory_share: float
    """Share of the data sheet's memory bandwidth."""
    links: Links
    software: Mapping[str, Software]

    def gemm_share(self, gpu: GpuSpec, precision: str) -> float:
        """Share of the peak; of a GPU that nobody measured, that of its nearest relative."""
        family = self.gemm[self.relative(gpu)]
        kind = "fp8" if precision == "fp8" else "bf16"
        return family.get(kind, family["bf16"])

    def relative(self, gpu: GpuSpec) -> str:
        """The GPU whose shares are taken: its own, or those of one of its generation that was measured."""
        if gpu.name in self.gemm:
            return gpu.name
        modern = (
            gpu.compute_capability >= (9, 0) if gpu.vendor == "nvidia" else bool(gpu.throughput.fp8_tflops)
        )
        return "h100" if modern else "a100-80gb"

    def but(self, **changes: Any) -> Figures:
        return replace(self, **changes)

    def with_software(self, name: str, **changes: Any) -> Figures:
        """These figures with others for one software."""
        return replace(self, software={**self.software, name: replace(self.software[name], **changes)})

    def find(self, name: str) -> Software:
        """The software of that name. Raises UsageError with the nearest valid name."""
        if name not in self.software:
            near = difflib.get_close_matches(name, list(self.software), n=1, cutoff=0.0)
            raise UsageError(
                f"no software named {name!r}; did you mean {near[0]!r}? ({', '.join(self.software)})"
            )
        return self.software[name]


def from_dict(document: Mapping[str, Any]) -> Figures:
    """Figures from their JSON document."""
    try:
        software = {
            name: Software(name=name, **{**entry, "hides": frozenset(entry["hides"])})
            for name, entry in document["software"].items()
        }
        plain = {k: document[k] for k in ("gemm", "gemm_k_half", "gemm_tail", "power", "memory_share")}
        return Figures(links=Links(**document["links"]), software=software, **plain)
    except (KeyError, TypeError) as error:
        raise InputError(f"the figures of the planner are incomplete: {error}") from None


@cache
def shipped() -> Figures:
    """The figures that come with weft."""
    return from_dict(json.loads(SHIPPED.read_text(encoding="utf-8")))
