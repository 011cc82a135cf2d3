"""`weft explore`: every schedule of one fused operation, why one wins, and the pick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import check_output, versioned

if TYPE_CHECKING:
    from weft.timeline import Timeline


def explore(
    gemm: str = typer.Option("", metavar="MxNxK", help="Shape of the GEMM on one rank."),
    collective: str = typer.Option("all_gather", help="all_gather, reduce_scatter or all_to_all."),
    ranks: int = typer.Option(8, help="Number of ranks."),
    device: str = typer.Option("auto", help="auto, cuda or sim:NAME (a40, a100, h100, h200, mi300x, …)."),
    topology: str = typer.Option("", help="mesh, nvswitch, ring or pcie; default: the GPU's usual one."),
    dtype: str = typer.Option("bf16", help="bf16, fp16 or fp32."),
    html: Path | None = typer.Option(None, help="Write an HTML page with the timelines."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
    characterize: bool = typer.Option(
        False, "--characterize", help="Show the cost of splitting a GEMM and of sharing the GPU instead."
    ),
) -> None:
    """Compare all schedules of a collective fused with a GEMM."""
    from weft.checks import check_choice, check_int
    from weft.errors import UsageError
    from weft.execute.devices import resolve
    from weft.ops.explore import operation_of
    from weft.sim.fabric import MAX_NODE_RANKS, TOPOLOGIES
    from weft.workload import parse_shape

    if dtype not in ("bf16", "fp16", "fp32"):
        raise UsageError(f"dtype {dtype!r} is not known; use bf16, fp16 or fp32")
    check_output("--html", html)
    operation = operation_of(collective)
    check_int("ranks", ranks, 2, MAX_NODE_RANKS, optional=False)
    topology = topology.lower()
    if topology:
        check_choice("topology", topology, TOPOLOGIES)
    where = resolve(device)
    if where == "cpu":
        raise UsageError("device cpu is not supported here; use sim:NAME or cuda")
    if where == "sim:":
        raise UsageError("device 'sim:' has no name; use sim:h100 or another GPU")
    shape = parse_shape(gemm) if gemm else ()
    if characterize:
        _characterize(where, shape, dtype, html, as_json)
        return
    if not shape:
        raise UsageError("no GEMM: give its shape, such as --gemm 8192x8192x8192")
    _explore(where, shape, operation, ranks, topology, dtype, html, as_json)


def _explore(
    device: str,
    shape: tuple[int, ...],
    operation: str,
    ranks: int,
    topology: str,
    dtype: str,
    html: Path | None,
    as_json: bool,
) -> None:
    from weft.files import write_whole

    if device == "cuda":
        document, timelines = _measured(operation, shape, ranks, topology, dtype)
    else:
        document, timelines = _simulated(device, operation, shape, ranks, topology, dtype)
    if html is not None:
        from weft.report.explore import page

        write_whole(html, page(document, timelines))
    if as_json:
        print(json.dumps(versioned(document)))
        return
    from rich.console import Console

    from weft.report.explore import show_schedules

    show_schedules(Console(), document, timelines)
    if html is not None:
        print(f"page: {html}")


def _simulated(
    device: str, operation: str, shape: tuple[int, ...], ranks: int, topology: str, dtype: str
) -> tuple[dict[str, Any], list[tuple[str, Timeline]]]:
    from weft.ops.case import Case
    from weft.ops.explore import explore as run

    m, n, k = shape
    gpu = device.removeprefix("sim:")
    case = Case(operation=operation, m=m, n=n, k=k, ranks=ranks, dtype=dtype, gpu=gpu, topology=topology)
    found = run(case)
    timelines = [("serial", found.serial.timeline)]
    if found.best.name != "serial":
        timelines.append((found.best.name, found.best.timeline))
    return found.to_dict(), timelines


def _characterize(device: str, shape: tuple[int, ...], dtype: str, html: Path | None, as_json: bool) -> None:
    from weft.files import write_whole
    from weft.ops.characterize import SHAPES, simulated

    shapes = [(shape[0], shape[1], shape[2])] if shape else list(SHAPES)
    if device == "cuda":
        from weft.ops.characterize_device import measured

        document = measured(shapes, dtype)
    else:
        document = simulated(device.removeprefix("sim:"), shapes, dtype)
    if html is not None:
        from weft.report.explore import losses_page

        write_whole(html, losses_page(document))
    if as_json:
        print(json.dumps(versioned(document)))
        return
    from rich.console import Console

    from weft.report.explore import show_losses

    show_losses(Console(), document)
    if html is not None:
        print(f"page: {html}")


def _measured(
    operation: str, shape: tuple[int, ...], ranks: int, topology: str, dtype: str
) -> tuple[dict[str, Any], list[tuple[str, Timeline]]]:
    from weft.errors import UsageError
    from weft.ops.explore_device import measure_schedules

    if topology:
        raise UsageError(
            "--topology is for simulated nodes; on one GPU the peers are pinned host memory: leave it out"
        )
    m, n, k = shape
    return measure_schedules(operation, m, n, k, ranks, dtype), []
