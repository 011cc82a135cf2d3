"""GpuSpec, the hardware limits and rates of a GPU, and the lookup of presets by name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weft.checks import unknown_name
from weft.errors import UsageError


@dataclass(frozen=True)
class Throughput:
    """Peak dense throughput in TFLOP/s (no structured sparsity); None if the hardware lacks the mode.

    bf16, fp16, tf32, fp8 and fp4 are matrix (tensor core) rates, fp32 and fp64 are vector rates.
    """

    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp8_tflops: float | None = None
    fp32_tflops: float | None = None
    fp64_tflops: float | None = None
    fp64_matrix_tflops: float | None = None
    fp32_matrix_tflops: float | None = None
    fp4_tflops: float | None = None
    """NVFP4 or MXFP4 with block scales."""


@dataclass(frozen=True)
class GpuSpec:
    """One GPU as software sees it; for an MI250X, one of its two dies.

    AMD's terms map onto NVIDIA's: a compute unit is an SM, a wavefront is a warp, a workgroup is a block,
    LDS is shared memory, a SIMD is a sub-partition, and registers are VGPRs (accumulation ones included).
    """

    name: str
    title: str
    """Name in the vendor's spelling."""
    vendor: str
    """`nvidia` or `amd`."""
    arch: str
    """Compiler target, such as `sm_90` or `gfx942`."""
    compute_capability: tuple[int, int]
    """NVIDIA: (major, minor). AMD: taken from the gfx number, (9, 4) for gfx942."""

    sms: int
    warp_size: int
    """Threads per warp or wavefront."""
    max_threads_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    max_multi_warp_blocks_per_sm: int
    """Limit for blocks of more than one warp; lower on CDNA, where each of them uses a barrier."""
    sub_partitions_per_sm: int
    """Parts of an SM with their own scheduler and registers; a warp is assigned to one of them."""

    registers_per_sm: int
    """32-bit registers, counted over all lanes."""
    registers_per_block: int
    max_registers_per_thread: int
    register_unit_per_warp: int
    """Allocation granularity of a warp's registers, counted over all lanes."""

    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    """The most a block can have without an opt-in."""
    shared_bytes_per_block_optin: int
    """The most a block can have with an opt-in."""
    shared_reserve_bytes_per_block: int
    """Reserved by the driver in every block, in addition to what the kernel requests."""
    shared_unit_bytes: int
    """Allocation granularity of a block's shared memory, including the reserve."""

    l2_bytes: int
    last_level_bytes: int
    """Memory-side cache behind L2 (AMD Infinity Cache); 0 if there is none."""
    memory_bytes: int
    memory_bytes_per_s: float
    throughput: Throughput
    boost_mhz: int

    link_kind: str
    """Type of the links to peers: `nvlink`, `xgmi` or `pcie`."""
    links: int
    link_bytes_per_s: float
    """Bandwidth of one link in one direction."""
    pcie_bytes_per_s: float
    """Bandwidth to the host in one direction."""
    copy_engines: int
    """Number of asynchronous copy (DMA) engines."""

    @property
    def fabric_bytes_per_s(self) -> float:
        """Bandwidth of all links to peers together, in one direction."""
        return self.links * self.link_bytes_per_s

    @property
    def fp32_lanes_per_sm(self) -> int:
        """fp32 multiply-adds per clock in the vector units of an SM, as counted in the peak rate."""
        return 64 if self.arch in ("sm_70", "sm_80", "gfx90a") else 128

    @property
    def max_warps_per_sm(self) -> int:
        """Warps or wavefronts per SM."""
        return self.max_threads_per_sm // self.warp_size

    def flops(self, dtype: str) -> float:
        """Peak dense rate in FLOP/s for `bf16`, `fp16`, `tf32`, `fp8`, `fp32`, `fp64`.

        Raises UsageError if this GPU lacks the mode.
        """
        known = {f.name.removesuffix("_tflops") for f in fields(Throughput)}
        tflops = getattr(self.throughput, f"{dtype}_tflops") if dtype in known else None
        if tflops is None:
            have = (d for d in sorted(known) if getattr(self.throughput, f"{d}_tflops") is not None)
            raise UsageError(f"{self.title} has no {dtype} rate; choose one of {', '.join(have)}")
        return float(tflops) * 1e12


def spec(name: str) -> GpuSpec:
    """The preset with this name, case-insensitive; `a100` is the 40 GB card.

    Raises UsageError with the nearest valid name.
    """
    from weft.gpu.presets import ALIASES, GPU_PRESETS

    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = ALIASES.get(key, key)
    if key not in GPU_PRESETS:
        raise unknown_name("GPU preset", name, [*GPU_PRESETS, *ALIASES])
    return GPU_PRESETS[key]
