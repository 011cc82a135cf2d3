"""Settings of torch.compile that have no effect in the installed torch, as read from its files."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from weft.doctor.check import Check
from weft.doctor.libraries import Torch
from weft.doctor.machine import GpuFacts, Machine

OVERLAP, OVERLAP_PASSES = "reorder_for_compute_comm_overlap", "reorder_for_compute_comm_overlap_passes"
_REPORT = "pytorch PR 167080, xDiT PR 784"
_FIX = (
    f'also set torch._inductor.config.{OVERLAP_PASSES} = ["reorder_communication_preserving_peak_memory", '
    '"sink_waits_iterative", "reorder_communication_preserving_peak_memory"], as a comment there says'
)


@dataclass(frozen=True)
class Setting:
    """A module-level default in a file of torch."""

    line: int
    empty: bool


def inductor_default(torch: Torch, name: str) -> Setting | None:
    """The default of a setting in the installed torch; None if it has no such setting."""
    path = torch.folder / "_inductor" / "config.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            value = getattr(node, "value", None)
            return Setting(node.lineno, isinstance(value, (ast.List, ast.Tuple)) and not value.elts)
    return None


def compile_flags(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether the flag that many programs set for overlap still has an effect."""
    torch = machine.torch()
    if torch is None:
        return []
    flag, passes = inductor_default(torch, OVERLAP), inductor_default(torch, OVERLAP_PASSES)
    if flag is None:
        return []
    if passes is None or not passes.empty:
        return [
            Check("compile flags", "ok", f"torch {torch.version}: {OVERLAP} runs its passes where it is set")
        ]
    return [Check("compile flags", "ok", no_op(torch, passes), _FIX)]


def flag_in_program(torch: Torch | None, source: str, where: str) -> list[Check]:
    """A warning if a program sets the flag but not the passes, and torch's list of passes is empty."""
    if torch is None or OVERLAP not in source.replace(OVERLAP_PASSES, "") or OVERLAP_PASSES in source:
        return []
    passes = inductor_default(torch, OVERLAP_PASSES)
    if passes is None or not passes.empty:
        return []
    return [Check("compile flags", "warn", f"{where} sets {OVERLAP}, but {no_op(torch, passes)}", _FIX)]


def no_op(torch: Torch, passes: Setting) -> str:
    """Says that the flag has no effect in the installed torch, with the file and line that shows it."""
    file = Path("torch/_inductor/config.py")
    return (
        f"with torch {torch.version} {OVERLAP} = True alone does nothing: {OVERLAP_PASSES} is empty "
        f"({file}:{passes.line}; {_REPORT})"
    )
