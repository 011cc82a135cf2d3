"""`weft doctor`: what this machine supports and what would silently disable overlap, each with its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.output import versioned

if TYPE_CHECKING:
    from rich.console import Console

    from weft.doctor import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="CMD…", help="After `--`: a command to check without running it."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="TRACE", help="Also check bucket sizes and prefetch in a profiler trace."),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Also check a running job that `weft run` started.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
) -> None:
    """Check the driver, GPUs, NCCL, the shim and the environment. Each finding comes with its fix.

    weft doctor -- torchrun --nproc-per-node 8 train.py
    """
    from rich.console import Console

    from weft.doctor import diagnose

    if as_json:
        observed = _observed(trace, job)  # first, so that a missing trace or job is reported at once
        findings = diagnose(command=command) + observed
        print(json.dumps(versioned({"checks": [finding.to_dict() for finding in findings]}), indent=2))
    else:
        # Progress goes to stderr, so that stdout has only the table.
        with Console(stderr=True).status("checking") as status:
            observed = _observed(trace, job)
            findings = diagnose(on_start=lambda name: status.update(f"checking {name}"), command=command)
            findings += observed
        show_findings(findings, Console(highlight=False))
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def _observed(trace: list[Path] | None, job: str | None) -> list[Check]:
    from weft.doctor.traffic_checks import job_checks, trace_checks

    return (trace_checks(trace) if trace else []) + (job_checks(job) if job else [])


def show_findings(findings: list[Check], console: Console) -> None:
    """Print the findings as a table, and the next step as the last line."""
    from rich.table import Table
    from rich.text import Text

    from weft.doctor import next_step

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), expand=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.status]
        label = "environment" if finding.name.startswith("env:") else finding.name
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(
                f"\nfix: {finding.fix}", style="cyan" if finding.status in ("warn", "fail") else "dim"
            )
        table.add_row(Text(finding.status, style=colour), Text(label), detail)
    console.print(table)
    console.print(Text(next_step(findings), style="bold"))
