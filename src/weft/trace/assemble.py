"""Turns a reader's columns into Traces, one per GPU: kinds, launches, messages and steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import InputError
from weft.timeline import Kind, Ns, Timeline, union
from weft.trace.custom import IsComm
from weft.trace.events import GPU_COLUMNS, KERNEL, MEMCPY, Collector
from weft.trace.files import shown
from weft.trace.modules import module_of
from weft.trace.record import UNKNOWN_NS, Step, Trace
from weft.trace.schema import Mark, Message, text_field

MAX_NAME = 1 << 14
"""Longer kernel names are truncated. Templates produce names of a few thousand characters."""

_RANK_IN_NAME = re.compile(r"(?:rank|worker|gpu)[_\-.]?([0-9]{1,6})(?![0-9])", re.IGNORECASE)
_PEER_COPY = re.compile(r"\bp(?:eer)?[ _]?to[ _]?p(?:eer)?\b|\bp2p\b", re.IGNORECASE)

PROFILER_SLOWS_HOST = 57.3 / 38.9
"""CPU slowdown by torch's profiler: a launch-bound step (ViT-B/16, H200) with its hooks over one without."""


def traces_from(
    path: Path,
    collector: Collector,
    metadata: dict[str, Any],
    truncated: str | None,
    is_comm_names: IsComm,
) -> list[Trace]:
    """One Trace per GPU of a file, in device order. `metadata` has the keys of Kineto's JSON."""
    rows = collector.gpu()
    warnings = [*_warnings(collector, truncated), *_unknown_overlap(metadata)]
    if not len(rows):
        detail = f" ({warnings[0]})" if warnings else ""
        raise InputError(
            f"{path}: no GPU activity in its {collector.events} events{detail}; "
            "profile with ProfilerActivity.CUDA"
        )
    names = [text_field(raw)[:MAX_NAME] for raw in collector.names.values()]
    column = {name: i for i, name in enumerate(GPU_COLUMNS)}
    kinds = _kinds(rows[:, column["name"]], rows[:, column["kind"]], names, is_comm_names)
    launches = _launches(rows[:, column["correlation"]], collector.launches())
    launch_ns, thread, launch_end_ns = launches[:, 0], launches[:, 1], launches[:, 5]
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
    module, modules = module_of(np.flatnonzero(kinds == Kind.COMM), launch_ns, thread, collector.modules)
    blocking = collector.blocking()
    blocked = union(blocking[:, 0].copy(), blocking[:, 1].copy())
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    waits = collector.waits()[:, 1:]
    by_torch = "schemaVersion" in metadata and "weft" not in metadata
    out = []
    for device in np.unique(rows[:, column["device"]]).tolist():
        here = np.flatnonzero(rows[:, column["device"]] == device)
        here = here[_by_time(rows, here, column)]
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
                launch_end_ns=launch_end_ns[here],
                thread=thread[here],
                correlation=take("correlation"),
                sequence=take("sequence"),
                message=message[here],
                messages=tuple(messages),
                steps=steps,
                blocking=blocked,
                waits=waits,
                events=collector.events,
                module=module[here],
                modules=modules,
                partial=bool(truncated) or collector.damaged > 0,
                host_slowed=PROFILER_SLOWS_HOST if by_torch else 1.0,
                warnings=tuple(warnings),
            )
        )
    return out


def _by_time(
    rows: npt.NDArray[np.int64], here: npt.NDArray[np.intp], column: dict[str, int]
) -> npt.NDArray[np.intp]:
    """Sorts spans by start. The order of equal starts must not depend on how the file was read."""
    start = rows[here, 0]
    order = np.argsort(start, kind="stable")
    if bool((np.diff(start[order]) == 0).any()):
        keys = ("correlation", "stream", "kind", "end", "start")
        order = np.lexsort(tuple(rows[here, column[key]] for key in keys))
    return order


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
    """Warnings for a trace of `weft run --trace` that contains CUDA graphs with collectives."""
    own = metadata.get("weft")
    graphs = _whole(own.get("overlap_unknown")) if isinstance(own, dict) else None
    if not graphs:
        return []
    return [f"{graphs} launches of CUDA graphs with collectives are not counted: their overlap is unknown"]


def _kinds(
    name: npt.NDArray[np.int64], category: npt.NDArray[np.int64], names: list[str], is_comm_names: IsComm
) -> npt.NDArray[np.uint8]:
    """Kind of each span. Copies between peers count as communication, other copies as memory."""
    kernel_comm = np.array(is_comm_names(names), dtype=bool)
    peer = np.array([_PEER_COPY.search(n) is not None for n in names], dtype=bool)
    of_kernel = np.where(kernel_comm, Kind.COMM, Kind.COMPUTE)[name]
    of_copy = np.where(peer, Kind.COMM, Kind.MEMORY)[name]
    kinds = np.where(category == KERNEL, of_kernel, np.where(category == MEMCPY, of_copy, Kind.MEMORY))
    return kinds.astype(np.uint8)


def _launches(correlation: npt.NDArray[np.int64], launches: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The call that launched each span, by correlation id; the first if several calls share an id.

    Columns: start, thread, blocks, threads per block, shared bytes, end; UNKNOWN_NS and -1 where unknown.
    """
    unknown = np.array([UNKNOWN_NS, -1, -1, -1, -1, UNKNOWN_NS], dtype=np.int64)
    launches = launches[launches[:, 2] >= 0]
    if not len(launches):
        return np.tile(unknown, (len(correlation), 1))
    launches = launches[np.lexsort((launches[:, 0], launches[:, 2]))]
    at = np.minimum(np.searchsorted(launches[:, 2], correlation), len(launches) - 1)
    known = (launches[at, 2] == correlation) & (correlation >= 0)
    return np.where(known[:, None], launches[at][:, [0, 3, 4, 5, 6, 1]], unknown)


def _messages(
    rows: npt.NDArray[np.int64],
    column: dict[str, int],
    kinds: npt.NDArray[np.uint8],
    launch_ns: Ns,
    thread: npt.NDArray[np.int64],
    marks: list[Mark],
    messages: list[Message],
) -> npt.NDArray[np.int64]:
    """Index of each collective's message: its own, or that of the CPU call that issued it."""
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
