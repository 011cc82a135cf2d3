"""Measure whether a launch-completion event fires before its kernel ends, as the placed head start needs."""

from __future__ import annotations

import ctypes
import statistics
from dataclasses import dataclass

from weft.errors import UnavailableError
from weft.gpu.driver import Driver, Handle
from weft.gpu.priority import SPIN_PTX

SINCE_CUDA = (12, 3)
KERNEL_US = 5000
"""Run time of the kernel that represents a collective."""
PLACEMENT_ROUNDS = 5
"""Number of measurements after one warm-up."""
_LAUNCH_COMPLETION_EVENT = 12


@dataclass(frozen=True)
class PlacementEffect:
    """Median times from the start of a long kernel, with a second kernel that waits for its placement."""

    waiter_ms: float
    """Milliseconds to the end of the waiting kernel."""
    kernel_ms: float
    """Milliseconds to the end of the long kernel."""

    @property
    def works(self) -> bool:
        """Whether the wait ended well before the long kernel did."""
        return self.waiter_ms < self.kernel_ms / 2


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a launch-completion event."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("event", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("rest", ctypes.c_char * 52),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def measure_placement(driver: Driver, index: int = 0) -> PlacementEffect:
    """Measure on one GPU, in under a second. Raises UnavailableError if the driver has no such event."""
    if driver.cuda_version() < SINCE_CUDA:
        raise UnavailableError("the driver has no launch-completion event; update it to CUDA 12.3 or newer")
    with driver.context(driver.device(index)):
        spin = driver.function(driver.load(SPIN_PTX), "weft_spin")
        least, _ = driver.priority_range()
        streams = driver.stream(least), driver.stream(least)
        times = [_times_ms(driver, spin, *streams) for _ in range(PLACEMENT_ROUNDS + 1)]
    waiter, kernel = (statistics.median(values[1:]) for values in zip(*times, strict=True))
    return PlacementEffect(waiter, kernel)


def _times_ms(driver: Driver, spin: Handle, comm: Handle, compute: Handle) -> tuple[float, float]:
    start, waited, ended = driver.event(), driver.event(), driver.event()
    placed = driver.event(timing=False)
    attribute = _Attribute(_LAUNCH_COMPLETION_EVENT, 0, placed, 0)
    config = _Config((16, 1, 1), (512, 1, 1), 0, comm, ctypes.pointer(attribute), 1)
    duration = ctypes.c_uint64(KERNEL_US * 1000)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
    driver.record(start, comm)
    driver.call("cuLaunchKernelEx", ctypes.byref(config), spin, params, ctypes.c_void_p())
    driver.record(ended, comm)
    driver.call("cuStreamWaitEvent", compute, placed, 0)
    driver.launch(spin, 1, 32, compute, ctypes.c_uint64(1000))
    driver.record(waited, compute)
    driver.synchronize()
    return driver.elapsed_ms(start, waited), driver.elapsed_ms(start, ended)
