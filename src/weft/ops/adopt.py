"""Fused operations in an unmodified program. torch's autoload starts this under `weft run --ops`.

For models sharded with torch's styles, weft wraps the styles (`weft.ops.adopt_styles`); in torch.compile
graphs, an Inductor pass replaces operations (`weft.ops.fuse_graph`). Each is installed when the program
imports the part of torch that it changes; otherwise the program is left unchanged. On exit, each process
writes its replacements to the job's folder.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.comm.after_import import AfterImport
from weft.ops.replacements import FILES, Replacements

_log = logging.getLogger("weft.ops")

STYLES = "torch.distributed.tensor.parallel"
INDUCTOR = "torch._inductor.config"
_counted = Replacements()


def start() -> None:
    """Install the hooks. Called while torch is imported, in every process of a job under `weft run --ops`."""
    _notice_compile()
    AfterImport({STYLES: _install_styles, INDUCTOR: _install_pass}).install()
    atexit.register(_leave_report, os.getpid())


def _notice_compile() -> None:
    """Record the program's first call of torch.compile."""
    import torch

    original = torch.compile

    @functools.wraps(original)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        _counted.compiles = True
        return original(*args, **kwargs)

    torch.compile = noticed


def _install_styles(module: ModuleType) -> None:
    from weft.ops.adopt_styles import install_styles

    install_styles(importlib.import_module(f"{module.__name__}.style"), _counted)


def _install_pass(config: ModuleType) -> None:
    from weft.ops.inductor_pass import FusedCollectives

    given = getattr(config, "post_grad_custom_pre_pass", None)
    config.post_grad_custom_pre_pass = FusedCollectives(given, _counted)  # type: ignore[attr-defined]


def _leave_report(process: int) -> None:
    """Write this process's replacements, for the closing line of `weft run` and its statistics."""
    folder = Path(os.environ.get("WEFT_JOB") or "/nowhere")
    if process != os.getpid() or not folder.is_dir():
        return
    try:
        text = json.dumps(_report())
        (folder / FILES.format(process)).write_text(text, encoding="utf-8")
    except Exception:
        _log.debug("no report of the replacements", exc_info=True)


def _report() -> dict[str, Any]:
    teams = sys.modules.get("weft.ops.teams")
    found: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0") or 0),
        **_counted.to_dict(),
        "calls": 0,
        "operations": [],
        "unreachable": "",
    }
    for team in teams.known_teams() if teams is not None else ():
        found["calls"] += team.calls
        found["unreachable"] = found["unreachable"] or team.unreachable
        for prepared in team.prepared.values():
            problem = prepared.schedule.problem
            found["operations"].append(
                {
                    "operation": prepared.call.operation,
                    "m": problem.m,
                    "n": problem.n,
                    "k": problem.k,
                    "ranks": problem.ranks,
                    "schedule": prepared.choice.schedule,
                    "engine": prepared.choice.engine,
                }
            )
    return found
