"""`weft tune`: races the candidates on one workload, shows the table, writes the policy."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import check_distinct, check_output, check_seconds, versioned

if TYPE_CHECKING:
    from weft.execute.base import Executor
    from weft.policy import Policy
    from weft.report.occupancy import Picture
    from weft.tuning.candidates import Candidate
    from weft.tuning.remembered import Remembered
    from weft.tuning.store import Entry
    from weft.tuning.tuned_workload import TunedWorkload
    from weft.workload import Workload


def tune(
    name: str = typer.Argument(
        "", metavar="[WORKLOAD]", help="cb-ar, mb-ar, cb-a2a, mb-a2a, …; or use --gemm."
    ),
    device: str = typer.Option("auto", help="auto, cuda or sim:NAME (a40, a100, h100, h200, mi250x, …)."),
    out: Path | None = typer.Option(None, help="Write the policy to this file."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
    html: Path | None = typer.Option(None, help="Write an HTML page of the result."),  # noqa: B008
    gemm: str = typer.Option("", metavar="MxNxK", help="Compute operation: a GEMM of this shape."),
    dtype: str = typer.Option("", help="bf16, fp16, fp32 or fp64."),
    tile: str = typer.Option(
        "", metavar="MxNxK", help="Tile of the Triton GEMM; default: the library's GEMM."
    ),
    grid: str = typer.Option("", metavar="XxY", help="Blocks of the Triton GEMM; default: one per tile."),
    collective: str = typer.Option("", help="all_reduce, all_gather, reduce_scatter or all_to_all."),
    size: str = typer.Option("", "--bytes", help="Bytes per rank, such as 896MiB."),
    ranks: int | None = typer.Option(None, min=1, help="Ranks of the collective; default: the workload's."),
    iterations: int | None = typer.Option(
        None, min=1, help="Iterations of the pipeline; default: the workload's."
    ),
    streams: int | None = typer.Option(
        None,
        min=1,
        help="Number of compute streams, used in turn; default: the workload's.",
    ),
    reading: str = typer.Option(
        "auto",
        help="How a named workload runs: paper (arXiv:2606.09200's setting) or lab (weft's kernels); auto: "
        "paper on a simulated node, lab elsewhere.",
    ),
    budget: float = typer.Option(
        60.0, metavar="SECONDS", help="Time after which no new round of measurements starts."
    ),
    seed: int = typer.Option(0, help="Seed for the order of measurements."),
    kernel: str = typer.Option(
        "",
        metavar="PATTERN",
        help="Write the residency rule for these kernels of your program instead of weft's.",
    ),
    fresh: bool = typer.Option(False, "--fresh", help="Measure even if the store has a verdict."),
    every: bool = typer.Option(False, "--every", help="Race every candidate, including unpromising ones."),
    node: str = typer.Option(
        "", metavar="NODE", help="Run this GPU, or the simulated one, as rank 0 of a node (see `weft node`)."
    ),
) -> None:
    """Find the policy that hides most communication of a workload.

    The verdict may also be "leave it alone". Verdicts measured on this machine are stored and reused.
    """
    from weft.comm.node import load_node
    from weft.errors import UsageError
    from weft.execute.devices import open_executor, paper_device, paper_ranks, resolve
    from weft.tuning.candidates import for_kernel
    from weft.tuning.lab import choose_candidates
    from weft.workload import READINGS, specify

    check_seconds("--budget", budget)
    check_output("--out", out)
    check_output("--html", html)
    check_distinct({"--out": out, "--html": html})
    device = resolve(device)
    if reading not in ("auto", *READINGS):
        raise UsageError(f"--reading {reading!r} is not known; use auto, {' or '.join(READINGS)}")
    if reading == "auto":
        reading = "paper" if name and paper_device(device) and not node else "lab"
    paper_node = paper_device(device) if reading == "paper" else None
    if paper_node is not None:
        device, ranks = paper_node, ranks or paper_ranks(paper_node)
    if node:
        ranks = load_node(node).world(ranks)
    workload = specify(
        name,
        gemm=gemm,
        dtype=dtype,
        tile=tile,
        grid=grid,
        collective=collective,
        size=size,
        ranks=ranks or 0,
        iterations=iterations or 0,
        streams=streams or 0,
        reading=reading,
    )
    executor = open_executor(device, node=node)
    try:
        remembered = _remembered(executor, workload)
        found = None if fresh or html else remembered.fresh
        if found is None:
            before = remembered.entry.policy if remembered.entry else None
            tried, ranked_out = choose_candidates(executor, workload, before=before, every=every)
            quiet = as_json or executor.simulated
            tuned = _race(executor, workload, tried, seed, budget, ranked_out, quiet=quiet)
            document = {**tuned.to_dict(), **_assumed(executor, workload, reading, name)}
            page = _page(executor, tuned) if html else ""
            remembered.put(tuned.verdict.policy, document)
    finally:
        executor.close()
    policy = found.policy if found is not None else tuned.verdict.policy
    policy = for_kernel(policy, kernel) if kernel else policy
    if found is not None:
        document = {**found.verdict, "stored": _made(found)}
    document["policy"] = policy.to_dict()
    _write(policy, out, html, page if found is None else "")
    if as_json:
        print(json.dumps(versioned(document)))
    elif found is not None:
        print(f"{document['verdict']['text']}\nMeasured {_made(found)}; `--fresh` measures again.")
    else:
        from rich.console import Console

        from weft.report.tune_terminal import show_tuned

        show_tuned(tuned, Console())
        if html is not None:
            print(f"page: {html}")
        _say_assumed(document)
    if not as_json and out is not None:
        _say_how_to_apply(policy, out)


def _assumed(executor: Executor, workload: Workload, reading: str, name: str) -> dict[str, Any]:
    """The reading, a description of the workload and, on a paper's node, the gain at other bus bandwidths."""
    from weft.execute.sim import SimExecutor

    found: dict[str, Any] = {"reading": reading if name else "", "assumed": workload.described}
    if isinstance(executor, SimExecutor) and reading == "paper":
        from weft.reproduce.bus_range import tuned_gains

        found["bus_range"] = [one.to_dict() for one in tuned_gains(executor, workload)]
    return found


def _say_assumed(document: dict[str, Any]) -> None:
    lines = [f"workload: {document['assumed']}"]
    if document["reading"] == "paper":
        lines.append("reading: arXiv:2606.09200's, as in `weft reproduce`; `--reading lab`: weft's kernels")
    for row in document.get("bus_range", ()):
        what = f"gain {row['gain_pct']:.1f}% ({row['chosen']})"
        lines.append(f"with {row['bus_gb_s']:g} GB/s, {row['source']}: {what}")
    for line in lines:
        print(textwrap.fill(line, 79, subsequent_indent="  ", break_long_words=False))


def _remembered(executor: Executor, workload: Workload) -> Remembered:
    """The store's verdict for a workload on a real GPU."""
    from weft.ranks import launched_ranks
    from weft.tuning.remembered import Remembered, workload_key

    # All ranks must do the same, but their stores may differ, so nothing is read under a launcher.
    alone = launched_ranks() == 1
    return Remembered(
        lambda: workload_key(executor, workload),
        lambda line: print(f"weft: {line}", file=sys.stderr),
        reads=alone and not executor.simulated,
        writes=not executor.simulated and (alone or os.environ.get("RANK") == "0"),
    )


def _made(entry: Entry) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))


def _race(
    executor: Executor,
    workload: Workload,
    tried: list[Candidate],
    seed: int,
    budget: float,
    ranked_out: int,
    *,
    quiet: bool,
) -> TunedWorkload:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from weft.tuning.lab import tune_workload

    columns = (SpinnerColumn(), TextColumn("{task.completed} runs"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(str(workload), total=None)

        def tell(index: int, ms: float | None) -> None:
            label = tried[index].label if index < len(tried) else "alone"
            took = "-" if ms is None else f"{ms:.2f} ms"
            bar.update(task, advance=1, description=f"{label} {took}")

        return tune_workload(
            executor, workload, tried, seed=seed, deadline_s=budget, on_sample=tell, ranked_out=ranked_out
        )


def _page(executor: Executor, tuned: TunedWorkload) -> str:
    from weft.policy import Policy
    from weft.report.page import tune_page

    mode = "sequential" if tuned.verdict.chosen == "sequential" else "overlap"
    before = executor.timeline(tuned.workload, Policy())
    after = executor.timeline(tuned.workload, tuned.verdict.policy, mode)
    return tune_page(tuned, before, after, _pictures(executor, tuned, mode))


def _pictures(executor: Executor, tuned: TunedWorkload, mode: str) -> list[Picture]:
    """Per-SM occupancy before and after; only for simulated GPUs, else empty."""
    from weft.execute.sim import SimExecutor
    from weft.policy import Policy
    from weft.report.occupancy import picture

    if not isinstance(executor, SimExecutor):
        return []
    before = executor.occupancy(tuned.workload, Policy())
    after = executor.occupancy(tuned.workload, tuned.verdict.policy, mode)
    most = max(float((found.compute + found.comm).max()) for found in (before, after))
    named = (("Plain overlap", before), (tuned.verdict.chosen, after))
    return [picture(title, found.total_s, found.compute, found.comm, most) for title, found in named]


def _write(policy: Policy, out: Path | None, html: Path | None, page: str) -> None:
    from weft.files import write_whole

    if out is not None:
        policy.save(out)
    if html is not None:
        write_whole(html, page)


def _say_how_to_apply(policy: Policy, out: Path) -> None:
    from weft.tuning.candidates import GEMM

    print(f"policy: {out}; apply it with `weft run --policy {out} -- CMD…`")
    if policy.engine == "dma":
        print(
            "comm.engine dma is for all-gathers of FSDP2, and of buffers that your program registers as "
            "symmetric windows, on one node with NCCL 2.28 or newer; its speed is modeled, not measured"
        )
    if any(rule.kernel == GEMM for rule in policy.rules):
        print(f"its rule is for {GEMM}, our own kernel; `--kernel PATTERN` names that of your program")
