"""Columns that a reader fills row by row, in the form that the Collector takes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.trace.events import GPU_COLUMNS, Collector, Interned
from weft.trace.native import Scanned
from weft.trace.schema import UNKNOWN_MESSAGE, Mark

LAUNCHING = ("launch", "memcpy", "memset", "graph")
BLOCKING = ("devicesynchronize", "streamsynchronize", "eventsynchronize", "ctxsynchronize")

_DEFAULTS = dict.fromkeys(GPU_COLUMNS, -1) | {"message": 0}
_MAX = 1 << 62


def grid_of_work_items(grid: Sequence[int], group: Sequence[int]) -> dict[str, int]:
    """`blocks` and `threads` of a HIP kernel, whose grid counts work items; empty if a size is unknown."""
    if min(*grid, *group) < 1:
        return {}
    blocks = [-(-items // each) for items, each in zip(grid, group, strict=True)]
    return {"blocks": math.prod(blocks), "threads": math.prod(group)}


@dataclass
class Columns:
    """GPU spans and CPU calls of one process. Times in nanoseconds."""

    gpu: list[tuple[int, ...]] = field(default_factory=list)
    launches: list[tuple[int, ...]] = field(default_factory=list)
    blocking: list[tuple[int, int]] = field(default_factory=list)
    names: Interned = field(default_factory=Interned)
    threads: Interned = field(default_factory=Interned)
    marks: list[Mark] = field(default_factory=list)
    odd_times: int = 0

    def span(self, kind: int, name: str, start: Any, end: Any, device: int, **known: Any) -> None:
        """Adds a kernel, copy or fill. Unknown values may be left out or be None."""
        if not (isinstance(start, int) and isinstance(end, int)) or end < start or abs(end) > _MAX:
            self.odd_times += 1
            return
        row = {**_DEFAULTS, **{key: value for key, value in known.items() if isinstance(value, int)}}
        number = self.names(json.dumps(name).encode())
        row.update(start=start, end=end, kind=kind, name=number, device=device)
        values = tuple(row[key] for key in GPU_COLUMNS)
        if all(-_MAX < value < _MAX for value in values):
            self.gpu.append(values)
        else:
            self.odd_times += 1

    def call(self, name: str, start: Any, end: Any, correlation: Any, thread: Any) -> None:
        """Adds a call of the CUDA or HIP runtime if it launches work or waits for the GPU."""
        if not (isinstance(start, int) and isinstance(end, int)) or end < start or abs(end) > _MAX:
            return
        plain = name.lower()
        if any(word in plain for word in BLOCKING):
            self.blocking.append((start, end))
        elif isinstance(correlation, int) and abs(correlation) < _MAX and any(w in plain for w in LAUNCHING):
            number = self.threads(str(thread).encode())
            self.launches.append((start, end, correlation, number, -1, -1, -1))

    def mark(self, name: str, start: int, end: int, thread: Any = None) -> None:
        """Adds a step (`ProfilerStep#…`), or the call of a collective (`nccl:…`) on a thread."""
        number = -1 if thread is None else self.threads(str(thread).encode())
        self.marks.append(Mark(name, start, end, number, -1, UNKNOWN_MESSAGE))

    def collector(self) -> Collector:
        """A Collector with all rows, as if they had been read from Kineto's JSON."""
        out = Collector()
        out.absorb(
            Scanned(
                events=len(self.gpu) + len(self.launches) + len(self.blocking),
                odd_times=self.odd_times,
                gpu=np.array(self.gpu, dtype=np.int64).reshape(-1, len(GPU_COLUMNS)),
                launches=np.array(self.launches, dtype=np.int64).reshape(-1, 7),
                blocking=np.array(self.blocking, dtype=np.int64).reshape(-1, 2),
                waits=np.empty((0, 5), dtype=np.int64),
                names=self.names.values(),
                threads=self.threads.values(),
                later=[],
            )
        )
        out.marks += self.marks
        return out
