"""Copy engines for collectives (comm.engine dma): how many collectives they copied, and why not the others.

NCCL 2.28 and newer copies instead of launching a kernel if a communicator asks for zero CTAs and the buffers
are in symmetric windows. Otherwise it silently launches its kernels. The shim counts both.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.shim.job_folder import read_object

_log = logging.getLogger("weft.shim")

COPIED_KINDS = ("all_gather", "all_to_all", "gather", "scatter")
"""Collectives that copy engines can serve."""

_REASONS = {
    "engine_kernels": "NCCL launched a kernel although windows and policy allow copies",
    "engine_nodes": "its ranks are on several nodes",
    "engine_no_window": "its buffer is in no symmetric window of the communicator",
    "engine_other_kind": "copy engines serve all-gather, all-to-all, gather and scatter only",
    "engine_old_nccl": "this NCCL has no copy-engine collectives (2.28 and newer have; RCCL has none)",
    "engine_two_ranks": "the first copy between two ranks can hang before NCCL 2.31.2",
    "engine_own_policy": "its communicator does not ask for zero CTAs (NCCL_CTA_POLICY, a policy set by "
    "the program, ncclCommInitAll, or a configuration that NCCL refused)",
}
"""Keyed by counter: why a collective was not copied."""
_NO_COLLECTIVE = "comm.engine dma is not applied: no process of this job called an NCCL collective"


_NOTES = "copies.{}.json"
"""File name in the job's folder, one file per process."""


def leave_note(text: str) -> None:
    """From a process of a job: note what stands in for copies by copy engines, if they are not real."""
    folder = os.environ.get("WEFT_JOB")
    if not folder:
        return
    try:
        note = Path(folder) / _NOTES.format(os.getpid())
        note.write_text(json.dumps({"as": text}), encoding="utf-8")
    except OSError as error:
        _log.debug("no note on copy engines in %s: %s", folder, error)


def read_notes(folder: Path) -> list[str]:
    """The notes that the processes of a job left, without duplicates."""
    found = [read_object(path) for path in sorted(folder.glob(_NOTES.format("*")))] if folder.is_dir() else []
    return list(dict.fromkeys(str(note["as"]) for note in found if "as" in note))


def engine_report(
    counts: Mapping[str, Any], asked: bool, represented_as: Sequence[str] = ()
) -> dict[str, Any]:
    """The value of the key `engine` in `weft run --stats`.

    `asked`: the job was started with comm.engine dma. `represented_as`: what stands in for the copies, with
    ghost ranks of a node.
    """
    why = [f"{counts[name]:,}: {text}" for name, text in _REASONS.items() if counts[name]]
    copied, unsure = counts["engine_copied"], counts["engine_unsure"]
    kernels = sum(counts[name] for name in _REASONS)
    asked = asked or bool(copied or unsure or kernels)
    if asked and not (copied or unsure or kernels):
        why = [_NO_COLLECTIVE]
    return {
        "asked": asked,
        "copied": copied,
        "kernels": kernels,
        "unsure": unsure,
        "why": why,
        "traced": None,
        "represented_as": list(represented_as),
    }


def engine_summary(report: Mapping[str, Any]) -> str:
    """One line about the copy engines; empty if they were not requested."""
    if not report["asked"]:
        return ""
    if report["why"] == [_NO_COLLECTIVE]:
        return _NO_COLLECTIVE
    real = f" ({'; '.join(report['represented_as'])})" if report["represented_as"] else ""
    parts = [f"{report['copied']:,} collectives copied without an SM kernel{real}"]
    if report["unsure"]:
        parts.append(f"{report['unsure']:,} not distinguishable from others of their group")
    if report["kernels"]:
        parts.append(f"{report['kernels']:,} by SM kernels ({'; '.join(report['why'])})")
    return f"comm.engine dma: {', '.join(parts)}"


def kernels_in_traces(paths: Iterable[Path]) -> dict[str, int]:
    """Counts, by name, of SM kernels for collectives that copy engines could serve, in weft's traces."""
    found: Counter[str] = Counter()
    for path in paths:
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            kind = event.get("args", {}).get("Collective name")
            if event.get("cat") == "kernel" and kind in COPIED_KINDS:
                found[event["name"]] += 1
    return dict(found)


def traced_summary(kernels: Mapping[str, int]) -> str:
    """One line about the SM kernels that the traced steps show."""
    if not kernels:
        return "traced steps: no SM kernel for an all-gather, all-to-all, gather or scatter"
    named = ", ".join(f"{count} of {name.partition('(')[0]}" for name, count in kernels.items())
    return f"traced steps: SM kernels instead of copies ({named})"
