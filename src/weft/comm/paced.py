"""Paced collectives: an NCCL for one rank of a node profile; the other ranks exist only as ghosts.

`load_paced` returns a library with NCCL's C API (csrc/paced_nccl.c). Its collectives use the CTAs, the memory
traffic and the time that one rank would use on the node. The ghosts have this rank's data. The shim handles
the library like any NCCL: priority, head start, CTA limits, rules by collective and size, traces.

Collectives by copy engines (`comm.engine: dma`, buffers in symmetric windows) are delays that use no CTA,
during which the driver copies the data within the GPU (weft.comm.paced_delay, weft.comm.paced_copies).

Not modelled: protocol and chunk size of a collective, and the fusion of a group's calls into one kernel,
except for sends and receives.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint64
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.comm.nccl import NCCL_DTYPES, Library
from weft.comm.node import Node, Paced
from weft.comm.paced_delay import PACED_LIBRARY, copies_note
from weft.comm.paced_launch import PacedLauncher
from weft.comm.paced_plan import SCALED_TYPES, GhostStages, PlannedKernel, RankCall, plan_calls
from weft.errors import UnavailableError, UsageError
from weft.gpu.driver import load_driver
from weft.shim.engine import leave_note
from weft.shim.layout import NCCL_OPERATIONS

_log = logging.getLogger(__name__)

LATE_VARIABLE = "WEFT_GHOST_LATE"
"""Environment variable: how late the last rank arrives, `US` or `US,SIGMA` in microseconds."""
STAGE_VARIABLE = "WEFT_GHOST_STAGE"
"""Environment variable: microseconds per microbatch in each ghost stage of a pipeline."""
MOST_REMEMBERED = 2048
"""Number of call groups whose kernel launches are cached."""
_UNHANDLED = 1  # ncclUnhandledCudaError
_TYPE_NAMES = {number: name for name, number in reversed(NCCL_DTYPES.items())}
_TYPE_BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}


@dataclass(frozen=True)
class Lateness:
    """How much later than this rank the last one arrives: normally distributed, at least 0."""

    mean_us: float = 0.0
    sigma_us: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lateness:
        """Parse `US` or `US,SIGMA`. Raises UsageError."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or not all(0 <= number <= 1e6 for number in numbers):
            raise UsageError(f"late {text!r} is not valid; use US or US,SIGMA in microseconds, such as 50,20")
        return cls(*numbers)

    def draw(self, source: random.Random) -> float:
        """Draw the delay of one collective, in microseconds."""
        if not self.sigma_us:
            return self.mean_us
        return max(0.0, source.gauss(self.mean_us, self.sigma_us))


def parse_stage(text: str) -> float:
    """Parse the microseconds of a ghost stage. Raises UsageError."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1e6:
        raise UsageError(f"stage {text!r} is not valid; use microseconds of a microbatch, such as 1500")
    return found


class _Call(ctypes.Structure):
    """paced_call of csrc/paced_nccl.c."""

    _fields_ = (
        ("send", c_uint64),
        ("recv", c_uint64),
        ("count", c_uint64),
        ("comm", c_uint64),
        ("stream", c_uint64),
        ("algorithm", c_char_p),
        ("operation", c_int32),
        ("type", c_int32),
        ("reduction", c_int32),
        ("peer", c_int32),
        ("max_ctas", c_int32),
        ("cluster", c_int32),
        ("rank", c_int32),
        ("size", c_int32),
        ("copies", c_int32),
        ("stride", c_int32),
    )


_LAUNCH = CFUNCTYPE(c_int, POINTER(_Call), c_int)
_DEVICE = CFUNCTYPE(c_int, POINTER(c_int))
_MEMORY = CFUNCTYPE(c_int, POINTER(c_uint64), c_size_t)


def rank_call(call: Any) -> RankCall:
    """Convert a call from the C library (`_Call`) to plain data."""
    return RankCall(
        operation=NCCL_OPERATIONS[call.operation],
        send=call.send,
        recv=call.recv,
        size_bytes=call.count * _TYPE_BYTES.get(call.type, 1),
        type_name=_TYPE_NAMES.get(call.type, ""),
        reduction=call.reduction,
        peer=call.peer,
        rank=call.rank,
        ranks=call.size,
        stream=call.stream,
        comm=call.comm,
        max_ctas=call.max_ctas or None,
        cluster=call.cluster if call.cluster >= 0 else None,
        algorithm=call.algorithm.decode() if call.algorithm else None,
        copies=bool(call.copies),
        stride=call.stride,
    )


class PacedServer:
    """Serves the calls of the C library: plans kernels, asks the node profile for times, and launches."""

    def __init__(self, node: Node, launcher: Any, late: Lateness, stage_us: float = 0.0) -> None:
        self._node, self._launcher, self._late = node, launcher, late
        self._stages = GhostStages(stage_us)
        self._random = random.Random(0)  # the same delays in every run
        self._part = lru_cache(maxsize=4096)(self._ask)
        self._noted = False
        self._ready: dict[bytes, list[Any]] = {}

    def serve_group(self, calls: Any, count: int) -> None:
        """Launch a group of calls from C. A training step repeats its calls, so launches are cached."""
        key = ctypes.string_at(calls, count * ctypes.sizeof(_Call))
        ready = self._ready.get(key)
        if ready is not None:
            for one in ready:
                one.launch(self._late.draw(self._random) if one.leads else 0.0)
            return
        launched = self.serve([rank_call(calls[i]) for i in range(count)])
        if launched is not None:
            if len(self._ready) == MOST_REMEMBERED:
                self._ready.clear()
            self._ready[key] = launched

    def serve(self, calls: Sequence[RankCall]) -> list[Any] | None:
        """Launch the kernels of a group of calls. Returns the launches; None if they cannot be repeated."""
        launched: list[Any] | None = []
        for planned in plan_calls(calls):
            call = planned.call
            if call.ranks == 1 or not planned.node_bytes:
                self._launcher.copy(planned)
                launched = None
                continue
            ranks, stride = self._place(planned)
            asked = planned.kind, planned.node_bytes, call.max_ctas, ranks, call.algorithm, stride
            paced = self._part(*asked)
            copied = self._by_copy_engines(planned) if call.copies else None
            if copied is not None:
                made = self._launcher.delay(planned, copied, paced, self._late.draw(self._random))
                launched = None if launched is None else launched + made
                continue
            mail = self._stages.mail(planned, self._launcher.mailbox) if self._stages.stage_us else None
            made = self._launcher.launch(planned, paced, self._late.draw(self._random), mail)
            # Each launch with mail has its own message numbers, so it cannot be repeated.
            answers = self._stages.stage_us and planned.kind == "send_recv"
            launched = None if launched is None or answers else launched + made
        return launched

    def _place(self, planned: PlannedKernel) -> tuple[int, int]:
        """Ranks and stride for the time model: (2, 1) for a message to a peer in the same domain."""
        call, peer = planned.call, planned.sent_to
        peer = planned.received_from if peer is None else peer
        if peer is not None and self._node.network and self._node.neighbours(call.rank, peer, call.stride):
            return 2, 1
        return call.ranks, call.stride

    def _by_copy_engines(self, planned: PlannedKernel) -> Paced | None:
        """The collective by the node's copy engines; None if they cannot: NCCL would launch a kernel."""
        try:
            call = planned.call
            found = self._node.copied(planned.kind, planned.node_bytes, call.ranks, call.stride)
        except UsageError as error:
            _log.debug("%s", error)
            return None
        if not self._noted:
            self._noted = True
            leave_note(f"{copies_note(self._node)}, as on {self._node.name}")
        return found

    def _ask(
        self, kind: str, nbytes: int, ctas: int | None, ranks: int, algorithm: str | None, stride: int
    ) -> Paced:
        """Ask the node profile; if it lacks a rule's algorithm for this collective, for its default."""
        try:
            return self._node.collective(kind, nbytes, ctas, ranks, algorithm, stride)
        except UsageError:
            if algorithm is None:
                raise
            _log.debug("%s has no %s by %s", self._node.name, kind, algorithm)
            return self._node.collective(kind, nbytes, ctas, ranks, stride=stride)


def sums_type(dtype: Any) -> bool:
    """Whether paced kernels can sum tensors of this torch dtype."""
    return str(dtype).removeprefix("torch.") in SCALED_TYPES


_served: list[Any] = []  # keeps the callbacks alive that the C library holds


def load_paced(
    node: Node,
    late: Lateness | None = None,
    stage_us: float | None = None,
    *,
    launcher: Any = None,
    path: Path = PACED_LIBRARY,
) -> Library:
    """Load the library with NCCL's API for one rank of the node. A process can have one node.

    `late` and `stage_us`: None for the values of the environment variables.
    """
    if not path.is_file():
        raise UnavailableError(f"{path} is missing: install a wheel of weft for Linux, or run hatch_build.py")
    library = ctypes.CDLL(str(path))
    launcher = launcher or PacedLauncher(load_driver())
    if late is None:
        late = Lateness.parse(os.environ.get(LATE_VARIABLE) or "0")
    if stage_us is None:
        stage_us = parse_stage(os.environ.get(STAGE_VARIABLE) or "0")
    server = PacedServer(node, launcher, late, stage_us)

    def launch(calls: Any, count: int) -> int:
        return _guarded(library, lambda: server.serve_group(calls, count))

    def device(into: Any) -> int:
        def ask() -> None:
            into[0] = launcher.current_device()

        return _guarded(library, ask)

    def memory(into: Any, size: int) -> int:
        def ask() -> None:
            into[0] = launcher.memory(into[0], size)

        return _guarded(library, ask)

    library.weft_paced_serve.argtypes, library.weft_paced_serve.restype = (_LAUNCH, _DEVICE, _MEMORY), None
    library.weft_paced_failed.argtypes, library.weft_paced_failed.restype = (c_char_p,), None
    kept = (_LAUNCH(launch), _DEVICE(device), _MEMORY(memory))
    _served.append(kept)
    library.weft_paced_serve(*kept)
    return Library(library, str(path))


def _guarded(library: Any, action: Callable[[], None]) -> int:
    """Run `action` for a call from C. An exception becomes NCCL's error code and last error message."""
    try:
        action()
    except Exception as error:
        _log.debug("a paced collective failed", exc_info=True)
        library.weft_paced_failed(str(error).encode())
        return _UNHANDLED
    return 0
