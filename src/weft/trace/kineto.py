"""Reads profiler traces (Kineto / Chrome JSON) into Timelines with what the attribution needs beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from weft.errors import InputError
from weft.kernels import is_comm
from weft.timeline import Intervals, Kind, Ns, Timeline, union
from weft.trace.events import GPU_COLUMNS, KERNEL, MEMCPY, Collector
from weft.trace.files import MAX_TRACE_BYTES, Blocks, shown
from weft.trace.scan import DECODE_ERRORS, Scanner
from weft.trace.schema import Mark, Message, text

UNKNOWN_NS = -1 << 62
"""A launch time that the trace does not have."""

MAX_NAME = 1 << 14
"""Longer kernel names are cut; templates make names of a few thousand characters."""

MAX_MATCHED = 1 << 12
"""What of a name is compared with the table: a hostile name could take quadratic time."""

_KEPT = ("distributedInfo", "deviceProperties", "schemaVersion", "baseTimeNanoseconds", "weft")
_RANK_IN_NAME = re.compile(r"(?:rank|worker|gpu)[_\-.]?([0-9]{1,6})(?![0-9])", re.IGNORECASE)
_PEER_COPY = re.compile(r"\bp(?:eer)?[ _]?to[ _]?p(?:eer)?\b|\bp2p\b", re.IGNORECASE)

IsComm = Callable[[list[str]], list[bool]]
"""Says of kernel names which ones communicate."""


@dataclass(frozen=True)
class Step:
    """A marked step of the program. Times in nanoseconds of the trace's clock, on the CPU."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class Trace:
    """One GPU's part of a trace file. Columns are parallel to those of `timeline`, sorted by start."""

    path: str
    rank: int | None
    world_size: int | None
    one_group: bool
    """Whether the job has one process group only, so that its size is the world's."""
    device: int
    device_name: str
    properties: dict[str, Any]
    timeline: Timeline
    launch_ns: Ns
    """When the CPU call that launched a span began; UNKNOWN_NS where the trace does not say."""
    thread: npt.NDArray[np.int64]
    """Which CPU thread launched it, -1 where unknown."""
    correlation: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    message: npt.NDArray[np.int64]
    """Index into `messages`; 0 is "nothing known"."""
    messages: tuple[Message, ...]
    steps: tuple[Step, ...]
    blocking: Intervals
    """When some CPU thread waited for the GPU."""
    waits: npt.NDArray[np.int64]
    """Recorded event waits, rows of (time, stream, correlation of the record, recorded stream)."""
    events: int
    partial: bool = False
    warnings: tuple[str, ...] = field(default=())


def read(path: Path, is_comm_names: IsComm | None = None, *, max_bytes: int = MAX_TRACE_BYTES) -> list[Trace]:
    """The GPUs of one trace file, in device order. Raises InputError if the file holds no usable trace."""
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
        scanner.run(collector.take, collector.salvage, keep)
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
    return _traces(path, collector, metadata, scanner.truncated, is_comm_names or table)


def table(names: list[str]) -> list[bool]:
    """What the table of communication kernels says of these names."""
    return [is_comm(name[:MAX_MATCHED]) for name in names]


def _traces(
    path: Path, collector: Collector, metadata: dict[str, Any], truncated: str | None, is_comm_names: IsComm
) -> list[Trace]:
    rows = collector.gpu()
    warnings = [*_warnings(collector, truncated), *_unknown_overlap(metadata)]
    if not len(rows):
        detail = f" ({warnings[0]})" if warnings else ""
        raise InputError(
            f"{path}: no GPU activity in its {collector.events} events{detail}; "
            "profile with ProfilerActivity.CUDA"
        )
    names = [text(raw)[:MAX_NAME] for raw in collector.names.values()]
    column = {name: i for i, name in enumerate(GPU_COLUMNS)}
    kinds = _kinds(rows[:, column["name"]], rows[:, column["kind"]], names, is_comm_names)
    launches = _launches(rows[:, column["correlation"]], collector.launches())
    launch_ns, thread = launches[:, 0], launches[:, 1]
    is_kernel = rows[:, column["kind"]] == KERNEL
    for key, from_launch in (("blocks", 2), ("threads", 3), ("shared_bytes", 4)):
        missing = is_kernel & (rows[:, column[key]] < 0)
        rows[missing, column[key]] = launches[missing, from_launch]
    messages = list(collector.messages.values())
    message = _messages(rows, column, kinds, launch_ns, thread, collector.marks, messages)
    steps = tuple(
        Step(m.name, m.start_ns, m.end_ns)
        for m in sorted(collector.marks, key=lambda m: m.start_ns)
        if m.name.startswith("ProfilerStep#")
    )
    blocking = collector.blocking()
    blocked = union(blocking[:, 0].copy(), blocking[:, 1].copy())
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    waits = collector.waits()[:, 1:]
    out = []
    for device in np.unique(rows[:, column["device"]]).tolist():
        here = np.flatnonzero(rows[:, column["device"]] == device)
        here = here[np.argsort(rows[here, 0], kind="stable")]
        name, properties = _device(metadata, device)

        def take(key: str, here: npt.NDArray[np.intp] = here) -> npt.NDArray[np.int64]:
            taken: npt.NDArray[np.int64] = rows[here, column[key]]
            return taken

        timeline = Timeline(
            start_ns=take("start"),
            end_ns=take("end"),
            stream=take("stream"),
            kind=kinds[here],
            name=take("name").astype(np.int32),
            names=tuple(names),
            resources={k: take(k) for k in ("blocks", "threads", "registers", "shared_bytes", "bytes")},
        )
        out.append(
            Trace(
                path=shown(path),
                rank=_rank(path, info),
                world_size=_whole(info.get("world_size")),
                one_group=info.get("pg_count") == 1,
                device=device,
                device_name=name,
                properties=properties,
                timeline=timeline,
                launch_ns=launch_ns[here],
                thread=thread[here],
                correlation=take("correlation"),
                sequence=take("sequence"),
                message=message[here],
                messages=tuple(messages),
                steps=steps,
                blocking=blocked,
                waits=waits,
                events=collector.events,
                partial=bool(truncated) or collector.damaged > 0,
                warnings=tuple(warnings),
            )
        )
    return out


def _warnings(collector: Collector, truncated: str | None) -> list[str]:
    out = []
    if truncated:
        out.append(f"partial: {truncated}; the figures cover the {collector.events} events before that")
    if collector.damaged:
        out.append(f"partial: {collector.damaged} damaged events were left out")
    if collector.odd_times:
        out.append(
            f"{collector.odd_times} events without a usable time or with a negative duration were left out"
        )
    return out


def _unknown_overlap(metadata: dict[str, Any]) -> list[str]:
    """What a trace of `weft run --trace` says about graphs with collectives in them."""
    own = metadata.get("weft")
    graphs = _whole(own.get("overlap_unknown")) if isinstance(own, dict) else None
    if not graphs:
        return []
    return [f"{graphs} launches of CUDA graphs with collectives are not counted: their overlap is unknown"]


def _kinds(
    name: npt.NDArray[np.int64], category: npt.NDArray[np.int64], names: list[str], is_comm_names: IsComm
) -> npt.NDArray[np.uint8]:
    """Compute, communication or memory. Copies between peers are communication, other copies are memory."""
    kernel_comm = np.array(is_comm_names(names), dtype=bool)
    peer = np.array([_PEER_COPY.search(n) is not None for n in names], dtype=bool)
    of_kernel = np.where(kernel_comm, Kind.COMM, Kind.COMPUTE)[name]
    of_copy = np.where(peer, Kind.COMM, Kind.MEMORY)[name]
    kinds = np.where(category == KERNEL, of_kernel, np.where(category == MEMCPY, of_copy, Kind.MEMORY))
    return kinds.astype(np.uint8)


def _launches(correlation: npt.NDArray[np.int64], launches: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The launching call of each span by its correlation id, the first where several share one.

    Columns: start, thread, blocks, threads per block, shared bytes; UNKNOWN_NS and -1 where there is none.
    """
    unknown = np.array([UNKNOWN_NS, -1, -1, -1, -1], dtype=np.int64)
    launches = launches[launches[:, 2] >= 0]
    if not len(launches):
        return np.tile(unknown, (len(correlation), 1))
    launches = launches[np.lexsort((launches[:, 0], launches[:, 2]))]
    at = np.minimum(np.searchsorted(launches[:, 2], correlation), len(launches) - 1)
    known = (launches[at, 2] == correlation) & (correlation >= 0)
    return np.where(known[:, None], launches[at][:, [0, 3, 4, 5, 6]], unknown)


def _messages(
    rows: npt.NDArray[np.int64],
    column: dict[str, int],
    kinds: npt.NDArray[np.uint8],
    launch_ns: Ns,
    thread: npt.NDArray[np.int64],
    marks: list[Mark],
    messages: list[Message],
) -> npt.NDArray[np.int64]:
    """The message of each collective: its own, or that of the CPU call that issued it."""
    message = rows[:, column["message"]].copy()
    calls = [m for m in marks if not m.name.startswith("ProfilerStep#")]
    bare = np.flatnonzero((kinds == Kind.COMM) & (message == 0))
    if not len(bare) or not calls:
        return message
    index = {value: i for i, value in enumerate(messages)}

    def number(mark: Mark) -> int:
        known = mark.message
        if not known.collective:
            known = known._replace(collective=mark.name.partition(":")[2] or known.collective)
        if known not in index:
            index[known] = len(messages)
            messages.append(known)
        return index[known]

    params = {m.external: m for m in calls if m.name == "record_param_comms" and m.external >= 0}
    by_thread: dict[int, list[Mark]] = {}
    for mark in sorted((m for m in calls if m.name != "record_param_comms"), key=lambda m: m.start_ns):
        by_thread.setdefault(mark.thread, []).append(mark)
    starts = {t: np.array([m.start_ns for m in ms], dtype=np.int64) for t, ms in by_thread.items()}
    for i in bare.tolist():
        named = params.get(int(rows[i, column["external"]]))
        if named is not None and named.message.collective:
            message[i] = number(named)
            continue
        own = by_thread.get(int(thread[i]))
        if own is None:
            continue
        at = int(np.searchsorted(starts[int(thread[i])], launch_ns[i], side="right")) - 1
        if at >= 0 and own[at].start_ns <= launch_ns[i] < own[at].end_ns:
            message[i] = number(own[at])
    return message


def _device(metadata: dict[str, Any], device: int) -> tuple[str, dict[str, Any]]:
    listed = metadata.get("deviceProperties")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and entry.get("id") == device:
            return str(entry.get("name", "")), entry
    return "", {}


def _rank(path: Path, info: dict[str, Any]) -> int | None:
    rank = _whole(info.get("rank"))
    if rank is not None:
        return rank
    found = _RANK_IN_NAME.findall(path.name)
    return int(found[-1]) if found else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None
