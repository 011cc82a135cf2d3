"""Binding to the compiled core, by ctypes: passes launches to the C library and reads the results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.errors import UnavailableError, UsageError
from weft.sim.launches import Launch

CORE_LIBRARY = "libweft_sim.so"
"""File name of the compiled core, next to this module."""
SHARPNESS = 4.0
"""Exponent that combines two limits: where both are equal, the result is 84% of either."""
_OK, _NEVER_FITS, _STUCK, _NO_MEMORY, _TOO_MANY = range(5)


class DeadlockError(UsageError):
    """The blocks of a collective can never all be resident; a real GPU would hang."""


class NeverFitsError(UsageError):
    """A block of a kernel does not fit on an SM."""


@dataclass(frozen=True, kw_only=True)
class SimMachine:
    """The limits and rates of one GPU that the core needs."""

    name: str
    sms: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    shared_bytes_per_sm: int
    latency_s: float
    cache_bytes_per_s: float
    memory_bytes_per_s: float
    in_order: bool = False
    """Whether a launch fills the SMs in turn, starting at the first; otherwise it takes the emptiest SM."""
    sharpness: float = SHARPNESS
    """How sharply the delivered bandwidth saturates when demand exceeds it."""


@dataclass(frozen=True, eq=False)
class SimOutcome:
    """Start and end of each launch, in seconds, and the number of simulated events."""

    start_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    total_s: float
    block_events: int
    changes: npt.NDArray[np.void]
    """Columns time, sm, launch, change in resident blocks; sorted by time. Empty without `log`."""


class _Gpu(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("sms", "warps", "blocks", "in_order")),
        *((name, c_int64) for name in ("registers", "shared")),
        *((name, c_double) for name in ("latency", "bandwidth", "memory", "sharpness")),
    )


_LAUNCH = np.dtype(
    [
        (n, "i4")
        for n in (
            "kind",
            "priority",
            "first_run",
            "runs",
            "first_dep",
            "deps",
            "warps",
            "group",
            "first_sm",
            "pad",
        )
    ]
    + [(n, "i8") for n in ("registers", "shared", "units")]
    + [
        (n, "f8")
        for n in (
            "unit_work",
            "sm_rate",
            "block_rate",
            "window",
            "miss",
            "weight",
            "spare",
            "start_work",
            "delay",
        )
    ]
)
CHANGE = np.dtype([("time", "f8"), ("sm", "i4"), ("launch", "i4"), ("change", "i4"), ("pad", "i4")])


class _Totals(Structure):
    _fields_ = (
        ("block_events", c_int64),
        ("changes", c_int64),
        ("stuck_launch", c_int32),
        ("pad", c_int32),
        ("end", c_double),
    )


@cache
def _library() -> ctypes.CDLL:
    path = Path(__file__).parent / CORE_LIBRARY
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        raise UnavailableError(
            "the simulator's core is not built: install a C compiler (cc) and reinstall weft, "
            "or run `python hatch_build.py` in a checkout"
        ) from None
    pointer = ctypes.c_void_p
    library.weft_simulate.argtypes = [
        POINTER(_Gpu), c_int32, *[pointer] * 7, c_int64, POINTER(_Totals),
    ]  # fmt: skip
    library.weft_simulate.restype = ctypes.c_int
    return library


def simulate_launches(machine: SimMachine, launches: Sequence[Launch], *, log: bool = False) -> SimOutcome:
    """Simulate the launches. With `log`, record every change of residency, to compute occupancy over time.

    NeverFitsError and DeadlockError name the launch that caused them.
    """
    rows, counts, work, deps, latencies = _columns(machine, launches)
    spans = np.zeros((len(launches), 2))
    room = 2 * sum(launch.blocks for launch in launches) if log else 0
    changes = np.zeros(room, dtype=CHANGE)
    totals = _Totals()
    gpu = _Gpu(
        machine.sms, machine.warps_per_sm, machine.blocks_per_sm, int(machine.in_order),
        machine.registers_per_sm, machine.shared_bytes_per_sm,
        machine.latency_s, machine.cache_bytes_per_s, machine.memory_bytes_per_s, machine.sharpness,
    )  # fmt: skip
    columns = (rows, counts, work, deps, latencies, spans, changes)
    status = _library().weft_simulate(
        ctypes.byref(gpu), len(launches), *(c.ctypes.data for c in columns), room, ctypes.byref(totals)
    )
    if status != _OK:
        raise _problem(status, machine, launches, totals.stuck_launch)
    return SimOutcome(spans[:, 0], spans[:, 1], totals.end, totals.block_events, changes[: totals.changes])


def _columns(machine: SimMachine, launches: Sequence[Launch]) -> tuple[npt.NDArray[np.generic], ...]:
    rows = np.zeros(len(launches), dtype=_LAUNCH)
    counts: list[int] = []
    work: list[float] = []
    deps: list[int] = []
    latencies: list[float] = []
    for i, launch in enumerate(launches):
        speed, foot = launch.speed, launch.footprint
        # Convert a block's start time to work, at the rate that the block reaches alone.
        alone = min(speed.block_rate, speed.window_bytes / machine.latency_s, speed.sm_rate or 1e18)
        rows[i] = (
            launch.kind, launch.priority, len(counts), len(launch.runs), len(deps), len(launch.after),
            foot.warps, launch.group, launch.first_sm, 0, foot.registers, foot.shared_bytes,
            launch.units, launch.unit_bytes,
            speed.sm_rate, speed.block_rate, speed.window_bytes, speed.miss, speed.weight, speed.spare,
            speed.start_s * alone, launch.seconds,
        )  # fmt: skip
        counts += [count for count, _ in launch.runs]
        work += [value for _, value in launch.runs]
        deps += [index for index, _ in launch.after]
        latencies += [seconds for _, seconds in launch.after]
    return (
        rows,
        np.array(counts, dtype=np.int64),
        np.array(work, dtype=np.float64),
        np.array(deps, dtype=np.int32),
        np.array(latencies, dtype=np.float64),
    )


def _problem(status: int, machine: SimMachine, launches: Sequence[Launch], which: int) -> Exception:
    name = launches[which].name if which >= 0 else "the launches"
    if status == _NEVER_FITS:
        return NeverFitsError(
            f"{name}: no block fits on an SM of {machine.name}; use fewer threads, registers or less "
            "shared memory per block (a smaller tile, fewer stages)"
        )
    if status == _STUCK:
        return DeadlockError(
            f"{name}: its blocks can never all be resident on {machine.name}, so the collective would hang "
            "(as on a real GPU): set comm.max_ctas lower"
        )
    if status == _TOO_MANY:
        return UsageError(f"{name}: more than 48 kernels run at once; use fewer streams or ranks")
    return UnavailableError("the simulator ran out of memory; use a smaller workload")
