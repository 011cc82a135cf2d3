"""Kernels that time themselves, for the program `anatomy` of benchmarks/tracer.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def self_timed(out, sink, ns, BLOCK: tl.constexpr, WRITES: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, N803
    """Runs for `ns` and notes when its first block began and its last one ended, by the GPU's timer."""
    began = globaltimer()
    tl.atomic_min(out, began)
    now = began
    while now < began + ns:
        now = globaltimer()
    if WRITES:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(sink + at, at.to(tl.float32))
    tl.atomic_max(out + 1, globaltimer())


GRIDS, DURATIONS_NS, REPEATS = (1, 132, 528, 4224), (4_000, 30_000), 4


class SelfTimed:
    """Kernels of several sizes that time themselves, to compare with events and Kineto."""

    def __init__(self) -> None:
        self._cases = [(grid, ns, w) for grid in GRIDS for ns in DURATIONS_NS for w in (False, True)]
        self._times = torch.zeros(len(self._cases) * REPEATS, 2, dtype=torch.int64, device="cuda")
        self._sink = torch.zeros(GRIDS[-1] * 1024, device="cuda")

    def launch(self) -> None:
        self._times[:, 0] = 1 << 62
        self._times[:, 1] = 0
        for i in range(len(self._times)):
            grid, ns, writes = self._cases[i // REPEATS]
            self_timed[(grid,)](self._times[i], self._sink, ns, 1024, writes, num_warps=8)

    def found(self) -> list[list[int]]:
        """Grid, nanoseconds, writes, begin and end of each launch of the last step."""
        cases = [case for case in self._cases for _ in range(REPEATS)]
        return [[*map(int, case), *times] for case, times in zip(cases, self._times.tolist(), strict=True)]
