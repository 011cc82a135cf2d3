"""Random programs of the CUDA driver against the fake driver: run by fuzz.py, natively and under weft.

    python fuzz_driver_program.py FIRST_SEED COUNT [trace]

Prints, as JSON, what every call of each program returned, which launches reached the driver, and how often
the driver was misused. With `trace`, and under weft, the tracer starts and stops between the calls.
"""

from __future__ import annotations

import json
import os
import random
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

from driver import call, kernel, launch, launch_ex, library, records

from weft.shim import tracer

STEPS = 120
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PROGRAMMATIC, PRIORITY = (6, 1), (8, -2)
FIXED_STREAMS = (0, 0x10, 0x20, 0x30, 1, 2)
Kernels = list[c_void_p]


def make_kernels() -> Kernels:
    return [
        kernel("gemm"),
        kernel("norm", 64, 1024, True),
        kernel(ALL_REDUCE, 96, 36800),
        kernel("ncclDevKernel_Generic", 96, 1000),
        kernel("big", 255, 40000),
    ]


class Program:
    """One program. Its choices come only from its seed, so that nothing weft changes can affect them."""

    def __init__(self, kernels: Kernels, traced: bool, seed: int) -> None:
        self.lib, self.kernels, self.traced = library(), kernels, traced
        self.random = random.Random(seed)
        self.results: list[tuple[Any, ...]] = []
        self.streams: list[c_void_p] = []
        self.events: list[c_void_p] = []
        self.graphs: list[c_void_p] = []
        self.instances: list[c_void_p] = []
        self.capturing: c_void_p | None = None

    def run(self) -> list[tuple[Any, ...]]:
        actions = {
            self.launch: 50,
            self.make_stream: 6,
            self.destroy_stream: 5,
            self.begin_capture: 5,
            self.end_capture: 8,
            self.instantiate: 4,
            self.launch_graph: 4,
            self.destroy_instance: 3,
            self.set_limit: 4,
            self.get_limit: 3,
            self.occupancy: 2,
            self.make_event: 2,
            self.record_and_wait: 2,
            self.finish: 2,
            self.exchange_mode: 1,
            self.unload: 1,
            self.reset: 1,
            self.fork: 1,
            self.trace: 2,
        }
        for action in self.random.choices(list(actions), list(actions.values()), k=STEPS):
            action()
        if self.capturing:
            self.end_capture()
        self.lib.cuThreadExchangeStreamCaptureMode(byref(c_int(0)))
        if self.traced and tracer.recording():
            tracer.stop()
        for stream in self.streams:
            self.lib.cuStreamDestroy_v2(stream)
        return self.results

    def stream(self) -> int:
        return self.random.choice([*FIXED_STREAMS, *(made.value or 0 for made in self.streams)])

    def launch(self) -> None:
        choice, stream = self.random.choice, self.stream()
        function, grid = choice(self.kernels), choice([1, 100, 5000, 100_000])
        shared = choice([0, 0, 100, 40_000, 60_000])
        kind = choice(
            ["plain", "plain", "per thread", "ex", "programmatic", "priority", "null", "cooperative"]
        )
        attributes = {"programmatic": (PROGRAMMATIC,), "priority": (PRIORITY,)}.get(kind, ())
        if kind == "plain":
            result = launch(function, grid, 128, shared, stream)
        elif kind == "per thread":
            result = launch(function, grid, 128, shared, stream, "cuLaunchKernel_ptsz")
        elif kind == "cooperative":
            sizes = [c_uint(n) for n in (grid, 1, 1, 128, 1, 1, shared)]
            result = call("cuLaunchCooperativeKernel", function, *sizes, c_void_p(stream), None)
        else:
            function = c_void_p(0) if kind == "null" else function
            result = launch_ex(function, grid, 128, shared, stream, attributes)
        self.results.append((kind, result))

    def make_stream(self) -> None:
        made, flags, priority = c_void_p(), self.random.choice([0, 1]), self.random.choice([0, -3])
        self.results.append(
            ("make stream", self.lib.cuStreamCreateWithPriority(byref(made), flags, priority))
        )
        self.streams.append(made)

    def destroy_stream(self) -> None:
        if not self.streams:
            return
        stream = self.streams.pop(self.random.randrange(len(self.streams)))
        if self.capturing and self.capturing.value == stream.value:
            self.capturing = None
        self.results.append(("destroy stream", self.lib.cuStreamDestroy_v2(stream)))

    def begin_capture(self) -> None:
        if self.capturing:
            return
        self.capturing = c_void_p(self.random.choice([0x10, 0x20, *(made.value for made in self.streams)]))
        mode = self.random.choice([0, 1, 2])
        self.results.append(("capture", self.lib.cuStreamBeginCapture_v2(self.capturing, mode)))

    def end_capture(self) -> None:
        if not self.capturing:
            return
        graph = c_void_p()
        result = self.lib.cuStreamEndCapture(self.capturing, byref(graph))
        self.capturing = None
        self.results.append(("end capture", result))
        self.graphs += [graph] if result == 0 else []

    def instantiate(self) -> None:
        if self.graphs:
            made = c_void_p()
            result = self.lib.cuGraphInstantiateWithFlags(byref(made), self.graphs[-1], c_ulonglong(0))
            self.results.append(("instantiate", result))
            self.instances.append(made)

    def launch_graph(self) -> None:
        if self.instances:
            instance = self.random.choice(self.instances)
            self.results.append(("launch graph", self.lib.cuGraphLaunch(instance, c_void_p(self.stream()))))

    def destroy_instance(self) -> None:
        if self.instances:
            self.results.append(("destroy graph", self.lib.cuGraphExecDestroy(self.instances.pop())))

    def set_limit(self) -> None:
        value = self.random.choice([30_000, 49_152, 59_999, 100_000, 100_000, 300_000])
        result = self.lib.cuFuncSetAttribute(self.random.choice(self.kernels), MAX_DYNAMIC_SHARED, value)
        self.results.append(("set limit", result))

    def get_limit(self) -> None:
        value, function = c_int(-1), self.random.choice(self.kernels)
        result = self.lib.cuFuncGetAttribute(byref(value), MAX_DYNAMIC_SHARED, function)
        if result:  # a CUkernel
            result = self.lib.cuKernelGetAttribute(byref(value), MAX_DYNAMIC_SHARED, function, 0)
        self.results.append(("get limit", result, value.value))

    def occupancy(self) -> None:
        blocks, function = c_int(-1), self.random.choice(self.kernels)
        shared = c_size_t(self.random.choice([0, 40_000, 60_000, 120_000]))
        result = self.lib.cuOccupancyMaxActiveBlocksPerMultiprocessor(byref(blocks), function, 128, shared)
        self.results.append(("occupancy", result, blocks.value))

    def make_event(self) -> None:
        made = c_void_p()
        self.results.append(("make event", self.lib.cuEventCreate(byref(made), 2)))
        self.events.append(made)

    def record_and_wait(self) -> None:
        if self.events and not self.capturing:
            stream, event = c_void_p(self.stream()), self.events[-1]
            self.results.append(("record", self.lib.cuEventRecord(event, stream)))
            self.results.append(("wait", self.lib.cuStreamWaitEvent(stream, event, 0)))

    def finish(self) -> None:
        self.lib.fake_finish_all()

    def exchange_mode(self) -> None:
        mode = c_int(self.random.choice([0, 1, 2]))
        result = self.lib.cuThreadExchangeStreamCaptureMode(byref(mode))
        self.results.append(("exchange mode", result, mode.value))

    def unload(self) -> None:
        self.results.append(("unload", self.lib.cuModuleUnload(None)))

    def reset(self) -> None:
        if not self.capturing:
            self.results.append(("reset", self.lib.cuDevicePrimaryCtxReset_v2(0)))
            self.lib.fake_context_alive()

    def fork(self) -> None:
        """A child launches what it inherited, which only the fake driver allows."""
        if self.capturing:
            return
        child = os.fork()
        if child == 0:
            results = [launch(one, 100, 128, 0, 0x10) for one in self.kernels]
            os._exit(sum(bool(result) << place for place, result in enumerate(results)))
        self.results.append(("fork", os.waitpid(child, 0)[1]))

    def trace(self) -> None:
        if self.traced and not self.capturing:
            (tracer.stop if tracer.recording() else tracer.start)()


def main() -> None:
    first, count = map(int, sys.argv[1:3])
    injected = "libweft_shim" in Path("/proc/self/maps").read_text()
    lib, kernels, programs = library(), make_kernels(), {}
    for seed in range(first, first + count):
        lib.fake_forget()
        unsafe = lib.fake_unsafe_calls()
        results = Program(kernels, injected and "trace" in sys.argv[3:], seed).run()
        own = [record for record in records() if not record["name"].startswith("weft_")]
        programs[seed] = {
            "results": results,
            "launches": [[own_[key] for key in ("name", "grid", "threads", "captured")] for own_ in own],
            "unsafe calls": lib.fake_unsafe_calls() - unsafe,
            "calls of a dead context": lib.fake_dead_calls(),
            "broken programmatic": lib.fake_broken_programmatic(),
        }
    json.dump(programs, sys.stdout)


if __name__ == "__main__":
    main()
