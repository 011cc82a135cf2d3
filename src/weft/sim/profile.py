"""Profile: the simulator's figures for a GPU beyond its data sheet, each with its source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import InputError, UsageError
from weft.files import write_whole
from weft.gpu.occupancy import blocks_per_sm
from weft.gpu.specs import GpuSpec, spec
from weft.sim.core import NeverFitsError, SimMachine
from weft.sim.launches import Footprint

PROFILE_VERSION = 1
"""Format of profile files."""
FOLDER = Path(__file__).parent / "profiles"
"""The profiles that ship with weft."""
PCIE_SHARE = 0.85
"""Fraction of a PCIe link's rate that peer copies reach (assumed; packet overhead takes the remainder)."""
PAPER_NODE = "-paper"
"""Name suffix of the nodes of arXiv:2606.09200, such as `a100-paper`."""
PAPER_RANKS = {"a40": 4, "a100": 4, "h100": 4, "mi250x": 8}
"""The GPUs of that paper, and the number of GPUs in each node."""
SHARED_UPLINK = 0.5
"""Fraction of a PCIe link's rate that each of two GPUs behind one uplink gets."""
PAPER_CTAS = 8
"""CTAs of a collective, on all nodes of the paper (assumed)."""


@dataclass(frozen=True, kw_only=True)
class SimFigures:
    """The figures of the simulator."""

    latency_ns: float
    """Latency of a load from the shared cache on an idle memory system."""
    memory_latency_ns: float
    """Additional latency if the data is not in the shared cache."""
    intake_gb_s: float
    """Bandwidth into one SM."""
    cache_tb_s: float
    """Bandwidth of the shared cache (L2) to all SMs."""
    memory_tb_s: float
    """Bandwidth of device memory."""
    matrix_efficiency: float
    """Fraction of the peak matrix rate that an SM full of Triton GEMM blocks reaches."""
    vector_efficiency: float
    """Fraction of the peak fp32 rate that an SM full of blocks of a textbook GEMM reaches."""
    tile_loads: float = 2.0
    """Dependent loads of a textbook GEMM in each step along K."""
    library_efficiency: float
    """Fraction of the peak matrix rate that the vendor's GEMM and convolution reach in full waves."""
    attention_efficiency: float
    """Fraction of the peak matrix rate that the vendor's causal attention reaches."""
    rows_bytes: float
    """Bytes that a block of 128 threads of a LayerNorm, softmax or GELU keeps in flight."""
    rows_traffic: float
    """Memory traffic per byte that a LayerNorm or softmax has to move."""
    elementwise_traffic: float
    """Memory traffic per byte that a GELU has to move."""
    block_start_ns: float
    """Time to start and end an empty block that runs alone."""
    stream_gap_us: float
    """Gap between the end of a kernel and the start of the next on its stream."""
    event_gap_us: float
    """Gap between the end of a kernel and the start of one that waits for it through an event."""
    compute_queues: float
    """Compute streams that the hardware runs concurrently."""
    in_order: float = 0.0
    """1 if every launch fills the SMs in turn, starting at the first, regardless of their load."""
    persistent: float
    """1 if the vendor's matrix kernels are persistent, one block per SM."""

    comm_threads: float
    comm_registers: float
    comm_shared_kib: float
    """Footprint of a collective's block: threads, registers per thread, KiB of shared memory as launched."""
    comm_latency_ns: float
    """Memory latency up to which a collective's block keeps its rate; determines its bytes in flight."""
    comm_traffic: float
    """Bytes through the cache per byte that a rank sends."""
    comm_miss: float
    """Fraction of the cache traffic that goes to device memory."""
    comm_ctas: float
    """CTAs that the library uses for a collective when every rank has its own GPU."""
    cta_gb_s: float
    """Bandwidth that one CTA alone reaches over the links."""
    bus_gb_s: float
    """Bandwidth of a rank over all of its links."""
    ghost_all_reduce_gb_s: float
    ghost_all_gather_gb_s: float
    ghost_reduce_scatter_gb_s: float
    ghost_all_to_all_gb_s: float
    """Bandwidth per CTA of each collective, alone, if all ranks share one GPU; all-to-all: with 16 CTAs."""
    priority: float = 1.0
    """1 if the hardware honours stream priority."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A GPU and the simulator's figures for it."""

    name: str
    spec: GpuSpec
    figures: SimFigures
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each figure."""

    def machine(self) -> SimMachine:
        """The limits and rates for the core."""
        gpu, figures = self.spec, self.figures
        return SimMachine(
            name=gpu.title,
            sms=gpu.sms,
            warps_per_sm=gpu.max_warps_per_sm,
            blocks_per_sm=gpu.max_blocks_per_sm,
            registers_per_sm=gpu.registers_per_sm,
            shared_bytes_per_sm=gpu.shared_bytes_per_sm,
            latency_s=figures.latency_ns * 1e-9,
            cache_bytes_per_s=figures.cache_tb_s * 1e12,
            memory_bytes_per_s=figures.memory_tb_s * 1e12,
            in_order=bool(figures.in_order),
        )

    def with_figures(self, **changes: float) -> Profile:
        """A copy with other figures."""
        return replace(self, figures=replace(self.figures, **changes))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        document: dict[str, Any] = {"version": PROFILE_VERSION, "name": self.name, "gpu": self.spec.name}
        document["figures"] = {
            f.name: {"value": getattr(self.figures, f.name), "source": self.sources.get(f.name, "")}
            for f in fields(SimFigures)
        }
        return document

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file atomically."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")


def footprint(gpu: GpuSpec, name: str, threads: int, registers: int, shared_bytes: int) -> Footprint:
    """The resources of an SM that a block takes. Raises NeverFitsError if they exceed the GPU's limits."""
    if not blocks_per_sm(gpu, threads, registers, shared_bytes):
        raise NeverFitsError(
            f"{name}: a block of {threads} threads, {registers} registers a thread and "
            f"{shared_bytes / 1024:.0f} KiB of shared memory fits on no SM of {gpu.title} "
            f"({gpu.shared_bytes_per_block_optin >> 10} KiB, {gpu.registers_per_sm} registers); "
            "use a smaller tile or fewer stages"
        )
    warps = -(-threads // gpu.warp_size)
    unit, parts = gpu.register_unit_per_warp, gpu.sub_partitions_per_sm
    per_warp = -(-registers * gpu.warp_size // unit) * unit
    shared = shared_bytes + gpu.shared_reserve_bytes_per_block
    return Footprint(
        warps=warps,
        registers=per_warp * (-(-warps // parts) * parts),
        shared_bytes=-(-shared // gpu.shared_unit_bytes) * gpu.shared_unit_bytes,
    )


def names() -> list[str]:
    """Names of the GPUs that have a profile."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def profile(name: str) -> Profile:
    """The profile of a GPU by name, or from a file written by `weft calibrate`."""
    if name.endswith(".json"):
        return load_profile(name)
    if name.endswith(PAPER_NODE):
        base = name.removesuffix(PAPER_NODE)
        if base not in PAPER_RANKS:
            known = ", ".join(gpu + PAPER_NODE for gpu in PAPER_RANKS)
            raise UsageError(f"{name}: arXiv:2606.09200 has no such node; use one of {known}")
        return paper_node(profile(base))
    gpu = spec(name)
    stem = {"a100-40gb": "a100"}.get(gpu.name, gpu.name)
    if stem not in names():
        raise UsageError(f"no simulator profile for {gpu.title}; use one of {', '.join(names())}")
    return _shipped(stem)


def paper_node(base: Profile, *, ctas: int = PAPER_CTAS) -> Profile:
    """The node of arXiv:2606.09200 with these GPUs, as far as Fig. 2 reveals it.

    At large grids, the three NVIDIA GPUs have the same ratio, 0.95. With four compute streams, this needs
    collectives that take somewhat longer than the GEMM: half of a PCIe link explains that, NVLink does not.
    On the MI250X, collectives run at the rate of the xGMI links that leave the package. These rules were
    chosen with the figure in view.
    """
    gpu = base.spec
    if gpu.vendor == "nvidia":
        link, share, what = gpu.pcie_bytes_per_s, SHARED_UPLINK, "PCIe x16, two GPUs behind one uplink"
    else:
        link, share = gpu.links / 2 * gpu.link_bytes_per_s, PCIE_SHARE
        what = "the xGMI links that leave the package"
    rule = f"{100 * share:.0f}% of {link / 1e9:.4g} GB/s ({what}); one rule for each vendor"
    bus = share * link / 1e9
    found = base.with_figures(bus_gb_s=bus, comm_ctas=float(ctas), cta_gb_s=max(bus / ctas, 1.0))
    sources = {
        **base.sources,
        "bus_gb_s": rule,
        "cta_gb_s": "bus over CTAs",
        "comm_ctas": "assumed, the same for every GPU of the paper",
    }
    return replace(found, name=base.name + PAPER_NODE, sources=sources)


def by_title(title: str) -> Profile:
    """The profile of a real GPU by the name that its driver reports."""
    words = title.lower().replace("-", " ").split()
    for name in names():
        if name in words:
            return profile(name)
    raise UsageError(f"no simulator profile for {title or 'this GPU'}; use one of {', '.join(names())}")


@cache
def _shipped(stem: str) -> Profile:
    return load_profile(FOLDER / f"{stem}.json")


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file."""
    where = os.fspath(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read profile {where}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"profile {where} is not JSON: {error}") from None
    try:
        if document["version"] != PROFILE_VERSION:
            raise InputError(
                f"profile {where}: version {document['version']!r}; this weft reads {PROFILE_VERSION}"
            )
        found = document["figures"]
        values = {f.name: float(found[f.name]["value"]) for f in fields(SimFigures) if f.name in found}
        return Profile(
            name=str(document["name"]),
            spec=spec(str(document["gpu"])),
            figures=SimFigures(**values),
            sources={name: str(entry.get("source", "")) for name, entry in found.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"profile {where} is incomplete ({error}); write it with `weft calibrate`") from None
