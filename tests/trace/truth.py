"""A host and a GPU that execute launches in order, so what delayed each piece of work is known.

One CPU thread issues work to streams. A piece of work starts when its launch has arrived, its stream is free
and the events it waits for are over. The queue to the GPU has `depth` entries; a launch that finds it full
blocks until there is room. This code does not use the rules of the analysis.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trace_building import GEMM, TraceBuilder

LATENCY_NS = 4_000
CALL_NS = 2_500
EVENT_NS = 1_500


@dataclass
class Machine:
    """Builds the trace of one rank while it executes the program."""

    trace: TraceBuilder
    depth: int = 1024
    recorded: bool = False
    """Whether the trace has event waits, which the profiler records only on request."""
    now: int = 0
    free: dict[int, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)

    def launch(
        self, ns: int, *, stream: int = 7, comm: bool = False, after: int = 0, producer: int | None = None,
        copy: bool = False, until: int = 0, **args: object,
    ) -> tuple[int, int]:  # fmt: skip
        """Issues one piece of work; `after` is the end of what it waits for. Returns its end and its id."""
        begun = self.now
        full = len(self.starts) >= self.depth
        returned = max(begun, self.starts[-self.depth]) + CALL_NS if full else begun + CALL_NS
        start = max(
            returned - CALL_NS + LATENCY_NS, self.free.get(stream, 0), after + EVENT_NS if after else 0
        )
        end = max(start + ns, until)
        self.free[stream] = end
        self.starts.append(start)
        self.now = returned
        if self.recorded and producer is not None:
            self.trace.span(
                "cuda_sync", "Stream Wait Event", begun, begun, pid=9, tid=1, stream=stream, wait_on_stream=7,
                wait_on_cuda_event_record_corr_id=producer + 1,
            )  # fmt: skip
        if copy:
            identity = self.trace.gpu(
                "Memcpy HtoD (Pinned -> Device)", start, end, stream=stream, cat="gpu_memcpy"
            )
        elif comm:
            identity = self.trace.collective(start, end, stream=stream, **args)
        else:
            identity = self.trace.gpu(GEMM, start, end, stream=stream)
        self.trace.correlation += 1  # recording an event takes its own id
        self.trace.span(
            "cuda_runtime", "cudaLaunchKernel", begun, returned, pid=9, tid=1, cbid=211, correlation=identity
        )
        return end, identity

    def work(self, ns: int) -> None:
        """The CPU is busy with something else."""
        self.now += ns

    def synchronize(self) -> None:
        """The CPU waits for everything it issued."""
        done = max(self.free.values(), default=0)
        end = max(self.now, done) + CALL_NS
        self.trace.span(
            "cuda_runtime", "cudaDeviceSynchronize", self.now, end, pid=9, tid=1, cbid=165, correlation=0
        )
        self.now = end
