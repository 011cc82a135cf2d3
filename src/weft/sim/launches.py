"""Launch: one kernel, delay or copy on a simulated GPU, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class LaunchKind(IntEnum):
    """How a launch uses the GPU."""

    GRID = 0
    """A grid of blocks, each with its own work, as in most kernels."""
    POOL = 1
    """A persistent kernel: the resident blocks take units of work from a pool until it is empty."""
    DELAY = 2
    """A wait on its stream; uses no SM."""
    ENGINE = 3
    """A copy by a copy engine; uses no SM."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The resources of an SM that one block takes, rounded up to allocation units."""

    warps: int
    registers: int
    """Registers of all lanes of all warps."""
    shared_bytes: int
    """Includes the driver's reserve."""


NO_FOOTPRINT = Footprint(warps=0, registers=0, shared_bytes=0)
"""The footprint of launches without blocks."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The rate of a block. Work is measured in bytes through the shared cache (L2)."""

    sm_rate: float = 0.0
    """Bytes per second that an SM divides among its compute blocks; 0: this block takes no share of them."""
    block_rate: float = 1e18
    """Bytes per second that a block reaches alone."""
    window_bytes: float = 1e18
    """Bytes that a block keeps in flight; its rate is at most window / latency."""
    miss: float = 0.0
    """Fraction of the bytes that miss the cache and go to device memory."""
    weight: float = 1.0
    """Cache bandwidth that one byte uses, in bytes; above 1 for requests shorter than a cache line."""
    spare: float = 1.0
    """Factor by which device memory may slow down before it slows the block; 1: no slack."""
    start_s: float = 0.0
    """Time to start a block that runs alone."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch on a stream."""

    name: str
    kind: LaunchKind = LaunchKind.GRID
    comm: bool = False
    stream: int = 0
    priority: int = 0
    """Launches of higher priority are placed first."""
    runs: tuple[tuple[int, float], ...] = ()
    """Blocks in launch order, run-length encoded: (count, bytes of work per block)."""
    units: int = 0
    unit_bytes: float = 0.0
    """POOL: units of work, and bytes per unit."""
    footprint: Footprint = NO_FOOTPRINT
    speed: Speed = field(default_factory=Speed)
    group: int = -1
    """Index of the first launch of the collective that this launch is part of; -1 if none."""
    first_sm: int = 0
    """The launch does not use SMs below this index."""
    after: tuple[tuple[int, float], ...] = ()
    """Dependencies: (index of a launch, seconds from its end to the start of this one)."""
    seconds: float = 0.0
    """DELAY and ENGINE: duration."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(count for count, _ in self.runs)
