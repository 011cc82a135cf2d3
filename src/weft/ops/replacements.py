"""Counts what `weft run --ops` replaced in the processes of a job. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.shim.job_folder import read_object

FILES = "ops.{}.json"
"""Name of a process's report in the job's folder, by process id."""


@dataclass
class Replacements:
    """What was replaced in this process."""

    compiles: bool = False
    """Whether the program has called torch.compile."""
    layers: int = 0
    """Layers under torch's styles that may use fused operations."""
    graphs: int = 0
    """Graphs in which something was replaced."""
    gathers: int = 0
    scatters: int = 0
    matmuls: int = 0
    """Matmuls that are now part of a gather or a scatter."""
    too_small: int = 0
    """Patterns left unchanged: their transfer is too short to gain."""

    def add(self, gathers: int, scatters: int, matmuls: int, too_small: int) -> None:
        self.graphs += bool(gathers or scatters)
        self.gathers += gathers
        self.scatters += scatters
        self.matmuls += matmuls
        self.too_small += too_small

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def read_replacements(folder: Path) -> dict[str, Any]:
    """The replacements in all processes of a job, and a sentence about the lowest rank that has any."""
    found = [read_object(path) for path in sorted(folder.glob(FILES.format("*")))] if folder.is_dir() else []
    busy = sorted((each for each in found if each.get("operations")), key=lambda each: int(each["rank"]))
    first = busy[0] if busy else next((each for each in found if _reason(each)), None)
    return {"text": _text(first), "processes": found}


def _reason(process: dict[str, Any]) -> str:
    """Why nothing was replaced in a process that had candidates; empty if it had none."""
    if process.get("unreachable"):
        return str(process["unreachable"])
    return f"{process['too_small']} patterns are too small to gain" if process.get("too_small") else ""


def _text(first: dict[str, Any] | None) -> str:
    if first is None:
        return "ops: nothing was replaced: no tensor parallelism with sharded sequences that promises a gain"
    if not first["operations"]:
        return f"ops: nothing was replaced: {_reason(first)}"
    kinds = sorted({f"{each['schedule']} on {each['engine']}" for each in first["operations"]})
    parts = [f"{first['layers']} layers"] if first["layers"] else []
    if first["graphs"]:
        graphs = f"{first['graphs']} compiled graphs"
        parts.append(f"{first['gathers']} gathers and {first['scatters']} scatters in {graphs}")
    where = " and ".join(parts) or "graphs from Inductor's cache"
    calls = f"{first['calls']} calls on rank {first['rank']}"
    return f"ops: {where} use fused operations; {calls} ({', '.join(kinds)})"
