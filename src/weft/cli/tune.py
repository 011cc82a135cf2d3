"""`weft tune`: race the candidates on one workload, show the table, write the policy."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from weft.execute.base import Executor
    from weft.gpu.specs import GpuSpec
    from weft.policy import Policy
    from weft.report.occupancy import Picture
    from weft.tuning.candidates import Candidate
    from weft.tuning.store import Entry, Key, Store
    from weft.tuning.verdict import Verdict
    from weft.workload import Workload

SHOWN = 12  # candidates in the table; --json has them all


def tune(
    name: str = typer.Argument("", metavar="[WORKLOAD]", help="cb-ar, mb-ar, cb-a2a, mb-a2a, …, or none."),
    device: str = typer.Option("auto", help="auto, cuda or sim:NAME (a40, a100, h100, h200, mi250x, …)."),
    out: Path | None = typer.Option(None, help="Write the policy to this file."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
    html: Path | None = typer.Option(None, help="Write a page with both timelines to this file."),  # noqa: B008
    gemm: str = typer.Option("", metavar="MxNxK", help="Compute: a GEMM of this shape."),
    dtype: str = typer.Option("", help="bf16, fp16, fp32 or fp64."),
    tile: str = typer.Option("", metavar="MxNxK", help="Tile of our own GEMM; without it the library's."),
    grid: str = typer.Option("", metavar="XxY", help="Blocks of our own GEMM; default: one per tile."),
    collective: str = typer.Option("", help="all_reduce, all_gather, reduce_scatter or all_to_all."),
    size: str = typer.Option("", "--bytes", help="Bytes of each rank, such as 896MiB."),
    ranks: int = typer.Option(0, help="Ranks of the collective."),
    iterations: int = typer.Option(0, help="Iterations of the pipeline."),
    streams: int = typer.Option(0, help="Streams that take the compute in turn."),
    budget: float = typer.Option(60.0, metavar="SECONDS", help="After this, no new round of measurements."),
    seed: int = typer.Option(0, help="Seed of the order of measurements."),
    kernel: str = typer.Option(
        "", metavar="PATTERN", help="Write the rule for our GEMM for these kernels of your program."
    ),
    fresh: bool = typer.Option(False, "--fresh", help="Measure, also where a verdict is in the store."),
    every: bool = typer.Option(False, "--every", help="Race every candidate, also unpromising ones."),
) -> None:
    """Find the policy that hides most of a workload's communication, or say that there is none.

    What a GPU of this machine said is kept in a store, and shown at once the next time.
    """
    from weft.errors import UsageError
    from weft.execute.devices import open_executor
    from weft.tuning.candidates import for_kernel

    if budget <= 0:
        raise UsageError("--budget is a number of seconds greater than zero")
    workload = _workload(name, gemm, dtype, tile, grid, collective, size, ranks, iterations, streams)
    executor = open_executor(device)
    try:
        kept = _Kept(executor, workload)
        found = None if fresh or html else kept.fresh()
        if found is None:
            tried, ranked_out = _candidates(executor, workload, kept.entry, every)
            quiet = as_json or executor.simulated
            verdict = _race(executor, workload, tried, seed, budget, ranked_out, quiet=quiet)
            document = verdict.to_dict()
            page = _page(executor, verdict, document) if html else ""
            kept.put(verdict.policy, document)
    finally:
        executor.close()
    policy = found.policy if found is not None else verdict.policy
    policy = for_kernel(policy, kernel) if kernel else policy
    if found is not None:
        document = {**found.verdict, "stored": _made(found)}
    document["policy"] = policy.to_dict()
    _write(policy, out, html, page if found is None else "")
    if as_json:
        print(json.dumps(document))
    elif found is not None:
        print(f"{document['verdict']['text']}\nMeasured {_made(found)}; `--fresh` measures again.")
    else:
        _show(verdict, html)
    if not as_json and out is not None:
        _say_how_to_apply(policy, out)


class _Kept:
    """What the store knows of a workload on a real GPU; its troubles are told, and cost nothing else."""

    def __init__(self, executor: Executor, workload: Workload) -> None:
        self.entry: Entry | None = None
        self.key: Key | None = None
        # Ranks must all do the same, and their stores may differ: there nothing is read.
        self.alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        if executor.simulated:
            return
        with self._telling():
            self.key = _key(executor, workload)
            self.entry = self._store().get(self.key) if self.alone else None

    def fresh(self) -> Entry | None:
        """A verdict that need not be measured again."""
        return self.entry if self.entry is not None and not self.entry.stale else None

    def put(self, policy: Policy, document: dict[str, Any]) -> None:
        if self.key is not None and (self.alone or os.environ.get("RANK") == "0"):
            with self._telling():
                self._store().put(self.key, policy, document)

    @staticmethod
    def _store() -> Store:
        from weft.tuning.store import Store

        return Store()

    @staticmethod
    @contextmanager
    def _telling() -> Iterator[None]:
        from weft.errors import WeftError

        try:
            yield
        except WeftError as error:
            print(f"weft: {error}", file=sys.stderr)


def _key(executor: Executor, workload: Workload) -> Key:
    from weft.gpu import nvml
    from weft.tuning.store import Key

    info = executor.info()
    with nvml.session() as library:
        driver = nvml.driver_release(library) or str(info.get("cuda") or "unknown")
    what = {k: v for k, v in workload.to_dict().items() if k != "name"}
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return Key(
        gpu=str(info.get("gpu") or executor.device),
        driver=driver,
        nccl=str(info.get("nccl") or "unknown"),
        torch=str(info.get("torch") or "unknown"),
        workload=f"{info.get('ranks', '')} {text}",
    )


def _made(entry: Entry) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))


def _workload(
    name: str,
    gemm: str,
    dtype: str,
    tile: str,
    grid: str,
    collective: str,
    size: str,
    ranks: int,
    iterations: int,
    streams: int,
) -> Workload:
    """A named workload, or one that is spelled out; options change what they name."""
    from weft.errors import UsageError
    from weft.workload import Compute, Workload, named, parse_bytes, parse_shape

    if not name and not gemm:
        raise UsageError("no workload: give a name such as cb-ar, or spell it out: --gemm 8192x8192x8192 …")
    if name and gemm:
        raise UsageError(f"both the workload {name!r} and --gemm are given; use one of them")
    changes: dict[str, Any] = {}
    if dtype:
        changes["dtype"] = dtype
    if tile:
        changes["tile"] = parse_shape(tile)
    if grid:
        changes["grid"] = parse_shape(grid, ("X", "Y"))
    if name:
        workload = named(name).but(**changes)
    else:
        kind = "triton_gemm" if tile or grid else "gemm"
        workload = Workload(compute=Compute(kind=kind, shape=parse_shape(gemm), **changes))
    given = {
        "collective": collective,
        "bytes": parse_bytes(size) if size else 0,
        "ranks": ranks,
        "iterations": iterations,
        "compute_streams": streams,
    }
    return workload.but(**{key: value for key, value in given.items() if value})


def _race(
    executor: Executor,
    workload: Workload,
    tried: list[Candidate],
    seed: int,
    budget: float,
    ranked_out: int,
    *,
    quiet: bool,
) -> Verdict:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from weft.tuning.verdict import decide

    columns = (SpinnerColumn(), TextColumn("{task.completed} runs"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(str(workload), total=None)

        def tell(index: int, ms: float | None) -> None:
            label = tried[index].label if index < len(tried) else "alone"
            took = "-" if ms is None else f"{ms:.2f} ms"
            bar.update(task, advance=1, description=f"{label} {took}")

        return decide(
            executor, workload, tried, seed=seed, deadline_s=budget, on_sample=tell, ranked_out=ranked_out
        )


def _candidates(
    executor: Executor, workload: Workload, before: Entry | None, every: bool
) -> tuple[list[Candidate], int]:
    """Whom to race, and how many a simulated GPU ruled out."""
    from weft.tuning.candidates import Candidate, candidates, label
    from weft.workload import BASELINE_CTAS

    if executor.simulated:
        from weft.execute.sim import SimExecutor

        assert isinstance(executor, SimExecutor)
        most = executor.most_ctas(workload)
        engines = not executor.ghost
        return candidates(workload, executor.profile.spec, executor.ctas, most, engines=engines), 0
    info = executor.info()
    title, sms = str(info.get("gpu", "")), int(info.get("sm_count") or 0)
    tried = candidates(workload, _spec(title), BASELINE_CTAS, sms // workload.ranks)
    likely = tried if every else _promising(title, "ghost" in str(info.get("ranks")), workload, tried)
    if before is not None and before.policy not in [c.policy for c in likely]:
        likely.append(Candidate(label(before.policy), before.policy))  # the winner of another time
    return likely, len(tried) - len([c for c in tried if c in likely])


def _promising(title: str, ghost: bool, workload: Workload, tried: list[Candidate]) -> list[Candidate]:
    """What the simulated GPU nearest to this one does not rule out; all where there is none."""
    from weft.errors import WeftError
    from weft.execute.sim import GHOST, SimExecutor
    from weft.sim.profile import by_title
    from weft.tuning.candidates import promising

    try:
        model = by_title(title)
        simulated = SimExecutor(model.name + (GHOST if ghost else ""), model=model)
        return promising(tried, lambda c: simulated.measure(workload, c.policy, c.mode).ms)
    except WeftError:  # a GPU or a workload that the model does not know
        return list(tried)


def _spec(title: str) -> GpuSpec | None:
    """The preset of a real GPU by its marketing name, or None: then residency is left alone."""
    from weft.gpu.presets import GPU_PRESETS

    words = title.lower().replace("-", " ").split()
    return next((gpu for name, gpu in GPU_PRESETS.items() if name.split("-")[0] in words), None)


def _page(executor: Executor, verdict: Verdict, document: dict[str, Any]) -> str:
    from weft.policy import Policy
    from weft.report.page import tune_page

    mode = "sequential" if verdict.chosen == "sequential" else "overlap"
    before = executor.timeline(verdict.workload, Policy())
    after = executor.timeline(verdict.workload, verdict.policy, mode)
    return tune_page(document, before, after, _pictures(executor, verdict, mode))


def _pictures(executor: Executor, verdict: Verdict, mode: str) -> list[Picture]:
    """Per-SM occupancy before and after: a simulated GPU knows it."""
    from weft.execute.sim import SimExecutor
    from weft.policy import Policy
    from weft.report.occupancy import picture

    if not isinstance(executor, SimExecutor):
        return []
    before = executor.occupancy(verdict.workload, Policy())
    after = executor.occupancy(verdict.workload, verdict.policy, mode)
    most = max(float((found.compute + found.comm).max()) for found in (before, after))
    named = (("Plain overlap", before), (verdict.chosen, after))
    return [picture(title, found.total_s, found.compute, found.comm, most) for title, found in named]


def _write(policy: Policy, out: Path | None, html: Path | None, page: str) -> None:
    from weft.files import write_whole

    if out is not None:
        policy.save(out)
    if html is not None:
        write_whole(html, page)


def _show(verdict: Verdict, html: Path | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    note = " (simulated)" if verdict.simulated else ""
    references = verdict.references
    table = Table(title=f"{verdict.workload} on {verdict.device}{note}", box=box.SIMPLE_HEAD, width=76)
    table.add_column("candidate", overflow="fold")
    for heading in ("ms", "vs overlap", "% of ideal"):
        table.add_column(heading, justify="right", no_wrap=True)
    ranked = sorted((e for e in verdict.entries if e.samples), key=lambda e: e.ms)
    shown = ranked[:SHOWN] + [e for e in ranked[SHOWN:] if e in verdict.entries[:2]]
    for entry in shown:
        share = references.fraction_of_ideal(entry.ms)
        table.add_row(
            entry.candidate.label + (" ←" if entry.candidate.label == verdict.chosen else ""),
            f"{entry.ms:.2f}",
            f"{100 * (entry.ms / verdict.overlap_ms - 1):+.1f}%",
            "-" if share is None else f"{100 * share:.0f}",
        )
    Console().print(table)
    failed = [e for e in verdict.entries if e.failed]
    counted = f"{len(verdict.entries)} candidates, {len(failed)} not possible"
    counted += f"; {verdict.ranked_out} more ruled out by simulation" if verdict.ranked_out else ""
    print(f"ideal {references.ideal_ms:.2f} ms; {counted}")
    print(verdict.text)
    if html is not None:
        print(f"page: {html}")


def _say_how_to_apply(policy: Policy, out: Path) -> None:
    from weft.tuning.candidates import GEMM

    print(f"policy: {out}; apply it with `weft run --policy {out} -- CMD…`")
    if any(rule.kernel == GEMM for rule in policy.rules):
        print(f"its rule is for {GEMM}, our own kernel; `--kernel PATTERN` names that of your program")
