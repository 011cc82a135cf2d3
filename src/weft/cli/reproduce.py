"""`weft reproduce`: every published figure of a paper next to ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.cli.output import check_output, check_seconds, versioned

if TYPE_CHECKING:
    from weft.reproduce.figure import OnProgress, Reproduction

_PAPERS = ("2606.09200", "2512.10236")
DEFAULT_BUDGET_S = 100.0


def reproduce(
    paper: str = typer.Argument(..., metavar="PAPER", help="2606.09200 or 2512.10236 (arXiv)."),
    device: str = typer.Option(
        "sim", help="sim: the paper's nodes, simulated; cuda: the part that one GPU can run."
    ),
    html: Path | None = typer.Option(None, help="Write an HTML page."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
    everything: bool = typer.Option(
        False,
        "--all",
        help="Also all workloads under every control, which the paper does not publish (minutes).",
    ),
    cells: bool = typer.Option(False, "--cells", help="Print every cell, not only the tables."),
    budget: float | None = typer.Option(
        None, metavar="SECONDS", help="With --device cuda: time for measurements; default: 100."
    ),
) -> None:
    """Compare every published figure of a paper with weft's own.

    Shows errors, whether the sign of an effect is right, and what was assumed.
    """
    from weft.checks import check_choice
    from weft.errors import UsageError
    from weft.files import write_whole

    wanted = paper.lower().removeprefix("arxiv:")
    check_choice("paper", wanted, _PAPERS)
    if device not in ("sim", "cuda"):
        raise UsageError(f"device {device!r} is not known; use sim (the paper's nodes) or cuda")
    if budget is not None:
        check_seconds("--budget", budget)
        if device != "cuda":
            raise UsageError("--budget limits the time on a GPU; add --device cuda, or leave it out")
    if everything and (device == "cuda" or wanted != _PAPERS[0]):
        raise UsageError(f"--all adds simulated workloads of {_PAPERS[0]} only; leave it out here")
    check_output("--html", html)
    found = _run(wanted, device, budget or DEFAULT_BUDGET_S, everything=everything, quiet=as_json)
    if html is not None:
        from weft.report.reproduce import reproduction_page

        write_whole(html, reproduction_page(found))
    if as_json:
        print(json.dumps(versioned(found.to_dict())))
        return
    from rich.console import Console

    from weft.report.reproduce import show_reproduction

    show_reproduction(Console(), found, cells=cells)
    if html is not None:
        print(f"page: {html}")


def _run(paper: str, device: str, budget: float, *, everything: bool, quiet: bool) -> Reproduction:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed}/{task.total}"))
    bars = Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=quiet)
    tasks: dict[str, object] = {}

    def tell(what: str, done: int, of: int) -> None:
        if not tasks:
            bars.start()  # not earlier: bars without a task leave an empty line above an error
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=of)
        bars.update(tasks[what], completed=done)  # type: ignore[arg-type]

    try:
        return _reproduction(paper, device, budget, tell, everything=everything)
    finally:
        if tasks:
            bars.stop()


def _reproduction(
    paper: str, device: str, budget: float, tell: OnProgress, *, everything: bool
) -> Reproduction:
    if device == "cuda":
        from weft.reproduce.on_gpu import reproduce_on_gpu

        return reproduce_on_gpu(paper, budget, tell)
    if paper == _PAPERS[0]:
        from weft.reproduce.resource_aware import reproduce_overlap

        return reproduce_overlap(tell, everything=everything)
    from weft.reproduce.finer_grain import reproduce_ficco

    return reproduce_ficco(tell)
