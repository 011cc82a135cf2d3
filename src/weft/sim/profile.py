"""Profile: what the model must know of a GPU beyond its data sheet, each figure with its source."""

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
from weft.sim.core import Machine, NeverFitsError
from weft.sim.launches import Footprint

VERSION = 1
FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of the model."""

    latency_ns: float
    """From a load to its data without load on the memory system."""
    memory_latency_ns: float
    """How much longer it takes where the shared cache does not have it."""
    intake_gb_s: float
    """Bytes per second that one SM takes in."""
    cache_tb_s: float
    """What the shared cache (L2) delivers to all SMs."""
    memory_tb_s: float
    """What device memory delivers."""
    matrix_efficiency: float
    """Share of the peak matrix rate that an SM full of GEMM blocks reaches."""
    vector_efficiency: float
    """Share of the peak fp32 rate that an SM full of blocks of a textbook GEMM reaches."""
    library_efficiency: float
    """The same for the vendor's GEMM and convolution, whole waves."""
    attention_efficiency: float
    """The same for the vendor's attention, causal."""
    rows_bytes: float
    """Bytes that a block of 128 threads of a LayerNorm, softmax or GELU keeps in flight."""
    rows_traffic: float
    """Bytes through memory per byte that a LayerNorm or softmax must move."""
    elementwise_traffic: float
    """The same for GELU."""
    block_start_ns: float
    """Start and end of a block that does nothing, alone."""
    stream_gap_us: float
    """From the end of a kernel to the start of the next on its stream."""
    event_gap_us: float
    """The same across streams, by an event."""
    compute_queues: float
    """Compute streams that really run at once."""
    persistent: float
    """1: the vendor's matrix kernels are persistent, one block for each SM."""

    comm_threads: float
    comm_registers: float
    comm_shared_kib: float
    """Footprint of a collective's block: threads, registers per thread, shared memory as launched."""
    comm_latency_ns: float
    """Latency up to which a collective's block keeps its speed: it has that much in flight."""
    comm_traffic: float
    """Bytes through the cache per byte that a rank sends."""
    comm_miss: float
    """Share of them that goes on to device memory."""
    comm_ctas: float
    """Blocks that the library takes for a collective where every rank has a GPU of its own."""
    cta_gb_s: float
    """Bytes that a block sends over a link per second, alone."""
    bus_gb_s: float
    """Bytes per second that a rank can send over its links."""
    ghost_all_reduce_gb_s: float
    ghost_all_gather_gb_s: float
    ghost_reduce_scatter_gb_s: float
    ghost_all_to_all_gb_s: float
    """Bytes that a rank's block sends per second, alone, where all ranks share one GPU;
    all-to-all: with 16 blocks."""
    priority: float = 1.0
    """1: the hardware heeds a stream's priority."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A GPU and the model's figures for it."""

    name: str
    spec: GpuSpec
    figures: Figures
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from."""

    def machine(self) -> Machine:
        """What the core needs."""
        gpu, figures = self.spec, self.figures
        return Machine(
            name=gpu.title,
            sms=gpu.sms,
            warps_per_sm=gpu.max_warps_per_sm,
            blocks_per_sm=gpu.max_blocks_per_sm,
            registers_per_sm=gpu.registers_per_sm,
            shared_bytes_per_sm=gpu.shared_bytes_per_sm,
            latency_s=figures.latency_ns * 1e-9,
            cache_bytes_per_s=figures.cache_tb_s * 1e12,
            memory_bytes_per_s=figures.memory_tb_s * 1e12,
        )

    def with_figures(self, **changes: float) -> Profile:
        """This profile with other figures."""
        return replace(self, figures=replace(self.figures, **changes))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        document: dict[str, Any] = {"version": VERSION, "name": self.name, "gpu": self.spec.name}
        document["figures"] = {
            f.name: {"value": getattr(self.figures, f.name), "source": self.sources.get(f.name, "")}
            for f in fields(Figures)
        }
        return document

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, whole or not at all."""
        write_whole(path, self.to_json())


def footprint(gpu: GpuSpec, name: str, threads: int, registers: int, shared_bytes: int) -> Footprint:
    """What a block takes of an SM. Raises NeverFitsError for a kernel that the GPU refuses."""
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
    """GPUs that have a profile."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def profile(name: str) -> Profile:
    """The profile of a GPU by name, or of a file that `weft calibrate` wrote."""
    if name.endswith(".json"):
        return load(name)
    gpu = spec(name)
    stem = {"a100-40gb": "a100"}.get(gpu.name, gpu.name)
    if stem not in names():
        raise UsageError(f"no simulator profile for {gpu.title}; use one of {', '.join(names())}")
    return _shipped(stem)


def by_title(title: str) -> Profile:
    """The profile of a real GPU by the name that its driver gives it."""
    words = title.lower().replace("-", " ").split()
    for name in names():
        if name in words:
            return profile(name)
    raise UsageError(f"no simulator profile for {title or 'this GPU'}; use one of {', '.join(names())}")


@cache
def _shipped(stem: str) -> Profile:
    return load(FOLDER / f"{stem}.json")


def load(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file."""
    where = os.fspath(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read profile {where}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"profile {where} is not JSON: {error}") from None
    try:
        if document["version"] != VERSION:
            raise InputError(f"profile {where}: version {document['version']!r}; this weft reads {VERSION}")
        found = document["figures"]
        values = {f.name: float(found[f.name]["value"]) for f in fields(Figures) if f.name in found}
        return Profile(
            name=str(document["name"]),
            spec=spec(str(document["gpu"])),
            figures=Figures(**values),
            sources={name: str(entry.get("source", "")) for name, entry in found.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"profile {where} is incomplete ({error}); write it with `weft calibrate`") from None
