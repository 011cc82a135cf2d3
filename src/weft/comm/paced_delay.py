"""Delays on a CUDA stream that use no CTA (csrc/paced_delay.c); they represent copies by copy engines.

One GPU cannot make real ones: within a GPU the driver copies with SMs, and the host's bus is slower than
NVLink. So the stream is held up as long as the node's copies would take, and meanwhile the driver copies the
data within the GPU. A graph capture cannot contain a delay: replays would wait without anything to end it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import c_int, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import UnavailableError
from weft.gpu.driver import Driver, load_driver

_log = logging.getLogger(__name__)

PACED_LIBRARY = Path(__file__).with_name("libweft_paced.so")
DELAY_SLOTS = 4096
"""Number of delays that can be pending at once."""
_SLOT_BYTES = 8
_PORTABLE_AND_MAPPED = 1 | 2  # flags of cuMemHostAlloc


class StreamDelays:
    """The delays of this process. Needs a current CUDA context. Pins its host memory once."""

    def __init__(self, driver: Driver, path: Path = PACED_LIBRARY) -> None:
        if not path.is_file():
            raise UnavailableError(
                f"{path} is missing: install a wheel of weft for Linux, or run hatch_build.py"
            )
        self._driver, library = driver, ctypes.CDLL(str(path))
        self.issue: Callable[[int, int], int] = library.weft_delay
        """Hold up a stream (handle, nanoseconds). Returns a CUDA error code, like the driver's functions."""
        library.weft_delay.argtypes, library.weft_delay.restype = (c_void_p, c_uint64), c_int
        ticket = ctypes.POINTER(c_uint64)
        library.weft_delay_begin.argtypes = (c_void_p, c_uint64, ticket)
        library.weft_delay_end.argtypes = (c_void_p, c_uint64)
        library.weft_delay_counts.argtypes, library.weft_delay_counts.restype = (ticket, ticket), None
        library.weft_delay_open.argtypes = (c_void_p, c_void_p, c_void_p, c_uint64, c_uint)
        self._library = library
        functions = [driver.address(f"cuStream{name}Value32_v2") for name in ("Write", "Wait")]
        host, device, size = c_void_p(), c_uint64(), DELAY_SLOTS * _SLOT_BYTES
        driver.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), c_uint(_PORTABLE_AND_MAPPED))
        driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), host, c_uint(0))
        ctypes.memset(host, 0, size)
        if library.weft_delay_open(*functions, host, device, DELAY_SLOTS):
            raise UnavailableError("cannot start the thread that ends stream delays")

    def hold(self, stream: int, us: float, action: Callable[[], object]) -> None:
        """Hold up a stream for `us` microseconds, or longer if what `action` issues on it takes longer.

        Raises UnavailableError if the driver cannot do it.
        """
        ticket = c_uint64()
        self._check(self._library.weft_delay_begin(stream, round(1e3 * us), ctypes.byref(ticket)))
        action()
        self._check(self._library.weft_delay_end(stream, ticket))

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise UnavailableError(f"a stream cannot be delayed without a kernel: CUDA error {code}")

    def capturing(self, stream: int) -> bool:
        """Whether a graph is being captured on this stream."""
        status = c_int()
        self._driver.call("cuStreamIsCapturing", c_void_p(stream), ctypes.byref(status))
        return bool(status.value)

    def counts(self) -> tuple[int, float]:
        """Number of delays so far, and the most microseconds by which the host ended one too late."""
        count, late_ns = c_uint64(), c_uint64()
        self._library.weft_delay_counts(ctypes.byref(count), ctypes.byref(late_ns))
        return count.value, late_ns.value / 1e3


@cache
def stream_delays() -> StreamDelays:
    """The delays of this process, on its CUDA driver."""
    return StreamDelays(load_driver())


class ReadyDelay:
    """A collective by copy engines that can be issued repeatedly.

    `copy` issues the copies of its data. `kernel` launches the same collective on SMs, for graph captures and
    drivers that cannot delay a stream.
    """

    leads = True

    def __init__(
        self,
        delays: StreamDelays,
        stream: int,
        us: float,
        copy: Callable[[], object],
        kernel: Callable[[float], object],
    ) -> None:
        self._delays, self._stream, self._us, self._copy, self._kernel = delays, stream, us, copy, kernel

    def launch(self, late_us: float) -> None:
        """Issue the collective; its last rank arrives `late_us` microseconds later than this one."""
        if self._delays.capturing(self._stream):
            self._kernel(late_us)
            return
        try:
            self._delays.hold(self._stream, self._us + late_us, self._copy)
        except UnavailableError as error:
            _log.warning("%s; the collective runs on SMs", error)
            self._kernel(late_us)


def copies_note(node: Any) -> str:
    """How one GPU represents a node's copy engines: method, rate and basis of the rate."""
    rate = node.copy_engines
    if rate is None:
        return "none: collectives run on SMs"
    rated = f"{rate.gb_s:g} GB/s ({rate.low:g} to {rate.high:g}, {rate.basis})"
    return f"{node.copies_as} with a local copy, {rated}"
