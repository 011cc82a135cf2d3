"""The claims that arXiv:2606.09200 states in words or single numbers, on the paper's simulated nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from weft.execute.sim import SimExecutor
from weft.policy import Policy
from weft.reproduce.bus_range import SAME_GB_S, BusGain, bus_nodes, tuned_gains
from weft.reproduce.figure import HELD_OUT, INSPECTED, OnProgress, Reproduced
from weft.reproduce.time_ratio import PAPER_GPUS, WORKERS, paper_workload, published_tables
from weft.rules import Rule
from weft.sim.profile import PAPER_NODE
from weft.tuning.candidates import GEMM, residency_choices
from weft.workload import Workload

HIGH = Policy(priority="high")
HEADLINE = "claim/headline"
HEADLINE_PCT = 25.5
OVERLAP_RATE_PCT = 90.0
OPTION_SIDES = (2, 4, 8, 16, 32, 64, 128)
"""Sides of the grids at which opt1 and opt2 are compared; in cb, blocks beyond 128x128 have no work."""
WORKLOADS = ("cb-ar", "cb-a2a", "mb-ar", "mb-a2a")
OPTIONS = ("opt1", "opt2")
EQUAL = 0.005
"""Times that differ by less than this fraction count as equal."""

_Job = Callable[[], list[Reproduced]]


def claim_rows(progress: OnProgress) -> list[Reproduced]:
    """All claims. A job is one claim, or one claim on one GPU."""
    runs = {gpu: SimExecutor(gpu + PAPER_NODE) for gpu in PAPER_GPUS}
    jobs: list[_Job] = [lambda: headline_rows(runs["a40"]), lambda: [overlap_rate(runs)]]
    jobs += [lambda g=gpu: priority_rows(g, runs[g]) for gpu in PAPER_GPUS]  # type: ignore[misc]
    jobs += [lambda g=gpu: option_rows(g, runs[g]) for gpu in PAPER_GPUS]  # type: ignore[misc]
    return list(_in_turn(jobs, "claims", progress))


def every_row(progress: OnProgress) -> list[Reproduced]:
    """The four workloads with both tiles on grids X = Y, under the paper's controls; not published."""
    runs = {gpu: SimExecutor(gpu + PAPER_NODE) for gpu in PAPER_GPUS}

    def rows(gpu: str, name: str, side: int) -> list[Reproduced]:
        workload = paper_workload(name, gpu, (side, side))
        plain = runs[gpu].measure(workload, Policy()).ms
        found = []
        for policy in paper_policies(runs[gpu], workload):
            gain = 100 * (1 - runs[gpu].measure(workload, policy).ms / plain)
            where = f"{name} {side}x{side} {policy.label}"
            found.append(_row(f"controls/{PAPER_GPUS[gpu]}", where, None, gain, HELD_OUT, "% less time"))
        return found

    jobs: list[_Job] = [
        lambda g=gpu, n=f"{name}-{option}", s=side: rows(g, n, s)  # type: ignore[misc]
        for gpu in PAPER_GPUS
        for name in WORKLOADS
        for option in OPTIONS
        for side in published_tables().grid
    ]
    return list(_in_turn(jobs, "workloads", progress))


def paper_policies(run: SimExecutor, workload: Workload) -> list[Policy]:
    """Policies with the paper's two controls: priority, residency, and both."""
    rules = [(Rule(GEMM, n),) for n in residency_choices(workload.compute, run.profile.spec)]
    return [HIGH, *(Policy(rules=r) for r in rules), *(Policy(priority="high", rules=r) for r in rules)]


def headline_rows(run: SimExecutor) -> list[Reproduced]:
    """The largest gain over plain overlap, cb-ar on A40, as a range over published bus bandwidths."""
    workload = paper_workload("cb-ar", "a40")
    tuned = tuned_gains(run, workload)
    theirs = []
    for node, one in zip(bus_nodes(run), tuned, strict=True):
        plain = node.measure(workload, Policy()).ms
        best = min(paper_policies(node, workload), key=lambda p: node.measure(workload, p).ms)
        gain = 100 * (1 - node.measure(workload, best).ms / plain)
        theirs.append(BusGain(one.bus, gain, best.label))
    return [
        _headline("the paper's two controls", run, theirs, ""),
        _headline("weft tune", run, tuned, "; the same as `weft tune cb-ar --device sim:a40`"),
    ]


def _headline(what: str, run: SimExecutor, gains: list[BusGain], note: str) -> Reproduced:
    values = [one.gain_pct for one in gains]
    own = next(one for one in gains if abs(one.bus.gb_s - run.profile.figures.bus_gb_s) < SAME_GB_S)
    by_bus = "; ".join(f"{one.bus.gb_s:.4g} GB/s: {one.gain_pct:.1f}% ({one.chosen})" for one in gains)
    return _row(
        HEADLINE,
        f"cb-ar on A40, natural grid, {what}",
        HEADLINE_PCT,
        own.gain_pct,
        INSPECTED,
        "% less time than plain overlap",
        right=own.gain_pct > 0,
        limits=(min(values), max(values)),
        note=by_bus + note,
    )


def overlap_rate(runs: dict[str, SimExecutor]) -> Reproduced:
    """The largest share of communication that overlaps with compute on NVIDIA GPUs with high priority."""
    best, where = 0.0, ""
    for gpu, run in runs.items():
        if run.profile.spec.vendor != "nvidia":
            continue
        for side in (16, 32, 128):
            line = run.timeline(paper_workload("cb-ar", gpu, (side, side)), HIGH)
            rate = line.figures().overlap_pct
            if rate > best:
                best, where = rate, f"{PAPER_GPUS[gpu]}, grid {side}x{side}"
    return _row(
        "claim/overlap-rate",
        "largest on NVIDIA",
        OVERLAP_RATE_PCT,
        best,
        HELD_OUT,
        "% of communication",
        right=best > 50,
        note=where,
    )


def priority_rows(gpu: str, run: SimExecutor) -> list[Reproduced]:
    """The gain of priority for cb-ar by grid, and on MI250X whether priority ever loses."""
    gains = {}
    for side in published_tables().grid:
        workload = paper_workload("cb-ar", gpu, (side, side))
        gains[side] = 100 * (1 - run.measure(workload, HIGH).ms / run.measure(workload, Policy()).ms)
    title = PAPER_GPUS[gpu]
    rows = [
        _row(f"priority/{title}", f"cb-ar {side}x{side}", None, gain, INSPECTED, "% less time")
        for side, gain in gains.items()
    ]
    if gpu != "a40":
        best = max(gains.values())
        rows.append(
            _row(
                "claim/headline-is-on-A40",
                f"largest gain of priority on {title}",
                HEADLINE_PCT,
                best,
                HELD_OUT,
                "% less time; the paper's is at most this",
                right=best <= HEADLINE_PCT,
                note="the paper's largest gain on any GPU is the A40's",
            )
        )
    if gpu == "mi250x":
        worst = min(gains, key=lambda side: gains[side])
        rows.append(
            _row(
                "claim/priority-loses",
                "cb-ar on MI250X, worst grid",
                None,
                gains[worst],
                HELD_OUT,
                "% less time",
                right=gains[worst] < -100 * EQUAL,
                note=f"grid {worst}x{worst}; the paper: priority sometimes loses on MI250X",
            )
        )
    return rows


def option_rows(gpu: str, run: SimExecutor) -> list[Reproduced]:
    """Time of opt1 over opt2 for mb by grid, with priority; in the paper opt2 is mostly better."""
    rows = []
    for side in OPTION_SIDES:
        first, second = (paper_workload(f"mb-ar-{option}", gpu, (side, side)) for option in OPTIONS)
        ratio = run.measure(first, HIGH).ms / run.measure(second, HIGH).ms
        rows.append(
            _row(
                f"claim/opt2-over-opt1/{PAPER_GPUS[gpu]}",
                f"mb-ar {side}x{side}",
                None,
                ratio,
                INSPECTED,
                "opt1 / opt2",
                right=ratio > 1 - EQUAL,
                note="the paper: opt2 is better over a wide range, and equal at large grids",
            )
        )
    return rows


def _row(
    which: str,
    cell: str,
    published: float | None,
    ours: float,
    basis: str,
    unit: str,
    *,
    right: bool | None = None,
    limits: tuple[float, float] | None = None,
    note: str = "",
) -> Reproduced:
    return Reproduced(
        id=which,
        cell=cell,
        published=published,
        ours=ours,
        basis=basis,
        unit=unit,
        sign_right=right,
        ours_range=limits,
        note=note,
    )


def _in_turn(jobs: list[_Job], what: str, progress: OnProgress) -> Iterator[Reproduced]:
    """Run jobs on a few threads, and yield their rows in order."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for done, rows in enumerate(pool.map(lambda job: job(), jobs), 1):
            progress(what, done, len(jobs))
            yield from rows
