"""Copy engines for collectives (comm.engine dma): what became of each collective, and why.

NCCL from 2.28 on copies in place of launching a kernel where a communicator asks for zero CTAs and the
buffers lie in symmetric windows. Where it cannot, it launches its kernels and says nothing. The shim counts
both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

COPIED_KINDS = ("all_gather", "all_to_all", "gather", "scatter")
"""Collectives that copy engines can serve."""

_REASONS = {
    "engine_kernels": "NCCL launched a kernel although windows and policy allow copies",
    "engine_nodes": "its ranks are on several nodes",
    "engine_no_window": "its buffer lies in no symmetric window of the communicator",
    "engine_other_kind": "copy engines serve all-gather, all-to-all, gather and scatter only",
    "engine_old_nccl": "this NCCL has no copy-engine collectives (2.28 and newer have; RCCL has none)",
    "engine_two_ranks": "the first copy between two ranks can hang before NCCL 2.31.2",
    "engine_own_policy": "its communicator does not ask for zero CTAs (NCCL_CTA_POLICY, a policy of the "
    "program's own, ncclCommInitAll, or a configuration that NCCL refused)",
}
"""By counter: why a collective was not copied."""
_NO_COLLECTIVE = "comm.engine dma is not applied: no process of this job called a collective of NCCL"


def engine_report(counts: Mapping[str, Any], asked: bool) -> dict[str, Any]:
    """What `weft run --stats` says under `engine`; `asked`: the job was started with comm.engine dma."""
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
    }


def engine_summary(report: Mapping[str, Any]) -> str:
    """One line about the copy engines, or nothing where nobody asked for them."""
    if not report["asked"]:
        return ""
    if report["why"] == [_NO_COLLECTIVE]:
        return _NO_COLLECTIVE
    parts = [f"{report['copied']:,} collectives copied without an SM kernel"]
    if report["unsure"]:
        parts.append(f"{report['unsure']:,} not told apart from others of their group")
    if report["kernels"]:
        parts.append(f"{report['kernels']:,} by SM kernels ({'; '.join(report['why'])})")
    return f"comm.engine dma: {', '.join(parts)}"


def kernels_in_traces(paths: Iterable[Path]) -> dict[str, int]:
    """Kernels that moved what copy engines could have moved, by name, in traces of `weft run --trace`."""
    found: Counter[str] = Counter()
    for path in paths:
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            kind = event.get("args", {}).get("Collective name")
            if event.get("cat") == "kernel" and kind in COPIED_KINDS:
                found[event["name"]] += 1
    return dict(found)


def traced_summary(kernels: Mapping[str, int]) -> str:
    """One line about what the traced steps show."""
    if not kernels:
        return "traced steps: no SM kernel for an all-gather, all-to-all, gather or scatter"
    named = ", ".join(f"{count} of {name.partition('(')[0]}" for name, count in kernels.items())
    return f"traced steps: SM kernels in place of copies ({named})"
