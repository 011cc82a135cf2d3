"""Resident blocks per SM of a kernel, and the shared memory per block that lowers that number.

For NVIDIA these are the rules of cuda_occupancy.h, which the driver follows. Two things are not modelled:
named barriers (an SM has two per block slot, and the driver does not report how many a kernel uses), and the
split between L1 and shared memory (without a carve-out preference the driver grants what the blocks need).
For CDNA the same arithmetic applies to waves of 64, VGPRs (including accumulation registers) and LDS.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import UsageError
from weft.gpu.specs import GpuSpec
from weft.workload import DTYPE_BYTES, Compute

UNLIMITED = 2**31 - 1
"""The limit of a resource that the kernel does not use."""


@dataclass(frozen=True)
class Limits:
    """Blocks per SM that each resource allows by itself; 0 if a single block exceeds the resource."""

    warps: int
    registers: int
    shared: int
    blocks: int

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks per SM: the smallest of the limits."""
        return min(self.warps, self.registers, self.shared, self.blocks)

    @property
    def binding(self) -> tuple[str, ...]:
        """The resources that limit residency; to raise it, all of them must be relaxed."""
        least = self.blocks_per_sm
        return tuple(
            name for name in ("warps", "registers", "shared", "blocks") if getattr(self, name) == least
        )


def limits(spec: GpuSpec, threads: int, registers: int, shared_bytes: int) -> Limits:
    """The number of blocks per SM that each resource allows.

    `threads` per block, `registers` per thread, `shared_bytes` per block: static and dynamic as launched,
    excluding the driver's reserve.
    """
    if threads < 1 or registers < 0 or shared_bytes < 0:
        raise UsageError(
            f"no kernel has {threads} threads, {registers} registers and {shared_bytes} shared bytes;"
            " give at least 1 thread and nothing negative"
        )
    warps_per_block = -(-threads // spec.warp_size)
    return Limits(
        warps=0 if threads > spec.max_threads_per_block else spec.max_warps_per_sm // warps_per_block,
        registers=_register_limit(spec, warps_per_block, registers),
        shared=_shared_limit(spec, shared_bytes),
        blocks=spec.max_blocks_per_sm if warps_per_block == 1 else spec.max_multi_warp_blocks_per_sm,
    )


def blocks_per_sm(spec: GpuSpec, threads: int, registers: int, shared_bytes: int) -> int:
    """Resident blocks per SM; 0 for a launch that the GPU rejects. Arguments as in `limits`."""
    return limits(spec, threads, registers, shared_bytes).blocks_per_sm


def shared_bytes_for(
    spec: GpuSpec, threads: int, registers: int, shared_bytes: int, residency: int
) -> int | None:
    """The smallest shared memory per block, in bytes, with which exactly `residency` blocks fit on an SM.

    The result is at least `shared_bytes`, which the kernel needs. None if no size gives that residency: fewer
    blocks fit already, or the allocation unit skips it.
    """
    now = blocks_per_sm(spec, threads, registers, shared_bytes)
    if residency < 1 or now < residency:
        return None
    if now == residency:
        return shared_bytes
    # Up to this allocation one more block fits; one byte more takes another allocation unit.
    fits_one_more = spec.shared_bytes_per_sm // (residency + 1)
    fits_one_more -= fits_one_more % spec.shared_unit_bytes
    wanted = fits_one_more - spec.shared_reserve_bytes_per_block + 1
    return wanted if _shared_limit(spec, wanted) == residency else None


def tile_launch_size(spec: GpuSpec, compute: Compute) -> tuple[int, int, int]:
    """Threads, estimated registers per thread, and shared bytes of a block of weft's tiled GEMMs."""
    tile_m, tile_n, tile_k = compute.tile or (64, 64, 64)
    # The textbook GEMM has the same number of threads on every GPU, whatever the warp size.
    threads = compute.warps * (32 if compute.kind == "tile_gemm" else spec.warp_size)
    # The accumulator takes registers, and addresses and operands about 40 more: 72 for 64x64 and 4 warps, as
    # compiled. The textbook GEMM also holds operands read from shared memory: 69 to 80 for 8 warps.
    others = 56 if compute.kind == "tile_gemm" else 40
    registers = min(255, tile_m * tile_n // threads + others)
    return threads, registers, compute.stages * (tile_m + tile_n) * tile_k * DTYPE_BYTES[compute.dtype]


def _register_limit(spec: GpuSpec, warps_per_block: int, registers: int) -> int:
    unit = spec.register_unit_per_warp
    per_warp = -(-registers * spec.warp_size // unit) * unit
    if not per_warp:
        return UNLIMITED
    # The hardware checks a block as if its warps filled all sub-partitions evenly.
    parts = spec.sub_partitions_per_sm
    assumed_per_block = per_warp * (-(-warps_per_block // parts) * parts)
    if registers > spec.max_registers_per_thread or assumed_per_block > spec.registers_per_block:
        return 0
    warps_per_part = spec.registers_per_sm // parts // per_warp
    return warps_per_part * parts // warps_per_block


def _shared_limit(spec: GpuSpec, shared_bytes: int) -> int:
    if shared_bytes > spec.shared_bytes_per_block_optin:
        return 0
    unit = spec.shared_unit_bytes
    per_block = -(-(shared_bytes + spec.shared_reserve_bytes_per_block) // unit) * unit
    return spec.shared_bytes_per_sm // per_block if per_block else UNLIMITED
