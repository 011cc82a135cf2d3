"""Launch: one kernel, delay or copy of a simulated GPU. Pure data, and the program that they make up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class LaunchKind(IntEnum):
    """How a launch takes up the GPU."""

    GRID = 0
    """Blocks that each have their work, as in most kernels."""
    POOL = 1
    """Persistent: the resident blocks share out pieces of work and stay until none is left."""
    DELAY = 2
    """A wait on its own stream that takes no SM."""
    ENGINE = 3
    """A copy engine: takes no SM."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one block takes of an SM, in allocation units of the hardware."""

    warps: int
    registers: int
    """Over all lanes, as allocated."""
    shared_bytes: int
    """Driver's reserve included, as allocated."""


NOTHING = Footprint(warps=0, registers=0, shared_bytes=0)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a block is. Work is bytes through the shared cache."""

    sm_rate: float = 0.0
    """Bytes per second that an SM gives to all compute blocks on it; 0: it does not compete for the SM."""
    block_rate: float = 1e18
    """Bytes per second that a block reaches by itself."""
    window_bytes: float = 1e18
    """Bytes that a block keeps in flight: its rate is at most window / latency."""
    miss: float = 0.0
    """Share of the bytes that goes on to device memory."""
    start_s: float = 0.0
    """What it takes to start a block, alone."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch."""

    name: str
    kind: LaunchKind = LaunchKind.GRID
    comm: bool = False
    stream: int = 0
    priority: int = 0
    """Larger goes first."""
    runs: tuple[tuple[int, float], ...] = ()
    """Blocks in launch order, run-length coded: (count, bytes of work of each)."""
    units: int = 0
    unit_bytes: float = 0.0
    """POOL: pieces of work, and bytes of each."""
    footprint: Footprint = NOTHING
    speed: Speed = field(default_factory=Speed)
    group: int = -1
    """Index of the first launch of the collective that this is one rank of; -1: of none."""
    first_sm: int = 0
    """SMs below this one are kept free of it."""
    after: tuple[tuple[int, float], ...] = ()
    """Launches (by index) that must end first, each with the seconds from its end to this start."""
    seconds: float = 0.0
    """DELAY and ENGINE: how long it takes."""

    @property
    def blocks(self) -> int:
        return sum(count for count, _ in self.runs)
