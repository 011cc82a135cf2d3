"""Builds profiler traces with known content. Times are integer nanoseconds; the text has all their digits."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE_NS = 1_700_000_000_123_456_789  # near 1.7e15 µs, where float64 has steps of 0.25 µs
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"


def us_text(ns: int) -> str:
    """Decimal microseconds with three places."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03}"


@dataclass
class TraceBuilder:
    """Collects events of one rank; `clock_ns` is added to every time, as a host's clock would be."""

    rank: int = 0
    world_size: int = 2
    clock_ns: int = BASE_NS
    device_name: str = "NVIDIA H200"
    device: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    correlation: int = 100

    def span(self, cat: str, name: str, start: int, end: int, *, pid: Any, tid: Any, **args: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": f"@{us_text(start + self.clock_ns)}@",
                "dur": f"@{us_text(end - start)}@",
                "args": args,
            }
        )

    def gpu(
        self,
        name: str,
        start: int,
        end: int,
        *,
        stream: int = 7,
        cat: str = "kernel",
        launch: int | None = None,
        thread: int = 1,
        correlation: int | None = None,
        grid: tuple[int, int, int] = (1024, 1, 1),
        block: tuple[int, int, int] = (128, 1, 1),
        **args: Any,
    ) -> int:
        """A kernel, copy or fill, and its call at `launch` if given. Returns the correlation id."""
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        shape: dict[str, Any] = {}
        if cat == "kernel":
            shape = {"registers per thread": 96, "shared memory": 0, "grid": list(grid), "block": list(block)}
        args = {
            "device": self.device,
            "context": 1,
            "stream": stream,
            "correlation": correlation,
            **shape,
            **args,
        }
        self.span(cat, name, start, end, pid=self.device, tid=stream, **args)
        if launch is not None:
            self.span(
                "cuda_runtime", "cudaLaunchKernel", launch, launch + 3_000, pid=9, tid=thread, cbid=211,
                correlation=correlation,
            )  # fmt: skip
        return correlation

    def collective(
        self, start: int, end: int, *, stream: int = 20, elements: int = 1 << 20, **more: Any
    ) -> int:
        """An all-reduce that says what it is."""
        known = {
            "Collective name": "allreduce",
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": self.world_size,
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(self.world_size))),
        }
        shape = {"grid": (16, 1, 1), "block": (544, 1, 1)}
        return self.gpu(NCCL, start, end, stream=stream, **{**shape, **known, **more})

    def step(self, number: int, start: int, end: int) -> None:
        self.span("user_annotation", f"ProfilerStep#{number}", start, end, pid=9, tid=1)

    def document(self) -> dict[str, Any]:
        return {
            "schemaVersion": 1,
            "deviceProperties": [
                {
                    "id": self.device,
                    "name": self.device_name,
                    "computeMajor": 9,
                    "computeMinor": 0,
                    "numSms": 132,
                    "warpSize": 32,
                    "maxThreadsPerMultiprocessor": 2048,
                    "regsPerMultiprocessor": 65536,
                    "sharedMemPerMultiprocessor": 233472,
                }
            ],
            "distributedInfo": {
                "backend": "nccl",
                "rank": self.rank,
                "world_size": self.world_size,
                "pg_count": 1,
            },
            "traceEvents": self.events,
            "traceName": "built",
        }

    def text(self, indent: int | None = 2) -> str:
        return as_text(self.document(), indent)

    def write(self, path: Path) -> Path:
        return write_text(path, self.text())


def as_text(document: Any, indent: int | None = None) -> str:
    """JSON with the marked times as bare numbers."""
    return re.sub(r'"@(.*?)@"', r"\1", json.dumps(document, indent=indent))


def write_text(path: Path, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    if path.suffix == ".gz":
        data = gzip.compress(data, 6)
    elif path.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(data)
    return path
