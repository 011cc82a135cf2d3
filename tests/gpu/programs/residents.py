"""Counts, in the kernel itself, how many of its blocks are resident on an SM at once. Prints JSON."""

from __future__ import annotations

import json
import sys

import cupy

import weft

SOURCE = r"""
extern "C" __global__ void residents(unsigned *now, unsigned *most, long long cycles) {
    extern __shared__ char scratch[];
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) {
        atomicMax(&most[sm], atomicAdd(&now[sm], 1) + 1);
        long long start = clock64();
        while (clock64() - start < cycles) {}
        atomicSub(&now[sm], 1);
    }
    __syncthreads();
    if (cycles < 0) most[0] = scratch[threadIdx.x];
}
"""


def measure(kernel: cupy.RawKernel, threads: int, shared: int) -> int:
    now, most = cupy.zeros(256, cupy.uint32), cupy.zeros(256, cupy.uint32)
    kernel((132 * 200,), (threads,), (now, most, cupy.int64(20_000)), shared_mem=shared)
    return int(most.max())


def main() -> None:
    kernel = cupy.RawKernel(SOURCE, "residents")
    shapes = json.loads(sys.argv[1])
    rows = []
    for threads, shared in shapes:
        measure(kernel, threads, shared)  # compile and load before timing
        natural = measure(kernel, threads, shared)
        for n in range(1, natural + 1):
            with weft.overlap(weft.Policy(residency=n)):
                rows.append([threads, shared, natural, n, measure(kernel, threads, shared)])
    from weft.shim.stats import snapshot

    counted = [
        [k["threads"], k["blocks_per_sm"], k["shaped"]]
        for k in snapshot()["kernels"]
        if k["name"] == "residents"
    ]
    print(json.dumps({"rows": rows, "counted": counted}))


if __name__ == "__main__":
    main()
