"""Trace: what every reader returns for one GPU, whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.timeline import Intervals, Ns, Timeline
from weft.trace.schema import Message

UNKNOWN_NS = -1 << 62
"""Stands for a time that the trace does not contain."""


@dataclass(frozen=True)
class Step:
    """A marked step of the program: CPU times, in nanoseconds of the trace's clock."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class Trace:
    """One GPU's part of a trace file. Columns are parallel to those of `timeline`, sorted by start."""

    path: str
    rank: int | None
    world_size: int | None
    one_group: bool
    """Whether the job has only one process group, so that its size is the world size."""
    device: int
    device_name: str
    properties: dict[str, Any]
    timeline: Timeline
    launch_ns: Ns
    """When the CPU call that launched a span began; UNKNOWN_NS if the trace does not say."""
    launch_end_ns: Ns
    """When that call returned; UNKNOWN_NS if the trace does not say."""
    thread: npt.NDArray[np.int64]
    """Which CPU thread launched it; -1 if unknown."""
    correlation: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    message: npt.NDArray[np.int64]
    """Index into `messages`; 0 is "nothing known"."""
    messages: tuple[Message, ...]
    steps: tuple[Step, ...]
    blocking: Intervals
    """When a CPU thread waited for the GPU."""
    waits: npt.NDArray[np.int64]
    """Recorded event waits, rows of (time, stream, correlation of the record, recorded stream)."""
    events: int
    module: npt.NDArray[np.int64]
    """Index into `modules` of the innermost module that launched each communication span; -1 elsewhere."""
    modules: tuple[str, ...]
    host: str = ""
    """Name of the host; empty if the trace does not say."""
    cycle: int | None = None
    """Number of this trace among successive traces of the same GPU; None if there is only one."""
    partial: bool = False
    host_slowed: float = 1.0
    """Slowdown factor of the CPU under the profiler."""
    warnings: tuple[str, ...] = field(default=())
