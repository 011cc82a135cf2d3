"""`weft doctor`: what this machine supports and what would silently disable overlap, each with its fix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from weft.cli.output import versioned

if TYPE_CHECKING:
    from rich.console import Console

    from weft.doctor import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Check the driver, GPUs, NCCL, the shim and the environment. Each finding comes with its fix."""
    from rich.console import Console

    from weft.doctor import diagnose

    if as_json:
        findings = diagnose()
        print(json.dumps(versioned({"checks": [finding.to_dict() for finding in findings]}), indent=2))
    else:
        # Progress goes to stderr, so that stdout has only the table.
        with Console(stderr=True).status("checking") as status:
            findings = diagnose(on_start=lambda name: status.update(f"checking {name}"))
        show_findings(findings, Console(highlight=False))
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def show_findings(findings: list[Check], console: Console) -> None:
    """The findings as a table, and the next step as the last line."""
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
