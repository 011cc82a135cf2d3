"""Plan what a paced collective moves: NCCL calls of one rank become copies within its memory.

Every ghost rank has the data of this rank. So a sum is this rank's input times the number of ranks, a
gathered buffer contains this rank's part once per rank, and a ghost sends the part that this rank sends to
itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.comm.paced_kernel import (
    SEGMENTS,
    VECTOR_BYTES,
    VECTORS,
    KernelArguments,
    KernelSegment,
    pack_factor,
)
from weft.errors import UsageError

NCCL_SUM, NCCL_PRODUCT = 0, 1
SCALED_TYPES = {
    "float32": "sum_f32",
    "float16": "sum_f16",
    "bfloat16": "sum_bf16",
    "float64": "sum_f64",
    "int32": "sum_i32",
    "int64": "sum_i64",
}
"""Kernel operation by data type, for the types that the kernel can sum."""
SCRATCH_UNITS = 16
"""Units of scratch memory per CTA, each for reads and writes: about the size of an NCCL channel's buffer."""
LEAST_UNIT_BYTES = 512
CYCLES_PER_NS = 4  # twice the fastest clock, so that the cycle limit never ends a collective early
_SPARE_CYCLES = 20_000_000


@dataclass(frozen=True)
class RankCopy:
    """Copies `size_bytes` at `source` (0: zeros) to `target`, `copies` times one after the other."""

    source: int
    target: int
    size_bytes: int
    copies: int = 1


@dataclass(frozen=True)
class RankCall:
    """One NCCL call of a rank as plain data; planning it needs no device."""

    operation: str
    send: int
    recv: int
    size_bytes: int
    """The call's element count times the size of an element."""
    type_name: str
    reduction: int
    peer: int
    rank: int
    ranks: int
    stream: int
    comm: int
    max_ctas: int | None = None
    cluster: int | None = None
    algorithm: str | None = None
    copies: bool = False
    """The call asks for copy engines, and its buffers allow them."""
    stride: int = 1
    """Distance in GPUs from one rank of the communicator to the next."""


@dataclass(frozen=True)
class PlannedKernel:
    """One kernel: the copies that it makes, and the collective that determines its time and CTAs."""

    kind: str
    node_bytes: int
    """Size of the collective in bytes, as nccl-tests counts it."""
    operation: str
    """One of paced_kernel.ELEMENT_BYTES."""
    copies: tuple[RankCopy, ...]
    call: RankCall
    sent_to: int | None = None
    received_from: int | None = None
    """Peer of a point-to-point transfer in this direction; None: no such transfer, or several peers."""


@dataclass(frozen=True)
class Mail:
    """A message to a ghost stage, and the answer to an earlier one. Numbers start at 1; 0: none."""

    mailbox: int
    """Address of the peer's Mailbox."""
    post: int
    answer: int
    latency_ns: int
    period_ns: int


class GhostStages:
    """The pipeline stages after this rank: each takes `stage_us` per message, forward and backward together.

    A message is answered when all these stages have processed it, with at most one answer per `stage_us`. A
    receive waits for the answer to the oldest unanswered message to its peer among those sent before the
    receive's group. Without such a message it does not wait. This models schedules with one stage per rank.
    """

    def __init__(self, stage_us: float) -> None:
        self.stage_us = stage_us
        self._sent: Counter[tuple[int, int]] = Counter()
        self._answered: Counter[tuple[int, int]] = Counter()

    def mail(self, planned: PlannedKernel, mailbox: Callable[[int, int], int]) -> Mail | None:
        """The message and the answer of a kernel; None: neither. `mailbox(comm, peer)` gives the address."""
        comm, sent_to, source = planned.call.comm, planned.sent_to, planned.received_from
        post = answer = 0
        # Rank 0 sends to and receives from the same peer. If the peers differ, only the send is a message.
        peer = sent_to if sent_to is not None else source
        if not self.stage_us or peer is None:
            return None
        if source == peer and self._answered[comm, peer] < self._sent[comm, peer]:
            self._answered[comm, peer] += 1
            answer = self._answered[comm, peer]
        if sent_to is not None:
            self._sent[comm, peer] += 1
            post = self._sent[comm, peer]
        if not post and not answer:
            return None
        behind = max(1, planned.call.ranks - 1)
        period = round(1e3 * self.stage_us)
        return Mail(mailbox(comm, peer), post, answer, behind * period, period)


def plan_calls(calls: Sequence[RankCall]) -> list[PlannedKernel]:
    """The kernels of a group of calls. Sends and receives of a communicator on one stream share a kernel."""
    found = [_collective(call) for call in calls if call.operation not in ("send", "recv")]
    pairs: dict[tuple[int, int], list[RankCall]] = {}
    for call in calls:
        if call.operation in ("send", "recv"):
            pairs.setdefault((call.comm, call.stream), []).append(call)
    return found + [_exchange(group) for group in pairs.values()]


def _collective(call: RankCall) -> PlannedKernel:
    size, ranks, own = call.size_bytes, call.ranks, call.rank
    whole = size * ranks
    here = RankCopy(call.send, call.recv, size)
    is_root = call.peer == own
    if call.operation == "all_reduce":
        return _planned(call, "all_reduce", size, [here])
    if call.operation == "reduce":
        return _planned(call, "reduce", size, [here] if is_root else [])
    if call.operation == "broadcast":
        return _planned(call, "broadcast", size, [] if is_root and call.send == call.recv else [here])
    if call.operation == "all_gather":
        return _planned(call, "all_gather", whole, [replace(here, copies=ranks)])
    if call.operation == "reduce_scatter":
        return _planned(call, "reduce_scatter", whole, [replace(here, source=call.send + own * size)])
    if call.operation == "all_to_all":
        return _planned(
            call, "all_to_all", whole, [RankCopy(call.send + own * size, call.recv, size, copies=ranks)]
        )
    if call.operation == "gather":
        copies = [replace(here, copies=ranks)] if is_root else []
        return _planned(call, "send_recv", (ranks - 1) * size if is_root else size, copies)
    if call.operation == "scatter":
        source = call.send + own * size if is_root else 0
        return _planned(
            call, "send_recv", (ranks - 1) * size if is_root else size, [replace(here, source=source)]
        )
    raise UsageError(f"a paced rank has no {call.operation}")


def _exchange(calls: Sequence[RankCall]) -> PlannedKernel:
    """Sends and receives as one kernel; with more than one peer it is an all-to-all."""
    own = calls[0].rank
    sends = [call for call in calls if call.operation == "send"]
    kept = [call for call in sends if call.peer == own]
    far = [call for call in calls if call.peer != own]
    several = len({call.peer for call in far}) > 1
    copies: list[RankCopy] = []
    for call in calls:
        if call.operation == "recv":
            # If this rank sends itself no part, each ghost of an all-to-all returns the part it is sent.
            given = kept or [one for one in sends if several and one.peer == call.peer]
            source = next((one.send for one in given if one.size_bytes == call.size_bytes), 0)
            _append(copies, RankCopy(source, call.recv, call.size_bytes))
    moved = max(sum(call.size_bytes for call in far if call.operation == way) for way in ("send", "recv"))
    if several:
        size = moved * calls[0].ranks // (calls[0].ranks - 1)
        return _planned(calls[0], "all_to_all", size, copies)
    way = {call.operation: call.peer for call in far}
    planned = _planned(calls[0], "send_recv", moved, copies)
    return replace(planned, sent_to=way.get("send"), received_from=way.get("recv"))


def _append(copies: list[RankCopy], new: RankCopy) -> None:
    """Add a copy, or extend the last copy if the new one continues it."""
    last = copies[-1] if copies else None
    if (
        last is not None
        and (last.source, last.size_bytes) == (new.source, new.size_bytes)
        and last.target + last.copies * last.size_bytes == new.target
    ):
        copies[-1] = replace(last, copies=last.copies + 1)
    elif new.size_bytes:
        copies.append(new)


def _planned(call: RankCall, kind: str, node_bytes: int, copies: Sequence[RankCopy]) -> PlannedKernel:
    kept = tuple(copy for copy in copies if copy.size_bytes)
    reduces = call.operation in ("all_reduce", "reduce", "reduce_scatter") and call.reduction == NCCL_SUM
    operation = SCALED_TYPES.get(call.type_name) if reduces else None
    return PlannedKernel(kind, node_bytes, operation or _copy_operation(kept), kept, call)


def _copy_operation(copies: Sequence[RankCopy]) -> str:
    """The copy operation with the widest element whose size divides all addresses and sizes."""
    numbers = [number for copy in copies for number in (copy.source, copy.target, copy.size_bytes)]
    width = math.gcd(8, *numbers)
    return f"copy{width}"


def split_kernel(planned: PlannedKernel) -> list[tuple[PlannedKernel, float]]:
    """Split a kernel into parts that fit into one launch each, with their shares of the time."""
    total = sum(copy.size_bytes * copy.copies for copy in planned.copies)
    if len(planned.copies) <= SEGMENTS:
        return [(planned, 1.0)]
    found = []
    for start in range(0, len(planned.copies), SEGMENTS):
        copies = planned.copies[start : start + SEGMENTS]
        share = sum(copy.size_bytes * copy.copies for copy in copies) / total
        found.append((replace(planned, copies=copies), share))
    return found


def unit_bytes(total_bytes: int, ctas: int, threads: int) -> int:
    """Bytes that a CTA moves at a time: 16 vectors per thread, or its whole share if that is smaller."""
    share = -(-total_bytes // max(1, ctas))
    rounded = -(-share // LEAST_UNIT_BYTES) * LEAST_UNIT_BYTES
    return max(LEAST_UNIT_BYTES, min(rounded, threads * VECTORS * VECTOR_BYTES))


def kernel_arguments(
    planned: PlannedKernel,
    *,
    ctas: int,
    threads: int,
    read_bytes: int,
    write_bytes: int,
    move_ns: int,
    wait_ns: int,
    scratch: int,
    mail: Mail | None = None,
) -> KernelArguments:
    """The kernel's parameter. Memory traffic beyond that of the copies goes to scratch memory."""
    written = sum(copy.size_bytes * copy.copies for copy in planned.copies)
    read = sum(copy.size_bytes * copy.copies for copy in planned.copies if copy.source)
    unit = unit_bytes(max(read_bytes, write_bytes, written), ctas, threads)
    found = KernelArguments(
        wait_ns=wait_ns,
        move_ns=move_ns,
        most_cycles=CYCLES_PER_NS * (wait_ns + move_ns) + _SPARE_CYCLES,
        scratch=scratch,
        factor=pack_factor(planned.operation, planned.call.ranks),
        segment_count=max(1, len(planned.copies)),
        unit_bytes=unit,
        scratch_units=SCRATCH_UNITS,
    )
    if mail is not None:
        found.mailbox, found.post, found.answer = mail.mailbox, mail.post, mail.answer
        found.latency_ns, found.period_ns = mail.latency_ns, mail.period_ns
    units = 0
    for place, copy in enumerate(planned.copies):
        per_copy = -(-copy.size_bytes // unit)
        found.segments[place] = KernelSegment(copy.source, copy.target, copy.size_bytes, units, per_copy)
        units += per_copy * copy.copies
    found.data_units = units
    found.read_units = -(-max(0, read_bytes - read) // unit)
    found.write_units = -(-max(0, write_bytes - written) // unit)
    found.all_units = units + max(found.read_units, found.write_units)
    return found


def scratch_bytes(ctas: int, threads: int) -> int:
    """Bytes of scratch memory that `ctas` CTAs need at most, whatever the unit."""
    return 2 * SCRATCH_UNITS * ctas * threads * VECTORS * VECTOR_BYTES
