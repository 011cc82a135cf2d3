"""Reads `*_results.json` files of `rocprofv3 --output-format json`, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import InputError
from weft.trace.assemble import traces_from
from weft.trace.columns import Columns, grid_of_work_items
from weft.trace.custom import IsComm, kernel_table
from weft.trace.events import KERNEL, MEMCPY
from weft.trace.files import Blocks
from weft.trace.record import Trace
from weft.trace.scan import DECODE_ERRORS

_MAX_BYTES = 1 << 30
"""A larger file is refused, because the text is decoded whole."""

_GPU = 2
"""rocprofiler-sdk's code of the GPU agent type."""

_DIRECTIONS = {1: "HtoH", 2: "HtoD", 3: "DtoH", 4: "DtoD"}
"""rocprofiler-sdk's codes of copy directions."""


class _Handle(msgspec.Struct, frozen=True):
    handle: int = -1


class _Size(msgspec.Struct, frozen=True):
    x: int = 0
    y: int = 0
    z: int = 0

    def all(self) -> tuple[int, int, int]:
        return (self.x, self.y, self.z)


class _Dispatch(msgspec.Struct, frozen=True):
    agent_id: _Handle = _Handle()
    queue_id: _Handle = _Handle()
    kernel_id: int = -1
    group_segment_size: int = -1
    workgroup_size: _Size = _Size()
    grid_size: _Size = _Size()


class _Correlation(msgspec.Struct, frozen=True):
    internal: int = -1


class _Record(msgspec.Struct, frozen=True):
    start_timestamp: int
    end_timestamp: int
    kind: int = -1
    operation: int = -1
    thread_id: int = -1
    correlation_id: _Correlation = _Correlation()
    dispatch_info: _Dispatch = _Dispatch()
    stream_id: _Handle = _Handle()
    src_agent_id: _Handle = _Handle()
    dst_agent_id: _Handle = _Handle()


class _Records(msgspec.Struct, frozen=True):
    kernel_dispatch: list[_Record] = []
    memory_copy: list[_Record] = []
    hip_api: list[_Record] = []


class _Kind(msgspec.Struct, frozen=True):
    operations: list[str] = []


class _Strings(msgspec.Struct, frozen=True):
    buffer_records: list[_Kind] = []


class _Agent(msgspec.Struct, frozen=True):
    id: _Handle = _Handle()
    type: int = -1
    product_name: str = ""
    name: str = ""
    gpu_index: int = -1
    cu_count: int = -1
    wave_front_size: int = -1


class _Symbol(msgspec.Struct, frozen=True):
    kernel_id: int = -1
    formatted_kernel_name: str = ""
    kernel_name: str = ""
    arch_vgpr_count: int = -1


class _Process(msgspec.Struct, frozen=True):
    agents: list[_Agent] = []
    strings: _Strings = _Strings()
    kernel_symbols: list[_Symbol] = []
    buffer_records: _Records = _Records()


class _Document(msgspec.Struct, frozen=True):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


def read(path: Path, is_comm_names: IsComm | None = None) -> list[Trace]:
    """Reads the GPUs of each process. Raises InputError if the file holds no usable trace."""
    blocks = Blocks(path, max_bytes=_MAX_BYTES)
    try:
        document = msgspec.json.decode(b"".join(blocks), type=_Document)
    except DECODE_ERRORS as error:
        ending = f" ({blocks.truncated})" if blocks.truncated else ""
        raise InputError(f"{path}: not a result of rocprofv3 as it is known: {error}{ending}") from None
    finally:
        blocks.close()
    out: list[Trace] = []
    for process in document.processes:
        columns = _columns(process)
        if columns.gpu:
            metadata = {"deviceProperties": list(_properties(process))}
            out += traces_from(path, columns.collector(), metadata, None, is_comm_names or kernel_table)
    if not out:
        raise InputError(f"{path}: no kernels in it; profile with rocprofv3 --kernel-trace")
    return out


def _columns(process: _Process) -> Columns:
    columns = Columns()
    symbols = {symbol.kernel_id: symbol for symbol in process.kernel_symbols}
    devices = {agent.id.handle: agent.gpu_index for agent in process.agents if agent.type == _GPU}
    for record in process.buffer_records.kernel_dispatch:
        info = record.dispatch_info
        symbol = symbols.get(info.kernel_id, _Symbol())
        stream = record.stream_id.handle if record.stream_id.handle >= 0 else info.queue_id.handle
        known: dict[str, int] = {
            "stream": stream,
            "correlation": record.correlation_id.internal,
            "registers": symbol.arch_vgpr_count,
            "shared_bytes": info.group_segment_size,
        }
        known |= grid_of_work_items(info.grid_size.all(), info.workgroup_size.all())
        name = symbol.formatted_kernel_name or symbol.kernel_name or "kernel"
        device = devices.get(info.agent_id.handle, 0)
        columns.span(KERNEL, name, record.start_timestamp, record.end_timestamp, device, **known)
    for record in process.buffer_records.memory_copy:
        source, target = (devices.get(agent.handle) for agent in (record.src_agent_id, record.dst_agent_id))
        peers = source is not None and target is not None and source != target
        name = "Memcpy PtoP" if peers else f"Memcpy {_DIRECTIONS.get(record.operation, 'copy')}"
        device = target if target is not None else source if source is not None else 0
        known = {"stream": record.stream_id.handle, "correlation": record.correlation_id.internal}
        columns.span(MEMCPY, name, record.start_timestamp, record.end_timestamp, device, **known)
    kinds = process.strings.buffer_records
    for record in process.buffer_records.hip_api:
        operations = kinds[record.kind].operations if 0 <= record.kind < len(kinds) else []
        called = operations[record.operation] if 0 <= record.operation < len(operations) else ""
        times = (record.start_timestamp, record.end_timestamp)
        columns.call(called, *times, record.correlation_id.internal, record.thread_id)
    return columns


def _properties(process: _Process) -> Iterator[dict[str, Any]]:
    """Properties of the GPUs under Kineto's names."""
    for agent in process.agents:
        if agent.type == _GPU:
            yield {
                "id": agent.gpu_index,
                "name": agent.product_name or agent.name,
                "numSms": agent.cu_count,
                "warpSize": agent.wave_front_size,
            }
