"""The part of FiCCO that one GPU can run: losses from cutting GEMMs, from contention and from copies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import UnavailableError, WeftError
from weft.reproduce.figure import HELD_OUT, OnProgress, Reproduced, Reproduction

GEMM_SHAPE = (8192, 8192, 8192)
_START_S = 60.0
"""Time to start Python, torch and the GPU's context; it is not part of the budget."""


def measured_losses(paper: str, budget_s: float, progress: OnProgress) -> Reproduction:
    """Losses on this GPU compared with the simulator's; measured in a separate process, within the budget."""
    progress("losses", 0, 1)
    document = in_child([sys.executable, "-m", __name__], budget_s)
    progress("losses", 1, 1)
    return losses_document(paper, document)


def losses_document(paper: str, document: Mapping[str, Any]) -> Reproduction:
    """The Reproduction with the results of `weft explore --characterize`."""
    rows = [
        Reproduced(
            id=f"ficco/loss/{row['ways']}-way along {row['axis']}",
            cell="x".join(map(str, row["gemm"])),
            published=None,
            ours=float(row["loss_pct"]),
            basis=HELD_OUT,
            unit="% more time",
            note=f"simulated: {row['simulated_loss_pct']}%" if "simulated_loss_pct" in row else "",
        )
        for row in document["decomposition"]
    ]
    for row in document["contention"]:
        for side in ("gemm", "copy"):
            rows.append(
                Reproduced(
                    id=f"ficco/contention/{side} slowed",
                    cell=f"{row['engine']}, {row['how']}",
                    published=None,
                    ours=float(row[f"{side}_slowed_pct"]),
                    basis=HELD_OUT,
                    unit="% more time",
                )
            )
    rows += [
        Reproduced(
            id="dma/overhead",
            cell=f"{row['bytes'] >> 10} KiB",
            published=None,
            ours=float(row["overhead_pct"]),
            basis=HELD_OUT,
            unit="% of a copy",
            note="pinned host memory to this GPU; the paper's is between two MI300X",
        )
        for row in document["copies"]
    ]
    return Reproduction(
        paper=paper,
        title="FiCCO, the part that one GPU can run: losses",
        device=str(document["gpu"]),
        simulated=False,
        figures=tuple(rows),
        summary={"figures": len(rows)},
        assumptions=("One GPU: peers are pinned host memory, so copies cross PCIe.",),
    )


def in_child(command: list[str], budget_s: float) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints last.

    A separate process is needed because a hung GPU call cannot be stopped from within.
    """
    source = str(Path(__file__).parents[2])
    paths = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH")) if part)
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    try:
        out, problems = child.communicate(timeout=_START_S + budget_s)
    except subprocess.TimeoutExpired:
        raise WeftError(
            f"the losses were not measured within {budget_s:g} s; give more with --budget"
        ) from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = out.splitlines()
    if child.returncode or not lines:
        last = next(iter(reversed(problems.splitlines())), f"exit code {child.returncode}")
        raise UnavailableError(f"the losses could not be measured: {last}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _measure() -> None:
    """Entry point of the child process: print the measurements as JSON."""
    from weft.ops.characterize_device import measured

    try:
        document = measured([GEMM_SHAPE], "bf16")
    except WeftError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    _measure()
