"""Reads `*_kernel_trace.csv` and related tables of `rocprofv3 --kernel-trace --output-format csv`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from weft.errors import InputError
from weft.trace.assemble import traces_from
from weft.trace.columns import Columns, grid_of_work_items
from weft.trace.custom import IsComm, kernel_table
from weft.trace.events import KERNEL, MEMCPY
from weft.trace.record import Trace

SUFFIX = "_kernel_trace.csv"
NEEDED = ("kernel_name", "start_timestamp", "end_timestamp")

_NUMBER = re.compile(r"(\d{1,18})\s*$")


def read(path: Path, is_comm_names: IsComm | None = None) -> list[Trace]:
    """Reads the GPUs of one process. Raises InputError if the file holds no usable trace."""
    columns = Columns()
    for row in _rows(path):
        if any(key not in row for key in NEEDED):
            raise InputError(f"{path}: expected the columns {', '.join(NEEDED)} of rocprofv3")
        sizes = [_number(row.get(f"{kind}_size_{axis}")) for kind in ("grid", "workgroup") for axis in "xyz"]
        known: dict[str, int | None] = {
            "stream": _first(row, "stream_id", "queue_id"),
            "correlation": _number(row.get("correlation_id")),
            "registers": _number(row.get("vgpr_count")),
            "shared_bytes": _number(row.get("lds_block_size")),
        }
        known |= grid_of_work_items([size or 0 for size in sizes[:3]], [size or 0 for size in sizes[3:]])
        start, end = _number(row["start_timestamp"]), _number(row["end_timestamp"])
        columns.span(KERNEL, row["kernel_name"] or "kernel", start, end, _agent(row.get("agent_id")), **known)
    _copies(path, columns)
    for row in _rows(path, "hip_api"):
        times = (_number(row.get("start_timestamp")), _number(row.get("end_timestamp")))
        thread = row.get("thread_id", "")
        columns.call(row.get("function", ""), *times, _number(row.get("correlation_id")), thread)
    if not columns.gpu:
        raise InputError(f"{path}: no kernels in it; profile with rocprofv3 --kernel-trace")
    return traces_from(path, columns.collector(), {}, None, is_comm_names or kernel_table)


def _copies(path: Path, columns: Columns) -> None:
    for row in _rows(path, "memory_copy"):
        source, target = (row.get(f"{side}_agent_id", "") for side in ("source", "destination"))
        direction = row.get("direction", "").lower()
        peers = "device_to_device" in direction and source != target
        name = "Memcpy PtoP" if peers else f"Memcpy {direction.removeprefix('memory_copy_')}".strip()
        device = _agent(source if "to_host" in direction else target)
        start, end = _number(row.get("start_timestamp")), _number(row.get("end_timestamp"))
        known = {"stream": _first(row, "stream_id"), "correlation": _number(row.get("correlation_id"))}
        columns.span(MEMCPY, name, start, end, device, **known)


def _rows(path: Path, kind: str = "") -> Iterator[dict[str, str]]:
    """Rows of the kernel trace, or of another table of the same process; keys in lower case."""
    if kind:
        if not path.name.endswith(SUFFIX):
            return
        path = path.with_name(path.name.removesuffix(SUFFIX) + f"_{kind}_trace.csv")
        if not path.is_file():
            return
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.reader(line.replace("\0", " ") for line in file)
            head = [key.strip().lower() for key in next(reader, [])]
            for row in reader:
                yield dict(zip(head, row, strict=False))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except csv.Error as error:
        raise InputError(f"{path}: not a table of rocprofv3: {error}") from None


def _number(text: str | None) -> int | None:
    plain = (text or "").strip()
    return int(plain) if plain.isdecimal() and len(plain) < 19 else None


def _first(row: dict[str, str], *keys: str) -> int | None:
    return next((value for key in keys if (value := _number(row.get(key))) is not None), None)


def _agent(text: str | None) -> int:
    """The number in `Agent 4` or `4`; 0 if there is none."""
    found = _NUMBER.search(text or "")
    return int(found[1]) if found else 0
