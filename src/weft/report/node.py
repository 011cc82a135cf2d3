"""Node profiles as text: the list, and one profile with its times, errors and sources."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.comm.node import NODE_COLLECTIVES, Node
from weft.comm.paced_delay import copies_note
from weft.report.documents.node import NodeLineJson

SIZES = (1 << 20, 16 << 20, 256 << 20)
"""Sizes in bytes for which times are shown."""


def node_line(node: Node) -> NodeLineJson:
    """The list entry of a profile."""
    curves = {kind: node.curve(kind) for kind in NODE_COLLECTIVES}
    return {
        "name": node.name,
        "title": node.title,
        "gpu": node.gpu,
        "ranks": node.ranks,
        "basis": node.basis,
        "collectives": {
            kind: {"basis": curve.basis, "error_pct": curve.error_pct} for kind, curve in curves.items()
        },
    }


def node_list_table(nodes: Iterable[Node]) -> Table:
    """A table of profiles: name, how many collectives are published, and the error of all-reduce."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("node", "what", "ranks", "published", "all-reduce"):
        table.add_column(heading, justify="right" if heading == "ranks" else "left")
    for node in nodes:
        collectives = node_line(node)["collectives"]
        known = sum(said["basis"] != "assumed" for said in collectives.values())
        reduce_ = collectives["all_reduce"]
        table.add_row(
            node.name,
            node.title,
            str(node.ranks),
            f"{known} of {len(collectives)}",
            _said(reduce_["basis"], reduce_["error_pct"]),
        )
    return table


def node_page(node: Node) -> Group:
    """One profile: time by collective and size, its range, kernel, CTAs and sources."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("µs", "CTAs", *(f"{size >> 20} MiB" for size in SIZES), "range", "basis"):
        table.add_column(heading, justify="right" if "MiB" in heading else "left", no_wrap=True)
    for kind in NODE_COLLECTIVES:
        last = node.collective(kind, SIZES[-1])
        times = [f"{node.collective(kind, size).us:.0f}" for size in SIZES]
        spread = 100 * (node.range(kind, SIZES[-1])[1] / last.us - 1)
        ctas = f"{last.ctas} {last.algorithm}"
        basis = last.basis if last.error_pct is not None else _said(last.basis, None)
        table.add_row(kind, ctas, *times, f"±{spread:.0f}%", basis)
    kernel = node.kernel
    lines = [
        f"{node.name}: {node.title}",
        f"{node.ranks} ranks of {node.gpu}; {node.basis}",
    ]
    below = [
        f"kernel: {kernel.threads_of('ring')} threads of {kernel.registers} registers, "
        f"{kernel.shared_bytes / 1024:.0f} KiB shared, clusters of {kernel.cluster} ({kernel.basis})",
        *(
            f"{name}: {rate.gb_s:g} GB/s for each CTA ({rate.low:g} to {rate.high:g}, {rate.basis})"
            for name, rate in node.cta_rates.items()
        ),
        f"copy engines: {copies_note(node)}",
        "sources:",
        *(f"  {source}" for source in sources(node)),
    ]
    return Group(Text("\n".join(lines) + "\n"), table, Text("\n" + "\n".join(below)))


def sources(node: Node) -> list[str]:
    """Every source of a profile, once."""
    found: dict[str, Any] = dict.fromkeys(source for curve in node.curves for source in curve.sources)
    rate = node.copy_engines
    found |= dict.fromkeys([f"copy engines: {rate.source}"] if rate and rate.source else [])
    return [*found, *(source for source in node.sources if source not in found)]


def _said(basis: str, error_pct: float | None) -> str:
    if error_pct is not None:
        return f"{basis}, {error_pct:g}%"
    return basis if basis == "assumed" else f"{basis}, one source"
