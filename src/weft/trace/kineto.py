"""Reads profiler traces (Kineto / Chrome JSON) into Timelines with what the attribution needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from weft.errors import InputError
from weft.trace import native
from weft.trace.assemble import traces_from
from weft.trace.bulk import Bulk
from weft.trace.events import Collector
from weft.trace.files import MAX_TRACE_BYTES, Blocks
from weft.trace.record import IsComm, Trace, table
from weft.trace.scan import DECODE_ERRORS, Scanner

_KEPT = ("distributedInfo", "deviceProperties", "schemaVersion", "baseTimeNanoseconds", "weft")


def read(
    path: Path,
    is_comm_names: IsComm | None = None,
    *,
    max_bytes: int = MAX_TRACE_BYTES,
    workers: int | None = None,
) -> list[Trace]:
    """The GPUs of one trace file, in device order. Raises InputError if the file holds no usable trace.

    `workers`: threads that scan it; None: as many as there are processors.
    """
    collector = Collector()
    metadata: dict[str, Any] = {}

    def keep(key: str, value: bytes) -> None:
        if key in _KEPT and key not in metadata:
            try:
                metadata[key] = msgspec.json.decode(value)
            except DECODE_ERRORS:
                metadata[key] = None

    blocks = Blocks(path, max_bytes=max_bytes)
    try:
        scanner = Scanner(blocks, str(path))
        bulk = Bulk(collector, workers) if native.library() else None
        scanner.run(collector.take, collector.salvage, keep, bulk)
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: not a profiler trace: {error}") from None
    finally:
        blocks.close()
    if not scanner.found_events:
        ending = f" ({scanner.truncated})" if scanner.truncated else ""
        raise InputError(f"{path}: no traceEvents in it{ending}; expected a PyTorch profiler (Kineto) trace")
    if scanner.truncated and not collector.events:
        raise InputError(f"{path}: {scanner.truncated}, before the first event; export the trace again")
    return traces_from(path, collector, metadata, scanner.truncated, is_comm_names or table)
