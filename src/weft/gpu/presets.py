"""GPU presets: hardware limits and rates, each with its source.

Abbreviations of the sources
  [CG]   CUDA C++ Programming Guide, "Compute Capabilities", tables of features and technical specifications
  [OCC]  cuda_occupancy.h of the CUDA toolkit (allocation units, sub-partitions, driver reserve)
  [A40]  NVIDIA A40 datasheet; NVIDIA Ampere GA102 GPU Architecture whitepaper
  [A100] NVIDIA A100 Tensor Core GPU datasheet; NVIDIA A100 Tensor Core GPU Architecture whitepaper
  [H100] NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.03; H100 datasheet
  [H200] NVIDIA H200 Tensor Core GPU datasheet
  [B200] NVIDIA HGX B200 and DGX B200 datasheets (eight GPUs: divided by eight)
  [BTG]  NVIDIA Blackwell Tuning Guide
  [V100] NVIDIA Tesla V100 datasheet and Volta whitepaper
  [H20]  NVIDIA H20 product brief
  [H800] DeepSeek-V3 technical report, section 3.1 (NVLink 400 GB/s); otherwise [H100]
  [GB]   NVIDIA GB200 NVL72 and GB300 NVL72 datasheets (72 GPUs: divided by 72)
  [B300] NVIDIA HGX B300 and DGX B300 datasheets (eight GPUs: divided by eight)
  [C4]   AMD CDNA 4 whitepaper; AMD Instinct MI355X datasheet
  [C2]   AMD CDNA 2 whitepaper; AMD Instinct MI250X product page (two dies: divided by two)
  [C3]   AMD CDNA 3 whitepaper; AMD Instinct MI300X datasheet
  [ROCm] ROCm documentation, "AMD GPU specifications"
  [LLVM] LLVM, "User Guide for AMDGPU Backend" (kernel descriptor) and AMDGPUBaseInfo.cpp
  [KFD]  Linux amdgpu/amdkfd driver (SDMA instances)
Vendors state memory in GB and mean GiB (an H100 of "80 GB" shows 79.6 GiB); rates are decimal.
A value marked `unconfirmed` comes from a secondary source; the probe replaces it with the driver's value.
"""

from __future__ import annotations

from dataclasses import replace

from weft.gpu.specs import GpuSpec, Throughput

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB_S, TB_S = 1e9, 1e12

PCIE4_X16 = 31.5 * GB_S  # PCI-SIG: 16 GT/s x 16 lanes x 128b/130b / 8
PCIE5_X16 = 63.0 * GB_S  # PCI-SIG: 32 GT/s x 16 lanes x 128b/130b / 8

A40 = GpuSpec(
    name="a40",
    title="NVIDIA A40",
    vendor="nvidia",
    arch="sm_86",
    compute_capability=(8, 6),
    sms=84,  # [A40] GA102, all SMs
    warp_size=32,  # [CG]
    max_threads_per_block=1024,  # [CG]
    max_threads_per_sm=1536,  # [CG] 8.6
    max_blocks_per_sm=16,  # [CG] 8.6
    max_multi_warp_blocks_per_sm=16,  # as above: no separate limit
    sub_partitions_per_sm=4,  # [OCC]
    registers_per_sm=65536,  # [CG]
    registers_per_block=65536,  # [CG]
    max_registers_per_thread=255,  # [CG]
    register_unit_per_warp=256,  # [OCC]
    shared_bytes_per_sm=100 * KIB,  # [CG] 8.6
    shared_bytes_per_block=48 * KIB,  # [CG]
    shared_bytes_per_block_optin=99 * KIB,  # [CG] 8.6
    shared_reserve_bytes_per_block=1 * KIB,  # [OCC], compute capability 8.0 and later
    shared_unit_bytes=128,  # [OCC], compute capability 8.0 and later
    l2_bytes=6 * MIB,  # [A40] whitepaper, full GA102
    last_level_bytes=0,
    memory_bytes=48 * GIB,  # [A40]; less is usable, GDDR6 keeps its ECC bits in line
    memory_bytes_per_s=696 * GB_S,  # [A40]
    throughput=Throughput(
        bf16_tflops=149.7,  # [A40]
        fp16_tflops=149.7,  # [A40]
        tf32_tflops=74.8,  # [A40]
        fp32_tflops=37.4,  # [A40]
        fp64_tflops=0.585,  # [A40] whitepaper: 1/64 of fp32
    ),
    boost_mhz=1740,  # [A40]: 37.4 TFLOP/s / (84 x 128 x 2)
    link_kind="nvlink",  # [A40]: a bridge joins pairs of cards only
    links=4,  # [A40] whitepaper: four x4 links
    link_bytes_per_s=14.0625 * GB_S,  # [A40]: 112.5 GB/s over both directions
    pcie_bytes_per_s=PCIE4_X16,  # [A40]
    copy_engines=3,  # deviceQuery of an A40; unconfirmed
)

A100_40GB = replace(
    A40,
    name="a100-40gb",
    title="NVIDIA A100 40GB",
    arch="sm_80",
    compute_capability=(8, 0),
    sms=108,  # [A100]
    max_threads_per_sm=2048,  # [CG] 8.0
    max_blocks_per_sm=32,  # [CG] 8.0
    max_multi_warp_blocks_per_sm=32,  # as above
    shared_bytes_per_sm=164 * KIB,  # [CG] 8.0
    shared_bytes_per_block_optin=163 * KIB,  # [CG] 8.0
    l2_bytes=40 * MIB,  # [A100]
    memory_bytes=40 * GIB,  # [A100]
    memory_bytes_per_s=1555 * GB_S,  # [A100]
    throughput=Throughput(
        bf16_tflops=312.0,  # [A100]
        fp16_tflops=312.0,  # [A100]
        tf32_tflops=156.0,  # [A100]
        fp32_tflops=19.5,  # [A100]
        fp64_tflops=9.7,  # [A100]
        fp64_matrix_tflops=19.5,  # [A100]
    ),
    boost_mhz=1410,  # [A100] whitepaper
    links=12,  # [A100] third-generation NVLink
    link_bytes_per_s=25 * GB_S,  # [A100]: 600 GB/s over 12 links and both directions
    copy_engines=3,  # deviceQuery of an A100-SXM4-40GB
)

A100_80GB = replace(
    A100_40GB,
    name="a100-80gb",
    title="NVIDIA A100 80GB",
    memory_bytes=80 * GIB,  # [A100]
    memory_bytes_per_s=2039 * GB_S,  # [A100] SXM
)

H100 = replace(
    A100_40GB,
    name="h100",
    title="NVIDIA H100 SXM",
    arch="sm_90",
    compute_capability=(9, 0),  # threads, blocks and registers per SM: [CG] 9.0, as 8.0
    sms=132,  # [H100]
    shared_bytes_per_sm=228 * KIB,  # [CG] 9.0
    shared_bytes_per_block_optin=227 * KIB,  # [CG] 9.0
    l2_bytes=50 * MIB,  # [H100]
    memory_bytes=80 * GIB,  # [H100]
    memory_bytes_per_s=3.35 * TB_S,  # [H100] datasheet
    throughput=Throughput(
        bf16_tflops=989.4,  # [H100] whitepaper
        fp16_tflops=989.4,  # [H100] whitepaper
        tf32_tflops=494.7,  # [H100] whitepaper
        fp8_tflops=1978.9,  # [H100] whitepaper
        fp32_tflops=66.9,  # [H100] whitepaper
        fp64_tflops=33.5,  # [H100] whitepaper
        fp64_matrix_tflops=66.9,  # [H100] whitepaper
    ),
    boost_mhz=1980,  # [H100] whitepaper, vector work; the matrix rates assume 1830
    links=18,  # [H100] fourth-generation NVLink
    link_bytes_per_s=25 * GB_S,  # [H100]: 900 GB/s over 18 links and both directions
    pcie_bytes_per_s=PCIE5_X16,  # [H100]
    copy_engines=3,  # unconfirmed
)

H200 = replace(
    H100,
    name="h200",
    title="NVIDIA H200",
    memory_bytes=141 * GIB,  # [H200]
    memory_bytes_per_s=4.8 * TB_S,  # [H200]; the compute rates are those of H100
)

B200 = replace(
    H100,
    name="b200",
    title="NVIDIA B200",
    arch="sm_100",
    compute_capability=(10, 0),  # threads, blocks, registers, shared memory per SM: [BTG], as 9.0
    sms=148,  # two dies of 74; unconfirmed by a datasheet, device queries agree
    l2_bytes=126 * MIB,  # [BTG]; unconfirmed
    memory_bytes=180 * GIB,  # [B200] DGX: 1440 GB / 8
    memory_bytes_per_s=8 * TB_S,  # [B200] DGX: 64 TB/s / 8
    throughput=Throughput(
        bf16_tflops=2250.0,  # [B200]: 36 PFLOP/s sparse / 8 / 2
        fp16_tflops=2250.0,  # [B200]: as bf16
        tf32_tflops=1125.0,  # [B200]: 18 PFLOP/s sparse / 8 / 2
        fp8_tflops=4500.0,  # [B200]: 72 PFLOP/s sparse / 8 / 2
        fp4_tflops=9000.0,  # [B200]: 144 PFLOP/s sparse / 8 / 2
        fp32_tflops=75.0,  # [B200]: 600 TFLOP/s / 8
        fp64_tflops=37.0,  # [B200]: 296 TFLOP/s / 8
        fp64_matrix_tflops=37.0,  # [B200]: as the vector rate
    ),
    boost_mhz=1965,  # unconfirmed; agrees with 75 TFLOP/s / (148 x 128 x 2)
    links=18,  # [B200] fifth-generation NVLink
    link_bytes_per_s=50 * GB_S,  # [B200]: 1.8 TB/s over 18 links and both directions
    copy_engines=3,  # unconfirmed, taken from H100
)

V100 = replace(
    A100_40GB,
    name="v100",
    title="NVIDIA V100 32GB",
    arch="sm_70",
    compute_capability=(7, 0),
    sms=80,  # [V100]
    shared_bytes_per_sm=96 * KIB,  # [CG] 7.0
    shared_bytes_per_block_optin=96 * KIB,  # [CG] 7.0
    shared_reserve_bytes_per_block=0,  # [OCC]: none before compute capability 8.0
    shared_unit_bytes=256,  # [OCC] 7.0
    l2_bytes=6 * MIB,  # [V100] whitepaper
    memory_bytes=32 * GIB,  # [V100]
    memory_bytes_per_s=900 * GB_S,  # [V100] SXM2
    throughput=Throughput(
        fp16_tflops=125.0,  # [V100]; Volta has no bf16
        fp32_tflops=15.7,  # [V100]
        fp64_tflops=7.8,  # [V100]
    ),
    boost_mhz=1530,  # [V100]
    links=6,  # [V100] second-generation NVLink
    link_bytes_per_s=25 * GB_S,  # [V100]: 300 GB/s over 6 links and both directions
    pcie_bytes_per_s=15.75 * GB_S,  # [V100] PCIe 3.0 x16
    copy_engines=6,  # deviceQuery of a V100-SXM2; unconfirmed
)

H800 = replace(
    H100,
    name="h800",
    title="NVIDIA H800 SXM",
    throughput=replace(H100.throughput, fp64_tflops=1.0, fp64_matrix_tflops=1.0),  # export limit; unconfirmed
    links=8,  # [H800]: 400 GB/s over both directions
)

H20 = replace(
    H100,
    name="h20",
    title="NVIDIA H20",
    sms=78,  # deviceQuery; unconfirmed by a datasheet
    l2_bytes=60 * MIB,  # [H20]
    memory_bytes=96 * GIB,  # [H20]
    memory_bytes_per_s=4.0 * TB_S,  # [H20]
    throughput=Throughput(
        bf16_tflops=148.0,  # [H20]
        fp16_tflops=148.0,  # [H20]
        tf32_tflops=74.0,  # [H20]
        fp8_tflops=296.0,  # [H20]
        fp32_tflops=39.5,  # 78 SMs at 1980 MHz; [H20] says 44
        fp64_tflops=1.0,  # [H20]
    ),
)

GB200 = replace(
    B200,
    name="gb200",
    title="NVIDIA GB200 (NVL72)",
    memory_bytes=186 * GIB,  # [GB]: 13.4 TB / 72
    throughput=replace(
        B200.throughput,
        bf16_tflops=2500.0,  # [GB]: 360 PFLOP/s sparse / 72 / 2
        fp16_tflops=2500.0,  # [GB]: as bf16
        tf32_tflops=1250.0,  # [GB]: 180 PFLOP/s sparse / 72 / 2
        fp8_tflops=5000.0,  # [GB]: 720 PFLOP/s sparse / 72 / 2
        fp4_tflops=10000.0,  # [GB]: 1440 PFLOP/s sparse / 72 / 2
        fp32_tflops=80.0,  # [GB]: 5760 TFLOP/s / 72
        fp64_tflops=40.0,  # [GB]: 2880 TFLOP/s / 72
        fp64_matrix_tflops=40.0,  # [GB]: as the vector rate
    ),
    boost_mhz=2100,  # unconfirmed; agrees with 80 TFLOP/s / (148 x 128 x 2)
)

B300 = replace(
    B200,
    name="b300",
    title="NVIDIA B300",
    arch="sm_103",
    compute_capability=(10, 3),
    memory_bytes=288 * GIB,  # [B300]: 2.3 TB / 8
    throughput=replace(
        B200.throughput,
        fp4_tflops=13500.0,  # [B300]: 108 PFLOP/s dense / 8
        fp64_tflops=1.2,  # [B300]: 10 TFLOP/s / 8
        fp64_matrix_tflops=1.2,  # [B300]: as the vector rate
    ),
)

GB300 = replace(
    B300,
    name="gb300",
    title="NVIDIA GB300 (NVL72)",
    memory_bytes=279 * GIB,  # [GB]: 20.1 TB / 72
    throughput=replace(
        B300.throughput,
        bf16_tflops=2500.0,  # [GB]: 360 PFLOP/s sparse / 72 / 2
        fp16_tflops=2500.0,  # [GB]: as bf16
        fp8_tflops=5000.0,  # [GB]: 720 PFLOP/s sparse / 72 / 2
        fp4_tflops=15000.0,  # [GB]: 1080 PFLOP/s dense / 72
    ),
)

MI250X = GpuSpec(
    name="mi250x",
    title="AMD Instinct MI250X (one GCD)",
    vendor="amd",
    arch="gfx90a",
    compute_capability=(9, 0),
    sms=110,  # [C2]: 220 compute units / 2
    warp_size=64,  # [ROCm]
    max_threads_per_block=1024,  # [LLVM] flat work-group size
    max_threads_per_sm=2048,  # [LLVM]: 8 waves per SIMD x 4 SIMDs x 64 lanes
    max_blocks_per_sm=32,  # [LLVM] getMaxWorkGroupsPerCU: one-wave groups need no barrier, so every wave
    max_multi_warp_blocks_per_sm=16,  # [LLVM] getMaxWorkGroupsPerCU: 16 barriers per compute unit
    sub_partitions_per_sm=4,  # [C2]: 4 SIMDs per compute unit
    registers_per_sm=4 * 512 * 64,  # [ROCm] VGPR file 512 KiB: 4 SIMDs x 512 VGPRs x 64 lanes
    registers_per_block=4 * 512 * 64,  # a group may use all of a compute unit
    max_registers_per_thread=512,  # [LLVM]: 256 VGPRs and 256 AGPRs, one file since gfx90a
    register_unit_per_warp=8 * 64,  # [LLVM] GRANULATED_WORKITEM_VGPR_COUNT: 8 per lane on gfx90a, gfx942
    shared_bytes_per_sm=64 * KIB,  # [ROCm] LDS
    shared_bytes_per_block=64 * KIB,  # [ROCm]: a group may use all of it, there is no opt-in
    shared_bytes_per_block_optin=64 * KIB,  # as above
    shared_reserve_bytes_per_block=0,  # none is known
    shared_unit_bytes=512,  # [LLVM] GRANULATED_LDS_SIZE: 128 dwords
    l2_bytes=8 * MIB,  # [C2]
    last_level_bytes=0,  # [C2]: no Infinity Cache
    memory_bytes=64 * GIB,  # [C2]: 128 GB / 2
    memory_bytes_per_s=1638.4 * GB_S,  # [C2]: 3276.8 GB/s / 2
    throughput=Throughput(
        bf16_tflops=191.5,  # [C2]: 383.0 / 2
        fp16_tflops=191.5,  # [C2]: 383.0 / 2
        fp32_tflops=23.95,  # [C2]: 47.9 / 2
        fp32_matrix_tflops=47.85,  # [C2]: 95.7 / 2
        fp64_tflops=23.95,  # [C2]: 47.9 / 2
        fp64_matrix_tflops=47.85,  # [C2]: 95.7 / 2
    ),
    boost_mhz=1700,  # [C2]
    link_kind="xgmi",
    links=8,  # ROCm documentation, "MI250 microarchitecture": 8 per GCD, 4 of them to the other die
    link_bytes_per_s=50 * GB_S,  # as above: 16 lanes at 25 GT/s
    pcie_bytes_per_s=PCIE4_X16,  # [C2]; on some nodes the host link is Infinity Fabric instead
    copy_engines=5,  # [KFD]: SDMA 4.4.0 has 5 instances, 2 for PCIe and 3 for xGMI
)

MI300X = replace(
    MI250X,
    name="mi300x",
    title="AMD Instinct MI300X",
    arch="gfx942",
    compute_capability=(9, 4),  # waves, VGPRs, LDS per compute unit: [LLVM], [ROCm], as gfx90a
    sms=304,  # [C3]: 8 XCDs of 38
    l2_bytes=32 * MIB,  # [ROCm]: 4 MiB per XCD, not shared between XCDs
    last_level_bytes=256 * MIB,  # [C3] Infinity Cache
    memory_bytes=192 * GIB,  # [C3]
    memory_bytes_per_s=5.3 * TB_S,  # [C3]
    throughput=Throughput(
        bf16_tflops=1307.4,  # [C3]
        fp16_tflops=1307.4,  # [C3]
        tf32_tflops=653.7,  # [C3]
        fp8_tflops=2614.9,  # [C3]
        fp32_tflops=163.4,  # [C3]
        fp32_matrix_tflops=163.4,  # [C3]
        fp64_tflops=81.7,  # [C3]
        fp64_matrix_tflops=163.4,  # [C3]
    ),
    boost_mhz=2100,  # [C3]
    links=7,  # [C3]: one to each of seven peers
    link_bytes_per_s=64 * GB_S,  # [C3]: 128 GB/s over both directions
    pcie_bytes_per_s=PCIE5_X16,  # [C3]
    copy_engines=16,  # [KFD]: SDMA 4.4.2 has 4 per I/O die, 4 dies
)

MI355X = replace(
    MI300X,
    name="mi355x",
    title="AMD Instinct MI355X",
    arch="gfx950",
    compute_capability=(9, 5),
    sms=256,  # [C4]: 8 XCDs of 32
    shared_bytes_per_sm=160 * KIB,  # [C4] LDS
    shared_bytes_per_block=160 * KIB,  # as above: there is no opt-in
    shared_bytes_per_block_optin=160 * KIB,  # as above
    memory_bytes=288 * GIB,  # [C4]
    memory_bytes_per_s=8 * TB_S,  # [C4]
    throughput=Throughput(
        bf16_tflops=2516.6,  # [C4]
        fp16_tflops=2516.6,  # [C4]
        fp8_tflops=5033.2,  # [C4]
        fp4_tflops=10066.3,  # [C4] MXFP4
        fp32_tflops=157.3,  # [C4]
        fp32_matrix_tflops=157.3,  # [C4]
        fp64_tflops=78.6,  # [C4]
        fp64_matrix_tflops=78.6,  # [C4]
    ),
    boost_mhz=2400,  # [C4]
    link_bytes_per_s=76.8 * GB_S,  # [C4]: 153.6 GB/s over both directions
)

GPU_PRESETS: dict[str, GpuSpec] = {
    s.name: s
    for s in (
        *(V100, A40, A100_40GB, A100_80GB, H20, H800, H100, H200),
        *(B200, GB200, B300, GB300, MI250X, MI300X, MI355X),
    )
}

ALIASES: dict[str, str] = {
    "a100": "a100-40gb",  # the card in the paper on resource-aware overlap
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "h200-sxm": "h200",
    "v100-32gb": "v100",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
}
