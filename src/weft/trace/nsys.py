"""Reads Nsight Systems reports exported with `nsys export --type sqlite`."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import InputError
from weft.trace.assemble import traces_from
from weft.trace.columns import Columns
from weft.trace.custom import IsComm, kernel_table
from weft.trace.events import KERNEL, MEMCPY, MEMSET
from weft.trace.record import Trace

MAX_S = 600
"""Time limit for reading: a query on a view of a hostile database may never end."""

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_SYSTEM = "TARGET_INFO_SYSTEM_ENV"
_NODES = "profile with --cuda-graph-trace=node"
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""CUPTI's codes of copy kinds."""

_STEP = re.compile(r"(?:profilerstep|step|iteration|iter)\W*(\d+)\W*", re.IGNORECASE)
_CALL = re.compile(r"(nccl:\w+)")
"""PyTorch's range around the call of a collective; needed because NCCL's send kernels also run all-to-all."""

_PID_SHIFT = 24
"""In Nsight's global ids, the process is above this many bits, the thread below."""


def read(path: Path, is_comm_names: IsComm | None = None) -> list[Trace]:
    """Reads the GPUs of one export, by process and device. Raises InputError if it holds no usable trace."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{_quoted(path)}?mode=ro", uri=True)) as base:
            base.text_factory = lambda raw: raw.decode("utf-8", "replace")
            until = time.monotonic() + MAX_S
            base.set_progress_handler(lambda: int(time.monotonic() > until), 1_000_000)
            return _read(path, base, is_comm_names or kernel_table)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # messages may quote damaged text
        raise InputError(f"{path}: the database cannot be read: {error}; export the report again") from None


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _read(path: Path, base: sqlite3.Connection, is_comm_names: IsComm) -> list[Trace]:
    tables = {
        str(row[0]) for row in base.execute("select name from sqlite_master where type in ('table', 'view')")
    }
    if _KERNELS not in tables:
        if any(name.startswith("rocpd_") for name in tables):
            raise InputError(
                f"{path}: a rocpd database of rocprofv3; convert it with: "
                f"rocpd convert -i {path.name} --output-format csv"
            )
        known = (
            "an Nsight Systems export without GPU kernels" if "StringIds" in tables else "an SQLite database"
        )
        raise InputError(f"{path}: {known}; expected the table {_KERNELS} (profile with --trace=cuda)")
    texts = {
        int(i): str(value) for i, value in _rows(base, "StringIds", ("id", "value")) if isinstance(i, int)
    }
    found: dict[int, Columns] = defaultdict(Columns)
    _spans(base, tables, texts, found)
    _calls(base, tables, texts, found)
    graphs = _whole_graphs(base, tables)
    metadata = {"deviceProperties": _devices(base, tables)}
    out: list[Trace] = []
    several, host = len(found) > 1, _host(base, tables)
    for process, columns in sorted(
        found.items(), key=lambda item: min((row[4] for row in item[1].gpu), default=1 << 31)
    ):
        if columns.gpu:
            info = {"distributedInfo": {"rank": len(out), "world_size": len(found)}} if several else {}
            traces = traces_from(path, columns.collector(), {**metadata, **info}, None, is_comm_names)
            out += [replace(_with_graphs(trace, graphs[process]), host=host) for trace in traces]
    if not out:
        only = f"only CUDA graphs traced as a whole; {_NODES}"
        raise InputError(f"{path}: {only if graphs else 'no GPU activity in it; profile with --trace=cuda'}")
    return out


def _host(base: sqlite3.Connection, tables: set[str]) -> str:
    """The name of the host, whose processes this export has; empty if it does not say."""
    rows = _rows(base, _SYSTEM, ("name", "value")) if _SYSTEM in tables else ()
    return next((str(value) for name, value in rows if name == "Hostname" and value), "")


def _whole_graphs(base: sqlite3.Connection, tables: set[str]) -> Counter[int]:
    """Launches of CUDA graphs by process, where nsys traced a graph as one span: by default."""
    rows = _rows(base, _GRAPHS, ("globalPid",)) if _GRAPHS in tables else ()
    return Counter(_process(process) for (process,) in rows)


def _with_graphs(trace: Trace, launches: int) -> Trace:
    if not launches:
        return trace
    said = (
        f"{launches} launches of CUDA graphs are traced as a whole: their kernels are not counted; {_NODES}"
    )
    return replace(trace, warnings=(*trace.warnings, said))


def _rows(base: sqlite3.Connection, name: str, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Rows of a table; None for columns that this version of the export lacks."""
    have = {str(row[1]) for row in base.execute(f'pragma table_info("{name}")')}
    wanted = ", ".join(f'"{column}"' if column in have else "null" for column in columns)
    yield from base.execute(f'select {wanted} from "{name}"')


def _process(identity: Any) -> int:
    return identity >> _PID_SHIFT if isinstance(identity, int) else 0


def _spans(
    base: sqlite3.Connection, tables: set[str], texts: dict[int, str], found: dict[int, Columns]
) -> None:
    shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
    common = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")
    more = ("demangledName", "shortName", "registersPerThread", "staticSharedMemory", "dynamicSharedMemory")
    for row in _rows(base, _KERNELS, (*common, *more, *shape)):
        (
            start,
            end,
            process,
            device,
            stream,
            correlation,
            demangled,
            short,
            registers,
            static,
            dynamic,
            *xyz,
        ) = row
        known = {"stream": stream, "correlation": correlation, "registers": registers}
        if isinstance(static, int) and isinstance(dynamic, int):
            known["shared_bytes"] = static + dynamic
        if all(isinstance(value, int) and value > 0 for value in xyz):
            known["blocks"], known["threads"] = xyz[0] * xyz[1] * xyz[2], xyz[3] * xyz[4] * xyz[5]
        name = texts.get(demangled) or texts.get(short) or "kernel"
        found[_process(process)].span(KERNEL, name, start, end, _whole(device), **known)
    if "CUPTI_ACTIVITY_KIND_MEMCPY" in tables:
        for row in _rows(base, "CUPTI_ACTIVITY_KIND_MEMCPY", (*common, "bytes", "copyKind")):
            start, end, process, device, stream, correlation, size, kind = row
            name = f"Memcpy {_COPIES.get(kind, 'copy')}"
            known = {"stream": stream, "correlation": correlation, "bytes": size}
            found[_process(process)].span(MEMCPY, name, start, end, _whole(device), **known)
    if "CUPTI_ACTIVITY_KIND_MEMSET" in tables:
        for row in _rows(base, "CUPTI_ACTIVITY_KIND_MEMSET", (*common, "bytes")):
            start, end, process, device, stream, correlation, size = row
            known = {"stream": stream, "correlation": correlation, "bytes": size}
            found[_process(process)].span(MEMSET, "Memset", start, end, _whole(device), **known)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _calls(
    base: sqlite3.Connection, tables: set[str], texts: dict[int, str], found: dict[int, Columns]
) -> None:
    if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables:
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        for start, end, thread, correlation, name in _rows(base, "CUPTI_ACTIVITY_KIND_RUNTIME", columns):
            process = _process(thread)
            if process in found or len(found) == 1:
                owner = found[process] if process in found else next(iter(found.values()))
                owner.call(texts.get(name, ""), start, end, correlation, thread)
    if "NVTX_EVENTS" in tables:
        for start, end, text, identity, thread in _rows(
            base, "NVTX_EVENTS", ("start", "end", "text", "textId", "globalTid")
        ):
            said = text or texts.get(identity) or ""
            if not (
                isinstance(said, str) and isinstance(start, int) and isinstance(end, int) and end > start
            ):
                continue
            step, call = _STEP.fullmatch(str(said)), _CALL.match(str(said))
            for process, owner in found.items():
                if process == _process(thread) or len(found) == 1:
                    if step:
                        owner.mark(f"ProfilerStep#{step[1]}", start, end)
                    elif call:
                        owner.mark(call[1], start, end, thread)


def _devices(base: sqlite3.Connection, tables: set[str]) -> list[dict[str, Any]]:
    """Properties of the GPUs under Kineto's names, with CUDA's device numbers as ids."""
    if "TARGET_INFO_GPU" not in tables:
        return []
    columns = ("id", "name", "smCount", "computeMajor", "computeMinor", "threadsPerWarp")
    gpus = {row[0]: row[1:] for row in _rows(base, "TARGET_INFO_GPU", columns)}
    numbers = {gpu: gpu for gpu in gpus}
    if "TARGET_INFO_CUDA_DEVICE" in tables:
        numbers = dict(_rows(base, "TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId")))
    keys = ("name", "numSms", "computeMajor", "computeMinor", "warpSize")
    return [
        {"id": numbers.get(gpu, gpu), **dict(zip(keys, values, strict=True))} for gpu, values in gpus.items()
    ]
