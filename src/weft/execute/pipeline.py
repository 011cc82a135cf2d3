"""The pipeline of a Workload on one GPU: launches, streams and dependencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Pipeline:
    """Issues the iterations: compute_i, then collective_i, which depends on it, on every rank's stream."""

    def __init__(
        self,
        gpu: Any,
        lanes: list[Any],
        calls: list[Callable[[], object]],
        streams: list[Any],
        collective: Callable[[], None],
        mode: str,
        wait_us: float,
    ) -> None:
        self.gpu, self.lanes, self.calls = gpu, lanes, calls
        self.streams, self.collective, self.mode, self.wait_us = streams, collective, mode, wait_us

    def issue(self, iterations: int, spin_ms: float, marks: list[Any] | None = None) -> tuple[Any, Any, bool]:
        """Launch everything. Returns the begin and end events, and whether all launches preceded the begin.

        `marks`, if given, receives (kind, start event, end event) of each compute and rank 0's collectives.
        """
        gpu, begin, end = self.gpu, self.gpu.event(timing=True), self.gpu.event(timing=True)
        with gpu.on(self.lanes[0]):
            gpu.flush_l2()
            if spin_ms:
                gpu.sleep(spin_ms)
            begin.record(self.lanes[0])
        for stream in (*self.lanes[1:], *self.streams):
            stream.wait_event(begin)
        ended: list[Any] = []
        for i in range(iterations):
            computed = self._compute(i, ended, marks) if self.mode != "comm" else begin
            if self.mode != "compute":
                ended = self._communicate(computed, marks)
        for stream in (*self.lanes[1:], *self.streams):
            self.lanes[0].wait_event(_recorded(gpu, stream))
        end.record(self.lanes[0])
        return begin, end, not begin.query()

    def _compute(self, i: int, ended: list[Any], marks: list[Any] | None) -> Any:
        lane, call = self.lanes[i % len(self.lanes)], self.calls[i % len(self.lanes)]
        if self.mode == "sequential":
            for event in ended:
                lane.wait_event(event)
        with self.gpu.on(lane):
            if self.wait_us and i:
                self.gpu.sleep(self.wait_us / 1000)
            start = _recorded(self.gpu, lane, timing=True) if marks is not None else None
            call()
            computed = _recorded(self.gpu, lane, timing=marks is not None)
        if marks is not None:
            marks.append(("compute", start, computed))
        return computed

    def _communicate(self, computed: Any, marks: list[Any] | None) -> list[Any]:
        for stream in self.streams:
            stream.wait_event(computed)
        timing = marks is not None
        start = _recorded(self.gpu, self.streams[0], timing=True) if timing else None
        self.collective()
        ended = [_recorded(self.gpu, stream, timing=timing) for stream in self.streams]
        if marks is not None:
            marks.append(("comm", start, ended[0]))
        return ended


def _recorded(gpu: Any, stream: Any, *, timing: bool = False) -> Any:
    event = gpu.event(timing=timing)
    event.record(stream)
    return event
