"""Measure whether the GPU honours stream priority: whether a small kernel overtakes waiting blocks."""

from __future__ import annotations

import ctypes
import statistics
from dataclasses import dataclass

from weft.errors import UnavailableError
from weft.gpu.driver import Attribute, Driver, Handle

WAVES = 6
"""Waves of blocks in the kernel that fills the GPU."""
BLOCK_US = 400
"""Run time of one of its blocks."""
PRIORITY_ROUNDS = 5
"""Number of measurements at each priority after one warm-up."""

SPIN_PTX = """\
.version 7.0
.target sm_52
.address_size 64

.visible .entry weft_spin(.param .u64 duration_ns)
{
    .reg .pred %again;
    .reg .u64 %start, %now, %length;
    ld.param.u64 %length, [duration_ns];
    mov.u64 %start, %globaltimer;
SPIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %again, %now, %length;
    @%again bra SPIN;
    ret;
}
"""


@dataclass(frozen=True)
class PriorityEffect:
    """Median milliseconds from the start of the filling kernel to the end of a small kernel behind it."""

    equal_ms: float
    """With equal priority: the small kernel waits for all earlier blocks."""
    high_ms: float
    """With the highest priority: it waits only until the first blocks end."""
    block_ms: float
    """Run time of one block of the filling kernel."""

    @property
    def ratio(self) -> float:
        """`equal_ms` over `high_ms`: how many times sooner the kernel ends; 1 if priority has no effect."""
        return self.equal_ms / self.high_ms

    @property
    def conclusive(self) -> bool:
        """Whether the GPU was full; without waiting blocks the small kernel has nothing to overtake."""
        return self.equal_ms > 2 * self.block_ms


def measure_priority(driver: Driver, index: int = 0) -> PriorityEffect:
    """Measure on one GPU, in under a second. Raises UnavailableError if there is only one priority."""
    device = driver.device(index)
    with driver.context(device):
        least, greatest = driver.priority_range()
        if least == greatest:
            raise UnavailableError("the driver offers only one stream priority; update the driver")
        spin = driver.function(driver.load(SPIN_PTX), "weft_spin")
        threads = 512  # divides the thread slots of every SM, so that nothing else fits
        fits = driver.attribute(device, Attribute.MULTIPROCESSOR_COUNT) * driver.blocks_per_sm(
            spin, threads, 0
        )
        fill, equal, high = driver.stream(least), driver.stream(least), driver.stream(greatest)
        times: dict[str, list[float]] = {"equal": [], "high": []}
        for _ in range(PRIORITY_ROUNDS + 1):  # interleaved, so that drift affects both equally
            for name, stream in (("equal", equal), ("high", high)):
                times[name].append(_end_ms(driver, spin, fits * WAVES, threads, fill, stream))
    # The first round loads the kernel.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return PriorityEffect(medians["equal"], medians["high"], BLOCK_US / 1000)


def _end_ms(driver: Driver, spin: Handle, blocks: int, threads: int, fill: Handle, stream: Handle) -> float:
    start, end = driver.event(), driver.event()
    driver.record(start, fill)
    driver.launch(spin, blocks, threads, fill, ctypes.c_uint64(BLOCK_US * 1000))
    driver.launch(spin, 1, 32, stream, ctypes.c_uint64(1000))
    driver.record(end, stream)
    driver.synchronize()
    return driver.elapsed_ms(start, end)
