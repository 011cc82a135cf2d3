"""Writes recordings as Chrome traces in Kineto's format, which `weft analyze` and Perfetto read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.errors import OutputError
from weft.files import write_whole
from weft.shim import layout, stats, tracer
from weft.shim.spans import Span, graph_symbols, spans_of
from weft.shim.tracer import Recording

CATEGORIES = {"compute": "kernel", "comm": "kernel", "graph": "kernel", "unknown": "cuda_graph"}
_CALLS = {
    tracer.KERNEL_SPAN: "cuLaunchKernel",
    tracer.MEMCPY_SPAN: "cuMemcpyAsync",
    tracer.MEMSET_SPAN: "cuMemsetAsync",
    tracer.GRAPH: "cuGraphLaunch",
}
_DTYPES = (
    "Char",
    "Byte",
    "Int",
    "UInt32",
    "Long",
    "UInt64",
    "Half",
    "Float",
    "Double",
    "BFloat16",
    "Float8_e4m3fn",
    "Float8_e5m2",
)
BASE_NS = 10**15  # rounds the base time, so that all ranks use the same one

RESOLUTION = (
    "CUDA events, about 0.5 µs each; the start of a collective comes from a stamp, a kernel placed directly "
    "after its last CTA"
)
UNSEEN = (
    "kernels that other processes run on the same GPU",
    "launches from the device and from contexts that weft does not hook",
    "synchronous copies and batched copies",
    "the time of single kernels inside a CUDA graph; overlap inside a graph with collectives is unknown",
    "where kernels launched programmatically (PDL) change over: they share the time of their chain equally",
)


def write_traces(folder: Path, out: Path) -> list[Path]:
    """Turn the recordings that a job's processes left in `folder` into traces in `out`.

    Returns the files written.
    """
    _make_folder(out)
    written: list[Path] = []
    for path in sorted(folder.glob("trace.*")):
        recording = tracer.read_file(path)
        if not recording.header.spans:
            continue
        target = out / _file_name(recording, {file.name for file in written})
        write_whole(target, document(recording))
        written.append(target)
    return written


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"--trace {out}: cannot be created ({error.strerror}); give a writable folder"
        ) from None


def _file_name(recording: Recording, taken: set[str]) -> str:
    rank, pid = recording.header.rank, recording.header.pid
    name = f"weft.rank{rank}.json" if rank >= 0 else f"weft.pid{pid}.json"
    return name if name not in taken else f"weft.rank{rank}.pid{pid}.json"


def document(recording: Recording) -> str:
    """The whole trace as JSON text. Times are formatted from integers, so that no nanosecond is lost."""
    spans = spans_of(recording)
    head = json.dumps(_metadata(recording, spans), indent=1)[1:-2]
    events = ",\n".join(_events(recording, spans))
    return f'{{{head},\n "traceEvents": [\n{events}\n]}}\n'


def _metadata(recording: Recording, spans: list[Span]) -> dict[str, Any]:
    header = recording.header
    groups = {s.raw.comm_key for s in spans if s.raw.comm_key}
    sizes = [s.raw.comm_size for s in spans if s.raw.comm_size > 0]
    world = header.world if header.world > 0 else max(sizes, default=0)
    info: dict[str, Any] = {"backend": "nccl" if groups else "", "pg_count": len(groups)}
    if header.rank >= 0:
        info["rank"] = header.rank
    if world > 0:
        info["world_size"] = world
    kinds = Counter(span.kind for span in spans)
    timings = Counter(span.timing for span in spans)
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": _base_ns(recording),
        "distributedInfo": info,
        "deviceProperties": [_device(header.device[i]) for i in range(header.devices)],
        "weft": {
            "source": "weft run --trace",
            "pid": header.pid,
            "steps": len(recording.marks) if header.by_steps else None,
            "seconds": None if header.by_steps else (header.end_ns - header.begin_ns) / 1e9,
            "resolution": RESOLUTION,
            "cannot_see": list(UNSEEN),
            "overlap_unknown": kinds["unknown"],
            "timings": dict(timings),
            **recording.counters,
        },
    }


def _base_ns(recording: Recording) -> int:
    """The time that timestamps are relative to, as in Kineto.

    A float cannot hold microseconds since 1970 and their fractions.
    """
    began_ns = recording.header.begin_ns + recording.header.realtime_offset_ns
    return int(began_ns - began_ns % BASE_NS)


def _device(device: Any) -> dict[str, Any]:
    return {
        "id": device.ordinal,
        "name": device.name.decode(errors="replace"),
        "computeMajor": device.major,
        "computeMinor": device.minor,
        "numSms": device.sms,
        "maxThreadsPerMultiprocessor": device.threads_per_sm,
        "regsPerMultiprocessor": device.registers_per_sm,
        "sharedMemPerMultiprocessor": device.shared_per_sm,
        "sharedMemPerBlockOptin": device.shared_optin,
    }


def _events(recording: Recording, spans: list[Span]) -> Iterator[str]:
    offset = recording.header.realtime_offset_ns - _base_ns(recording)
    pid = recording.header.pid
    for number, span in enumerate(spans, start=1):
        raw = span.raw
        category = CATEGORIES.get(span.kind) or _copy_category(raw)
        args = {"correlation": number, "device": raw.device, "stream": raw.stream, **_args(recording, span)}
        name = stats.demangle(span.name)
        yield _event(category, name, raw.device, raw.stream, span.start_ns, span.end_ns, offset, args)
        call = {"correlation": number}
        end_ns = max(raw.host_ns, raw.host_end_ns)
        yield _event("cuda_driver", _CALLS[raw.kind], pid, raw.thread, raw.host_ns, end_ns, offset, call)
    if recording.header.by_steps:
        edges = [recording.header.begin_ns, *recording.marks]
        for i, (start_ns, end_ns) in enumerate(pairwise(edges)):
            yield _event("user_annotation", f"ProfilerStep#{i}", pid, pid, start_ns, end_ns, offset, {})


def _copy_category(raw: Any) -> str:
    return "gpu_memset" if raw.kind == tracer.MEMSET_SPAN else "gpu_memcpy"


def _event(
    cat: str, name: str, pid: int, tid: int, start_ns: int, end_ns: int, offset_ns: int, args: dict[str, Any]
) -> str:
    ts, dur = _microseconds(start_ns + offset_ns), _microseconds(end_ns - start_ns)
    return (
        f'{{"ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid}, '
        f'"ts": {ts}, "dur": {dur}, "args": {json.dumps(args)}}}'
    )


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _args(recording: Recording, span: Span) -> dict[str, Any]:
    raw = span.raw
    out: dict[str, Any] = {"timing": span.timing}
    if raw.kind in (tracer.MEMCPY_SPAN, tracer.MEMSET_SPAN):
        return {**out, "bytes": raw.bytes}
    if raw.kind == tracer.GRAPH:
        kernels = Counter(stats.demangle(name) for name in graph_symbols(recording, raw))
        overlap = {"overlap": "unknown"} if span.kind == "unknown" else {}
        return {**out, **overlap, "kernels": raw.graph_kernels, "kernel names": dict(kernels)}
    sms = next((d.sms for d in recording.header.device if d.sms and d.ordinal == raw.device), 0)
    blocks = raw.grid[0] * raw.grid[1] * raw.grid[2]
    out |= {
        "grid": list(raw.grid),
        "block": list(raw.block),
        "registers per thread": raw.registers,
        "shared memory": raw.shared + raw.static_shared,
        "dynamic shared memory": raw.shared,
        "resident blocks per SM": raw.blocks_per_sm,
    }
    if sms:
        out["blocks per SM"] = round(blocks / sms, 6)  # Kineto's definition: blocks of the whole grid
    return {**out, **(_collective(raw, blocks) if span.kind == "comm" else {})}


def _collective(raw: Any, blocks: int) -> dict[str, Any]:
    """The collective's arguments under torch's names, which readers of Kineto traces understand.

    Only the CTAs if no call was recorded.
    """
    out: dict[str, Any] = {"CTAs": blocks}
    if raw.calls == 0:
        return out
    several = "coalesced"
    operation = (
        layout.NCCL_OPERATIONS[raw.operation] if 0 <= raw.operation < len(layout.NCCL_OPERATIONS) else several
    )
    size, count = max(raw.comm_size, 1), raw.count
    per_rank = {"all_gather": (1, size), "reduce_scatter": (size, 1), "all_to_all": (size, size)}
    inward, outward = per_rank.get(operation, (1, 1))
    return {
        **out,
        "Collective name": operation,
        "In msg nelems": count * inward,
        "Out msg nelems": count * outward,
        "dtype": _DTYPES[raw.dtype] if 0 <= raw.dtype < len(_DTYPES) else "",
        "Group size": raw.comm_size,
        "Process Group Name": f"{raw.comm_key:016x}",
        "Rank in group": raw.comm_rank,
        "Seq": raw.comm_sequence,
        "calls": raw.calls,
    }
