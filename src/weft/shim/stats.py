"""The shim's counters from every process of a job, as one document."""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import InputError
from weft.policy import Policy
from weft.shim import binding, communicators, layout
from weft.shim.engine import engine_report, engine_summary

_log = logging.getLogger("weft.shim")

_SUMMED = ("launches", "shaped", "beside")
_LATEST = ("ctas", "why_not")  # describe the latest launch, so rows of the same kernel may differ in them


def collect(folder: Path) -> dict[str, Any]:
    """Sums over all processes of a job, and the figures of each process."""
    processes = []
    for path in sorted(folder.glob("[0-9]*.[0-9]*")) if folder.is_dir() else ():
        try:
            processes.append(describe(binding.read_process(path)))
        except (InputError, OSError) as error:  # a process killed while creating its file launched nothing
            _log.debug("skipped %s: %s", path, error)
    return {
        **_totals(processes),
        "kernels": _merge(kernel for process in processes for kernel in process["kernels"]),
        "processes": processes,
    }


def snapshot() -> dict[str, Any]:
    """The counters of this process so far; all zero if the shim is not loaded in it."""
    path = binding.attach()
    return describe(binding.read_process(path)) if path else {**_totals([]), "kernels": []}


def describe(process: binding.Process) -> dict[str, Any]:
    """One process's counters, the most frequently launched kernels first."""
    head = process.head
    counters = dict(zip(layout.COUNTERS, head.counters, strict=False))
    kernels = _merge(_kernel(row, cells) for row, cells in process.rows())
    if counters["head_starts"]:
        kernels.append(_wait_kernel(counters))
    return {
        "pid": head.pid,
        "rank": head.rank if head.rank >= 0 else None,
        "command": head.command.decode(errors="replace").strip(),
        "api": layout.APIS.get(head.api, "unknown"),
        "launches": sum(kernel["launches"] for kernel in kernels),
        "comm_launches": sum(k["launches"] for k in kernels if k["kind"] == "comm"),
        "shaped": sum(kernel["shaped"] for kernel in kernels),
        **counters,
        "nccl": _nccl(head),
        "kernels": kernels,
    }


def _nccl(head: layout.CHead) -> dict[str, Any] | None:
    """The NCCL of the latest communicator and how rules reach it; None if there was no communicator."""
    if not head.nccl_version:
        return None
    version, path = communicators.nccl_version(head.nccl_version), layout.NCCL_PATHS[head.nccl_path]
    return {
        "version": version,
        "path": path,
        "why": communicators.path_reason(path, version, head.nccl_tuner or None),
        "tuner": head.nccl_tuner or None,
        "user_tuner": head.nccl_user_tuner or None,
    }


def _kernel(row: layout.CRow, cells: list[layout.CCell]) -> dict[str, Any]:
    shaped = sum(cell.shaped for cell in cells)
    return {
        "name": demangle(row.name.decode(errors="replace")),
        "kind": layout.KINDS[row.kind] if row.kind < len(layout.KINDS) else "unknown",
        "launches": sum(cell.launches for cell in cells),
        "shaped": shaped,
        "beside": sum(cell.beside for cell in cells),
        "ctas": row.grid_blocks or None,
        "blocks_per_sm": (row.shaped_blocks if shaped else row.natural_blocks) or None,
        "natural_blocks_per_sm": row.natural_blocks or None,
        "threads": row.threads,
        "shared_bytes": row.shaped_bytes if shaped else row.shared_bytes,
        "why_not": None
        if row.reason == 0
        else layout.REASONS_NOT_APPLIED[min(row.reason, len(layout.REASONS_NOT_APPLIED) - 1)],
    }


def _wait_kernel(counters: dict[str, int]) -> dict[str, Any]:
    return {
        "name": "weft_head_start_placed" if counters["placed_events"] else "weft_head_start",
        "kind": "weft",
        "launches": counters["head_starts"],
        "shaped": 0,
        "beside": 0,
        "ctas": None,
        "blocks_per_sm": None,
        "natural_blocks_per_sm": None,
        "threads": 1,
        "shared_bytes": 0,
        "why_not": None,
    }


def _merge(kernels: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combine equal rows of all processes; the most frequently launched kernel comes first."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kernel in kernels:
        if not kernel["launches"]:
            continue
        key = tuple(value for field, value in kernel.items() if field not in (*_SUMMED, *_LATEST))
        known = merged.setdefault(key, {**kernel, **dict.fromkeys(_SUMMED, 0)})
        for field in _SUMMED:
            known[field] += kernel[field]
    return sorted(merged.values(), key=lambda kernel: -kernel["launches"])


def _totals(processes: list[dict[str, Any]]) -> dict[str, int]:
    names = ("launches", "comm_launches", "shaped", *layout.COUNTERS)
    return {name: sum(process[name] for process in processes) for name in names}


def stats_summary(stats: dict[str, Any], policy: Policy) -> str:
    """One line that says which controls took effect, or that none did and why."""
    if not stats["launches"] and stats["unhandled"]:
        return "no launch was changed: the job launched only graphs whose kernels weft cannot count"
    engine = stats.get("engine") or engine_report(stats, policy.engine == "dma")
    if not stats["launches"] and not engine["copied"]:
        also = f"; {engine_summary(engine)}" if engine["asked"] else ""
        return f"no launch was changed: no process of this job launched a GPU kernel{also}"
    parts = []
    if policy.residency or policy.rules:
        parts.append(_shaped_part(stats))
    if policy.priority == "high":
        parts.append(f"{stats['prioritised']:,} of {stats['comm_launches']:,} collectives prioritised")
    if policy.head_start == "placed":
        parts.append(_placed_part(stats))
    elif policy.head_start_us:
        parts.append(f"{stats['head_starts']:,} head starts of {policy.head_start_us:g} µs")
    if policy.sm_reserve:
        parts.append(_reserved_part(stats, policy))
    if stats["routed"]:
        parts.append(f"{stats['routed']:,} collectives with a CTA count set by weft")
    if policy.comm_rules:
        parts.append(_rules_part(stats))
    if policy.engine == "dma":
        parts.append(engine_summary(engine))
    failures = ("shape", "priority", "head_start", "tracking", "split", "tuner")
    for name in (f"{kind}_failures" for kind in failures):
        if stats[name]:
            parts.append(f"{stats[name]:,} {name.replace('_', ' ')}")
    if stats["unknown"]:
        parts.append(
            f"{stats['unknown']:,} launches of kernels that this driver does not name, left unchanged"
        )
    if stats["unlisted"]:
        parts.append(f"{stats['unlisted']:,} launches of more kernels than weft lists, counted together")
    if stats["unhandled"]:
        parts.append(f"{stats['unhandled']:,} uses of an interface that weft does not account for")
    if not stats["comm_launches"] and not engine["copied"]:
        parts.append("no collective was launched")
    counted = f"{stats['launches']:,} kernels, {stats['comm_launches']:,} of them collectives"
    return "; ".join([counted, *(parts or ["no control was requested"])])


def _placed_part(stats: dict[str, Any]) -> str:
    reasons = {
        "placed_timeouts": "timed out",
        "placed_behind": "not applied: other collectives had to be placed first",
        "placed_captured": "not applied: in a graph capture",
        "placed_busy": "not applied: too many collectives or threads on a stream",
        "placed_failures": "not applied: this driver has no launch-completion event (CUDA 12.3 has it)",
    }
    waited = f"{stats['head_starts']:,} waits for {stats['placed_events']:,} collectives to be placed"
    ready = f"{stats['placed_ready']:,} already placed"
    found = [f"{stats[name]:,} {text}" for name, text in reasons.items() if stats[name]]
    return f"{waited} ({', '.join([ready, *found])})"


def _reserved_part(stats: dict[str, Any], policy: Policy) -> str:
    reasons = {
        "sm_reserve_own": "unchanged, since the program set its own SM count",
        "sm_reserve_determinism": "unchanged, since CUBLAS_WORKSPACE_CONFIG asks for reproducible results",
        "sm_reserve_failures": "refused by cuBLAS",
    }
    found = [f"{stats[name]:,} {text}" for name, text in reasons.items() if stats[name]]
    if not stats["sm_reserved"] and stats["sm_reserve_others"]:
        found.append(
            f"not applied to {stats['sm_reserve_others']:,} launches during collectives: "
            "they are not GEMMs of the cuBLAS that the program is linked to"
        )
    also = f" ({', '.join(found)})" if found else ""
    return f"{stats['sm_reserved']:,} GEMMs left {policy.sm_reserve} SMs free{also}"


def _rules_part(stats: dict[str, Any]) -> str:
    done = f"rules: {stats['per_call']:,} calls configured, {stats['tuned']:,} answers to NCCL's tuner"
    if stats["config_refused"]:
        done += f", {stats['config_refused']:,} configurations refused"
    if stats["rules_unapplied"]:
        why = {found["nccl"]["why"] for found in stats["processes"] if found["nccl"]}
        done += f", {stats['rules_unapplied']:,} not applied ({'; '.join(sorted(why)) or 'no communicator'})"
    return done


def _shaped_part(stats: dict[str, Any]) -> str:
    if stats["shaped"]:
        return f"{stats['shaped']:,} launches shaped"
    why: Counter[str] = Counter()
    for kernel in stats["kernels"]:
        if kernel["kind"] == "compute" and kernel["why_not"]:
            why[kernel["why_not"]] += kernel["launches"]
    reason = why.most_common(1)[0][0] if why else "there was no compute kernel"
    return f"nothing was shaped: {reason}"


@cache
def _cxa_demangle() -> Any:
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    return function


def demangle(name: str) -> str:
    """A kernel's demangled C++ name; `name` itself if it is not mangled or libstdc++ is missing."""
    function = _cxa_demangle() if name.startswith("_Z") else None
    if function is None:
        return name
    status = ctypes.c_int(-1)
    text = function(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not text:
        return name
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        _free(text)


def _free(pointer: int) -> None:
    free = ctypes.CDLL(None).free
    free.argtypes = (ctypes.c_void_p,)
    free(pointer)
