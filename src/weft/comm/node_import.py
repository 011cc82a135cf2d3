"""Make a node profile from a user's own nccl-tests logs."""

from __future__ import annotations

import codecs
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from weft.comm.nccl_tests import MAX_LOG_BYTES, PROGRAMS, TestedCollective, points, read_runs
from weft.comm.nccl_tests_json import text_of_json
from weft.comm.node import Node, load_node
from weft.comm.node_curve import CtaRate, TimeCurve
from weft.errors import InputError
from weft.gpu.network import usual_network
from weft.gpu.presets import GPU_PRESETS

_RELATIVE = {
    "h100": "dgx-h100",
    "h800": "dgx-h100",
    "h20": "dgx-h100",
    "h200": "dgx-h200",
    "a100-40gb": "dgx-a100",
    "a100-80gb": "dgx-a100",
    "b200": "dgx-b200",
    "b300": "dgx-b200",
    "gb200": "gb200-nvl72",
    "gb300": "gb200-nvl72",
    "mi300x": "mi300x",
    "mi355x": "mi300x",
}
"""Related shipped profile by GPU; it supplies kernel and CTA rates. `pcie-8` for GPUs that are absent."""
_SMALL_BYTES = 64 << 10
"""Up to this size, the time of a collective is mostly start-up."""
_MAX_QUOTE = 160  # characters of a log that a message quotes


def import_logs(
    paths: Sequence[Path], name: str = "", ranks: int = 0, warn: Callable[[str], None] = lambda line: None
) -> Node:
    """The node that nccl-tests measured. Raises InputError.

    `ranks`: number of ranks for logs that do not list them. `warn` is called with one line for each run that
    failed or has rows that were skipped.
    """
    runs = [(path, run) for path in paths for run in _read(path)]
    listed = ", ".join(str(path) for path in paths)
    tables = [run for _, run in runs if run.rows]
    if not tables:
        doubts = _doubts(runs)
        more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
        raise InputError(f"{doubts[0]}{more}; run nccl-tests again")
    for table in tables:
        table.ranks = table.ranks or ranks
    if any(table.alone for table in tables):
        raise InputError(
            f"{listed}: each process ran by itself (bus bandwidth 0); build nccl-tests with MPI=1, or run "
            "one process with -g 8"
        )
    if all(table.cpu_time for table in tables):
        raise InputError(f"{listed}: has times of the host only (-C 1); run nccl-tests without -C")
    known = [table for table in tables if table.collective and not table.cpu_time]
    if not known:
        raise InputError(
            f"{listed}: has no table of nccl-tests that says its collective; give the whole output of "
            f"{', '.join(f'{program}_perf' for program in PROGRAMS)}"
        )
    largest = max(known, key=lambda table: (table.ranks, table.hosts))
    if largest.ranks < 2:
        raise InputError(f"{listed}: does not list its ranks; add --ranks N")
    node = _node(name or paths[0].stem, [table for table in known if not _other(table, largest)], listed)
    for doubt in _doubts(runs, largest):
        warn(doubt)
    return node


def _other(run: TestedCollective, largest: TestedCollective) -> str:
    """How a run differs from the largest run, which defines the node; empty if it does not."""
    if not run.ranks:
        return "its ranks are not listed; add --ranks N"
    if run.ranks != largest.ranks:
        return f"it has {run.ranks} ranks, the node {largest.ranks}"
    if run.hosts and run.hosts != largest.hosts:
        mine = f"{run.hosts} hosts" if run.hosts > 1 else "one host"
        return f"its ranks are on {mine}, the node's on {largest.hosts}"
    gpu, others = (gpu_name(one.gpu) if one.gpu else "" for one in (run, largest))
    return f"its GPU is {gpu}, the node's is {others}" if gpu and others and gpu != others else ""


def _doubts(
    runs: Sequence[tuple[Path, TestedCollective]], largest: TestedCollective | None = None
) -> list[str]:
    return [f"{path}: {doubt}" for path, run in runs if (doubt := _doubt(run, largest))]


def _doubt(run: TestedCollective, largest: TestedCollective | None) -> str:
    """One line on what was skipped or is missing in a run; empty if nothing is."""
    what, left = run.collective or run.program or "a run", len(run.rows)
    said = []
    if run.wrong:
        said.append(f"skipped {len(run.wrong)} rows with wrong results ({_sizes(run.wrong)} bytes)")
    elif run.out_of_bounds:
        said.append(f"skipped all rows: {run.out_of_bounds} results are wrong, and no row says which")
    if run.unread:
        said.append(
            f"skipped {len(run.unread)} rows with impossible or missing numbers ({_sizes(run.unread)} bytes)"
        )
    if run.rows and largest and (why := _unused(run, largest)):
        said.append(f"skipped {'the other' if said else 'all'} rows: {why}")
        left = 0
    if run.failure:
        quote = "".join(letter for letter in run.failure if letter.isprintable())
        said.append(f"the run failed ({quote[:_MAX_QUOTE]})")
    elif not run.ended:
        said.append("the run has no summary at its end, as if it was aborted")
    return f"{what}: {'; '.join((*said, f'rows left: {left}'))}" if said else ""


def _unused(run: TestedCollective, largest: TestedCollective) -> str:
    """Why no row of a run is used; empty if its rows are used."""
    if run.cpu_time:
        return "they are times of the host (-C 1)"
    if not run.collective:
        return f"profiles have no {run.program}" if run.program else "nothing says which collective it is"
    return _other(run, largest)


def _sizes(sizes: Sequence[int]) -> str:
    """The first three sizes as text."""
    different = list(dict.fromkeys(sizes))
    return ", ".join(map(str, different[:3])) + (", …" if len(different) > 3 else "")


def _read(path: Path) -> list[TestedCollective]:
    try:
        with path.open("rb") as file:  # it may never end if it is not a regular file
            content = file.read(MAX_LOG_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > MAX_LOG_BYTES:
        raise InputError(f"{path}: over {MAX_LOG_BYTES >> 20} MiB; give the output of nccl-tests alone")
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # PowerShell writes UTF-16
    text = content.decode("utf-16" if wide else "utf-8", errors="replace")
    is_json = text.lstrip().startswith(("{", "["))
    found = read_runs((is_json and text_of_json(text)) or text)
    if not found and text.lstrip().startswith("{"):
        raise InputError(f"{path}: is JSON, but not a file of nccl-tests -J with results")
    if not found:
        raise InputError(f"{path}: has no table of nccl-tests; give the output of all_reduce_perf or another")
    named = re.search("|".join(sorted(PROGRAMS, key=len, reverse=True)), path.stem)
    for table in found:
        if not table.program and named:
            table.collective = PROGRAMS[named[0]]
    return found


def gpu_name(title: str) -> str:
    """The GPU preset that a vendor's title names; if there is none, the title in lower case."""
    words = title.lower().replace("gb ", " ")
    fits = [name for name in GPU_PRESETS if re.search(rf"\b{name.split('-')[0]}\b", words)]
    sized = [name for name in fits if name.rpartition("-")[2] in words]
    return (sized or fits or [re.sub(r"\s+", " ", title.strip().lower()) or "unknown"])[0]


def _node(name: str, tables: list[TestedCollective], source: str) -> Node:
    ranks, hosts = tables[0].ranks, max(1, max(table.hosts for table in tables))
    title = next((table.gpu for table in tables if table.gpu), "")
    gpu = gpu_name(title)
    relative = load_node(_RELATIVE.get(gpu, "pcie-8"))
    curves, rates = [], []
    for kind in dict.fromkeys(table.collective for table in tables):
        mine = [table for table in tables if table.collective == kind]
        found = points(mine)
        spread = _spread_pct(mine)
        rates.append((kind, max(row.bus_gb_s for table in mine for row in table.rows)))
        curves.append(
            TimeCurve(
                kind,
                ranks,
                "measured",
                error_pct=spread,
                error_small_pct=spread,
                sources=(source,),
                points=found,
            )
        )
    ring = [rate for kind, rate in rates if kind not in ("all_reduce", "send_recv", "all_to_all")]
    reduced = [rate for kind, rate in rates if kind == "all_reduce"]
    gain = relative.constants.get("switch_gain", 1.0) if relative.switch_reduces and not ring else 1.0
    gb_s = max(ring or [rate / gain for rate in reduced] or [rate for _, rate in rates])
    switch = relative.switch_reduces and bool(reduced) and reduced[0] > 1.1 * gb_s
    small = [us for curve in curves for size, us in curve.points if size <= _SMALL_BYTES]
    launch = min(small, default=relative.constants["launch_us"])
    constants = {**relative.constants, "gb_s": max(gb_s, 1e-3), "launch_us": min(launch, 100.0)}
    if switch:
        constants["switch_gain"] = min(10.0, reduced[0] / gb_s)
    channels = next((table.channels for table in tables if table.channels and all(table.channels[::2])), None)
    ctas = dict(relative.ctas)
    if channels:
        ring_ctas, switch_ctas, peer_ctas = channels
        ctas |= {"ring": ring_ctas, "tree": ring_ctas, "p2p": peer_ctas}
        ctas |= {"nvls": switch_ctas, "nvlstree": switch_ctas} if switch_ctas else {}
    return replace(
        relative,
        name=name,
        title=f"{ranks} {title or 'GPUs'}" + (f" on {hosts} nodes" if hosts > 1 else "") + ", nccl-tests",
        gpu=gpu,
        ranks=ranks,
        basis="measured",
        domain=max(1, ranks // hosts),
        network=usual_network(gpu) if hosts > 1 else None,
        switch_reduces=switch,
        constants={key: float(f"{value:.4g}") for key, value in constants.items()},
        ctas=ctas,
        cta_rates={key: _at_least(rate, gb_s / ctas["ring"]) for key, rate in relative.cta_rates.items()},
        curves=tuple(curves),
        sources=(
            source,
            f"kernel and CTA rates: {relative.name}",
            "CTAs: the log" if channels else f"CTAs: {relative.name}",
        ),
    )


def _at_least(rate: CtaRate, gb_s: float) -> CtaRate:
    """The related profile's rate, raised so that the default CTAs reach at least the measured bandwidth."""
    value = max(rate.gb_s, float(f"{gb_s:.3g}"))
    return replace(rate, gb_s=value, low=min(rate.low, value), high=max(rate.high, value), basis="assumed")


def _spread_pct(tables: Sequence[TestedCollective]) -> float | None:
    """Median difference in percent between results of the same size: in place, out of place, other runs.

    None if no size was measured twice.
    """
    times: dict[int, list[float]] = {}
    for table in tables:
        for row in table.rows:
            times.setdefault(row.nbytes, []).extend(
                [row.us] if row.in_place_us is None else [row.us, row.in_place_us]
            )
    off = [100 * (max(found) / min(found) - 1) for found in times.values() if len(found) > 1]
    return round(min(statistics.median(off), 1000.0), 1) if off else None
