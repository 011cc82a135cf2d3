"""Reads profiler traces (Kineto / Chrome JSON)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weft.errors import InputError
from weft.trace import native
from weft.trace.bulk import BulkScan
from weft.trace.custom import IsComm, kernel_table
from weft.trace.files import MAX_TRACE_BYTES, Blocks
from weft.trace.scan import DECODE_ERRORS, Scanner

if TYPE_CHECKING:
    from weft.trace.record import Trace

_KEPT = ("distributedInfo", "deviceProperties", "schemaVersion", "baseTimeNanoseconds", "weft")

# Keys of other JSON files that often lie next to a trace: what these are, and what to do.
_OTHERS = {
    frozenset({"schema", "nodes"}): (
        "a PyTorch execution trace (Chakra), which has no times of the GPU",
        "give the profiler's trace of the same run",
    ),
}


def read(
    path: Path,
    is_comm_names: IsComm | None = None,
    *,
    max_bytes: int = MAX_TRACE_BYTES,
    workers: int | None = None,
) -> list[Trace]:
    """Reads the GPUs of one trace file, in device order. Raises InputError if it holds no usable trace.

    `workers`: threads that scan it; None for one per processor.
    """
    blocks = Blocks(path, max_bytes=max_bytes)
    bulk = BulkScan(workers)
    metadata: dict[str, Any] = {}

    keys: set[str] = set()

    def keep(key: str, value: bytes) -> None:
        keys.add(key)
        if key in _KEPT and key not in metadata:
            try:
                metadata[key] = msgspec.json.decode(value)
            except DECODE_ERRORS:
                metadata[key] = None

    def take(buffer: bytearray, low: int, high: int) -> bool:
        return bulk.collector.take(buffer, low, high)

    def salvage(buffer: bytearray, low: int, high: int) -> bool:
        return bulk.collector.salvage(buffer, low, high)

    try:
        scanner = Scanner(blocks, str(path))
        scanner.run(take, salvage, keep, bulk if native.library() else None)
        collector = bulk.collector
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: not a profiler trace: {error}") from None
    finally:
        blocks.close()
    if not scanner.found_events:
        for known, (what, advice) in _OTHERS.items():
            if known <= keys:
                raise InputError(f"{path}: no traceEvents in it: {what}; {advice}")
        ending = f" ({scanner.truncated})" if scanner.truncated else ""
        raise InputError(f"{path}: no traceEvents in it{ending}; expected a PyTorch profiler (Kineto) trace")
    if scanner.truncated and not collector.events:
        raise InputError(f"{path}: {scanner.truncated}, before the first event; export the trace again")
    from weft.trace.assemble import traces_from

    return traces_from(path, collector, metadata, scanner.truncated, is_comm_names or kernel_table)
