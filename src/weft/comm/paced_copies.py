"""Move the data of a paced collective by the driver's copies instead of weft's kernel."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from threading import Lock
from typing import Any

from weft.comm.paced_plan import PlannedKernel
from weft.gpu.driver import Driver


def driver_copies(planned: PlannedKernel, stream: int) -> list[tuple[Any, ...]]:
    """The driver calls (name, then arguments) that do the copies of a planned kernel that only copies.

    Repeated parts are doubled with each call, because calls take longer than small copies.
    """
    found: list[tuple[Any, ...]] = []
    on = c_void_p(stream)

    def add(target: int, source: int, size: int) -> None:
        found.append(("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(size), on))

    for copy in planned.copies:
        part, whole = copy.size_bytes, copy.size_bytes * copy.copies
        if not copy.source:
            found.append(("cuMemsetD8Async", c_uint64(copy.target), c_ubyte(0), c_size_t(whole), on))
            continue
        if copy.source != copy.target:
            add(copy.target, copy.source, part)
        done = part
        while 0 < done < whole:
            size = min(done, whole - done)
            add(copy.target + done, copy.target, size)
            done += size
    return found


class UrgentCopies:
    """Runs copies in order with the other work of their stream, but on a stream of the highest priority.

    Within a GPU the driver copies with SMs. At the priority of a collective's stream the copies could wait
    for a whole GEMM, unlike copies by copy engines. Needs a current CUDA context.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        _, highest = driver.priority_range()
        self._stream = driver.stream(highest)
        self._before, self._after = driver.event(timing=False), driver.event(timing=False)
        self._lock = Lock()  # no other thread may record the events in between

    def ready(self, planned: PlannedKernel) -> Callable[[], None]:
        """A function that issues the copies of a planned kernel in order with its stream."""
        call, stream, no_flags = self._driver.call, c_void_p(planned.call.stream), c_uint(0)
        calls = [
            ("cuEventRecord", self._before, stream),
            ("cuStreamWaitEvent", self._stream, self._before, no_flags),
            *driver_copies(planned, self._stream.value or 0),
            ("cuEventRecord", self._after, self._stream),
            ("cuStreamWaitEvent", stream, self._after, no_flags),
        ]

        def issue() -> None:
            with self._lock:
                for given in calls:
                    call(*given)

        return issue
