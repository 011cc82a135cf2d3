"""`weft bench`: run a suite, resumable, with a progress bar."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import check_output_folder, check_seconds, versioned

if TYPE_CHECKING:
    from rich.progress import Progress

    from weft.bench.suites import Suite
    from weft.execute.base import Executor


def bench(
    name: str = typer.Argument(..., metavar="SUITE", help="quick, paper, fig2, modern or check."),
    device: str = typer.Option("auto", help="auto, cuda, cpu (under torchrun) or sim:NAME."),
    out: Path = typer.Option(Path("weft-results"), help="Folder for result files; a rerun resumes there."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
    only: str = typer.Option("", metavar="GLOB", help="Run only the workloads whose names match."),
    budget: float = typer.Option(
        0.0, metavar="SECONDS", show_default=False, help="Time budget of the suite; default: the suite's own."
    ),
    deadline: float = typer.Option(
        45.0, metavar="SECONDS", help="Time limit of one run; a longer run counts as hung."
    ),
    seed: int = typer.Option(0, help="Seed for the order of measurements."),
    again: bool = typer.Option(False, "--again", help="Also measure what is already in the result file."),
    shim: bool = typer.Option(
        True, help="Run the worker under the launch shim (for residency and head start)."
    ),
    dry_run: bool = typer.Option(False, "--plan", help="Print the plan and stop."),
    policy_file: Path | None = typer.Option(  # noqa: B008
        None, "--policy", metavar="FILE", help="Also measure this policy (JSON) on every workload."
    ),
    node: str = typer.Option(
        "", metavar="NODE", help="Run this GPU, or the simulated one, as rank 0 of a node (see `weft node`)."
    ),
) -> None:
    """Measure the effect of each control on a suite of workloads."""
    from weft.bench import results
    from weft.bench.suites import FIG2
    from weft.bench.suites import suite as find
    from weft.comm.node import load_node
    from weft.execute.devices import check_device, open_executor, paper_device, paper_ranks
    from weft.execute.devices import resolve as resolve_device
    from weft.policy import Policy
    from weft.ranks import Ranks

    suite, device = find(name).only(only), resolve_device(device)
    if suite.name == FIG2 and not node and (paper_node := paper_device(device)) is not None:
        suite, device = suite.with_ranks(paper_ranks(paper_node)), paper_node
    policy = Policy.load(policy_file) if policy_file is not None else None
    if policy is not None:
        suite = suite.with_policy(policy)
    if node:
        suite = suite.with_ranks(load_node(node).ranks)
    budget = suite.budget_s if budget == 0 else budget
    check_seconds("--budget", budget)
    check_seconds("--deadline", deadline)
    check_device(device, node)
    check_output_folder("--out", out)
    leading = os.environ.get("RANK", "0") == "0"  # under torchrun every rank measures and rank 0 reports
    target = out / f"{suite.name}.jsonl"
    describe = leading and not as_json
    if dry_run:
        if describe:
            _print_plan(suite, device, budget, target)
        return
    executor = open_executor(
        device, baseline_ctas=suite.baseline_ctas, deadline_s=deadline, under_shim=shim, node=node
    )
    try:
        if describe:  # only once there is a device to run it on
            _print_plan(suite, device, budget, target)
        _, before = results.load_results(target)
        skip = set() if again else results.done_cells(before, executor.device, policy.label if policy else "")
        skip = Ranks().first(skip)  # rank 0's file decides for all
        missing = _run(executor, suite, budget, seed, skip, target, leading=leading, quiet=as_json)
    finally:
        executor.close()
    if not leading:
        return
    names = {cell.name for cell in suite.cells}
    rows = [
        r for r in results.load_results(target)[1] if r["device"] == executor.device and r["cell"] in names
    ]
    if as_json:
        print(json.dumps(versioned(_document(executor, suite, rows, missing))))
    else:
        _print_table(rows, missing, target)


def _run(
    executor: Executor,
    suite: Suite,
    budget: float,
    seed: int,
    skip: set[str],
    target: Path,
    *,
    leading: bool,
    quiet: bool,
) -> list[str]:
    """Run the remaining cells and append their rows; returns the cells that the budget did not cover."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from weft.bench import results
    from weft.bench.runner import Runner

    runner = Runner(executor, suite, budget, seed, getattr(executor, "clock", time.monotonic))
    todo = [cell for cell in suite.cells if cell.name not in skip]
    if leading and todo:
        results.append(target, [_header(executor, suite)])
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed}/{task.total}"),
        *Progress.get_default_columns()[:2],
    )
    columns += (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not leading) as bar:
        task = bar.add_task(suite.name, total=len(suite.cells), completed=len(suite.cells) - len(todo))
        runner.on_sample = lambda cell, ms: bar.update(task, description=_progress(cell.name, ms))
        for cell, rows in runner.run(skip):
            if leading:
                results.append(target, rows)
                _print_cell(bar, cell.name, rows)
            bar.advance(task)
    return runner.missing


def _progress(name: str, ms: float | None) -> str:
    return f"{name} {'-' if ms is None else f'{ms:.2f} ms'}"


def _print_cell(bar: Progress, name: str, rows: list[dict[str, Any]]) -> None:
    """One line per completed cell, even without a terminal."""
    plain = next((r for r in rows if r["candidate"] == "overlap"), None)
    best = next((r for r in rows if r["chosen"]), None)
    if best is None or best["ms"] is None or plain is None or plain["ms"] is None:
        problem = next((r["problem"] for r in rows if r["problem"]), "no result")
        bar.console.print(f"{name}: {problem}", markup=False, highlight=False)
        return
    share = best["fraction_of_ideal"]
    text = f"{name}: {best['candidate']} {best['ms']:.2f} ms, overlap {plain['ms']:.2f} ms"
    text += f", {100 * share:.0f}% of ideal" if share is not None else ""
    hung = [r["candidate"] for r in rows if r["status"] not in ("ok", "dropped")]
    text += f"; not measured: {', '.join(hung)}" if hung else ""
    bar.console.print(text, markup=False, highlight=False)


def _header(executor: Executor, suite: Suite) -> dict[str, Any]:
    import weft

    return versioned(
        {
            "header": suite.name,
            "device": executor.device,
            "machine": executor.info(),
            "host": {"python": platform.python_version(), "system": platform.platform()},
            "weft": weft.__version__,
            "command": "weft " + shlex.join(sys.argv[1:]),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    )


def _print_plan(suite: Suite, device: str, budget: float, target: Path) -> None:
    estimate = sum(cell.estimate_s(suite.baseline_ctas) for cell in suite.cells)
    candidates = sum(len(cell.candidates) for cell in suite.cells)
    print(
        f"{suite.name}: {suite.about}; {len(suite.cells)} workloads, {candidates} candidates on {device}\n"
        f"collectives of {', '.join(sorted({str(c.workload.ranks) for c in suite.cells}))} ranks; "
        f"about {estimate:.0f} s on Hopper, at most {budget:.0f} s plus the last workload; results: {target}"
    )


def _document(
    executor: Executor, suite: Suite, rows: list[dict[str, Any]], missing: list[str]
) -> dict[str, Any]:
    return {
        "device": executor.device,
        "simulated": executor.simulated,
        "suite": suite.name,
        "rows": rows,
        "missing": missing,
    }


def _print_table(rows: list[dict[str, Any]], missing: list[str], target: Path) -> None:
    from rich.console import Console

    from weft.bench.tables import suite_table

    Console().print(suite_table(rows))
    if missing:
        listed = ", ".join(missing[:4])
        print(f"not measured within the budget: {len(missing)} workloads ({listed}, …); run it again")
    print(f"results: {target}")
