"""Timelines of a live run: from torch's profiler, or from events if the profiler records no kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.kernels import is_comm
from weft.timeline import Kind, Timeline

SPIN = "spin_kernel"
"""Name of torch.cuda._sleep's kernel; everything before its end is preparation."""
OWN_WAIT = "weft_head_start"
"""Name of the shim's head-start kernel, which is neither compute nor communication."""


def record_timeline(once: Callable[[], None]) -> Timeline | None:
    """The timeline of what `once` runs on the GPU; None if the profiler cannot record it."""
    try:
        import torch
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            once()
        return timeline_of(profiler)
    except (ImportError, AttributeError, RuntimeError):
        return None


def timeline_of(profiler: Any) -> Timeline:
    """The GPU activity in a stopped torch profiler."""
    return from_rows(
        [
            (
                int(e.start_ns()),
                int(e.start_ns()) + int(e.duration_ns()),
                int(e.device_resource_id()),
                e.name(),
            )
            for e in profiler.profiler.kineto_results.events()
            if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0
        ]
    )


def from_rows(rows: Sequence[tuple[int, int, int, str]]) -> Timeline:
    """A Timeline from rows (start ns, end ns, stream, kernel name), from the end of the spin kernel on."""
    origin = max((end for _, end, _, name in rows if SPIN in name), default=0)
    kept = sorted(row for row in rows if row[0] >= origin and OWN_WAIT not in row[3] and SPIN not in row[3])
    base = kept[0][0] if kept else 0
    names = tuple(dict.fromkeys(row[3] for row in kept))
    index = {name: i for i, name in enumerate(names)}
    return Timeline(
        start_ns=np.array([row[0] - base for row in kept], dtype=np.int64),
        end_ns=np.array([row[1] - base for row in kept], dtype=np.int64),
        stream=np.array([row[2] for row in kept], dtype=np.int64),
        kind=np.array([_kind(row[3]) for row in kept], dtype=np.uint8),
        name=np.array([index[row[3]] for row in kept], dtype=np.int32),
        names=names,
    )


def from_marks(begin: Any, marks: Sequence[tuple[str, Any, Any]], elapsed_ms: Any) -> Timeline:
    """A Timeline from (kind, start event, end event). A collective's span includes its wait for SMs."""
    rows = []
    for kind, start, end in marks:
        first, last = (round(elapsed_ms(begin, event) * 1e6) for event in (start, end))
        rows.append((first, last, 0 if kind == "compute" else 1, "nccl" if kind == "comm" else "compute"))
    return from_rows(rows)


def _kind(name: str) -> Kind:
    if name.startswith(("Memcpy", "Memset")):
        return Kind.MEMORY
    return Kind.COMM if is_comm(name) else Kind.COMPUTE


def timeline_to_dict(timeline: Timeline) -> dict[str, Any]:
    """A Timeline as a JSON-compatible dict."""
    columns = ("start_ns", "end_ns", "stream", "kind", "name")
    return {**{c: getattr(timeline, c).tolist() for c in columns}, "names": list(timeline.names)}


def timeline_from_dict(document: dict[str, Any]) -> Timeline:
    """The inverse of `timeline_to_dict`."""
    types = {"start_ns": np.int64, "end_ns": np.int64, "stream": np.int64, "kind": np.uint8, "name": np.int32}
    columns: dict[str, Any] = {c: np.array(document[c], dtype=kind) for c, kind in types.items()}
    return Timeline(**columns, names=tuple(document["names"]))
