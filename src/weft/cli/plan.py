"""`weft plan`: a training step at scale, where communication is exposed, and what would hide it."""

from __future__ import annotations

import inspect
import json
import operator
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from weft.cli.output import check_distinct, versioned
from weft.cli.status_line import status_line
from weft.errors import UsageError
from weft.plan.options import PlanOptions

if TYPE_CHECKING:
    from weft.plan.calibrate import Calibration
    from weft.plan.config import TrainingJob
    from weft.plan.figures import Figures
    from weft.plan.request import Question
    from weft.plan.step import PlanProgress


def plan(
    context: typer.Context,  # no default: Python 3.10 would make it Optional, which typer does not support
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write an HTML page.", metavar="FILE", show_default=False),
    ] = None,
    chakra: Annotated[
        Path | None,
        typer.Option(
            "--chakra",
            help="Write Chakra execution traces into this folder.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    launch: Annotated[
        Path | None,
        typer.Option(
            "--launch",
            help="Write a launch file for this split: FILE.toml for torchtitan, FILE.sh for Megatron.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    **typed: Any,
) -> None:
    """Predict the time of a training step on many GPUs.

    All results are simulated, with an interval from the errors on published runs.
    """
    from weft.plan import request

    asked = request.question(PlanOptions(**typed), _given(context))
    _check_output(asked, html, chakra, launch)
    if launch and not asked.options.sweep:
        _launch(asked.job(), launch)  # before the work: raises if the file cannot express the job
    started = time.monotonic()
    with status_line("predicting …", quiet=as_json) as update:

        def progress(done: int, total: int) -> None:
            update(f"{done} of {total} done, {time.monotonic() - started:.0f} s …")

        document, best = _answer(asked, chakra, progress)
        page = _page(document) if html else ""
        script = _launch(best, launch) if launch else ""
    _write(html, page)
    _write(launch, script)
    if as_json:
        print(json.dumps(versioned(document), allow_nan=False))
        return
    from weft.report.plan_terminal import show_plan

    show_plan(document)
    for path, what in ((html, "page"), (chakra, "execution traces"), (launch, "launch file")):
        if path:
            print(f"{what}: {path}")


def _signature(function: Callable[..., None]) -> None:
    """Give the command one option per field of PlanOptions, before its own options."""
    hints = get_type_hints(PlanOptions)
    found = []
    for field in fields(PlanOptions):
        about = field.metadata
        names = about["flag"] or "--" + field.name.replace("_", "-")
        setting = typer.Option(
            names, help=about["help"], metavar=about["metavar"] or None, show_default=False
        )
        kind = operator.getitem(Annotated, (hints[field.name], setting))
        found.append(
            inspect.Parameter(
                field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=kind
            )
        )
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    hinted = get_type_hints(function, include_extras=True)
    own = [p.replace(annotation=hinted[p.name]) for p in own]
    together = [own[0], *found, *own[1:]]  # the context, which has no default, comes first
    function.__signature__ = inspect.Signature(together)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in together}


_signature(plan)


def _given(context: typer.Context) -> set[str]:
    """Parameter names of the options that the user gave."""
    found = set()
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found.add(name)
    return found


def _check_output(asked: Question, html: Path | None, chakra: Path | None, launch: Path | None) -> None:
    """Reject output files that cannot be written, before any work is done."""
    if (asked.options.sweep or asked.options.scale) and chakra:
        which = "--sweep" if asked.options.sweep else "--scale"
        raise UsageError(f"--chakra writes one configuration; leave out {which}")
    for name, path in (("html", html), ("launch", launch)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"--{name} {path}: give a file in an existing folder")
    check_distinct({"--html": html, "--launch": launch})
    for path in (html, launch):
        for read in (asked.options.config, asked.options.cluster, asked.options.calibrate):
            if path and read and path.resolve() == read.resolve():
                raise UsageError(f"{path} is read and would be overwritten; give another name")
    if launch and asked.options.scale:
        raise UsageError("--launch writes one configuration; leave out --scale")
    if launch and launch.suffix not in (".toml", ".sh"):
        raise UsageError(f"--launch {launch}: end it in .toml for torchtitan or in .sh for Megatron")
    if chakra and chakra.exists() and (not chakra.is_dir() or any(chakra.iterdir())):
        raise UsageError(f"--chakra {chakra}: not an empty folder; give a new one")


def _write(path: Path | None, text: str) -> None:
    if path:
        from weft.files import write_whole

        write_whole(path, text)


def _answer(
    asked: Question, chakra: Path | None, progress: PlanProgress
) -> tuple[dict[str, Any], TrainingJob]:
    """The document, and the job that it recommends."""
    options = asked.options
    if options.sweep:
        return _sweep(asked, progress)
    job = asked.job()
    calibration = _calibration(options.calibrate, options.traced, job)
    figures = calibration.figures if calibration else None
    if options.scale:
        return _scale(asked, job, figures, progress), job
    return _one(asked, job, figures, calibration, chakra, progress), job


def _calibration(trace: Path | None, traced: str, job: TrainingJob) -> Calibration | None:
    if trace is None:
        return None
    from weft.plan.calibrate import calibrated, traced_job
    from weft.plan.figures import shipped

    return calibrated(trace, traced_job(job, traced), shipped())


def _known_error() -> dict[str, Any] | None:
    from weft.plan.accuracy import known_error

    return known_error()


def _one(
    asked: Question,
    job: TrainingJob,
    figures: Figures | None,
    calibration: Calibration | None,
    chakra: Path | None,
    progress: PlanProgress,
) -> dict[str, Any]:
    from weft.plan.answer import answer, document

    found = answer(job, figures)
    if chakra:
        from weft.plan.execution_trace import write

        write(chakra, job, found.prediction, progress)
    return document(found, calibration=calibration, error=_known_error(), price=asked.options.price)


def _sweep(asked: Question, progress: PlanProgress) -> tuple[dict[str, Any], TrainingJob]:
    from weft.plan.answer import sweep_document
    from weft.plan.request import check_gpus
    from weft.plan.step import predict
    from weft.plan.sweep import room, sweep

    check_gpus(asked.job_options["gpus"])
    figures = None
    if asked.options.calibrate:
        calibration = _calibration(asked.options.calibrate, asked.options.traced, asked.job())
        figures = calibration.figures if calibration else None
    found = sweep(
        asked.job_options,
        fixed=asked.fixed,
        limit=asked.options.limit,
        run=lambda way: predict(way, figures),
        fits=room(figures),
        progress=progress,
    )
    best = found.rows[0].job
    return sweep_document(_possible(asked), found, _known_error(), asked.options.price), best


def _possible(asked: Question) -> TrainingJob | None:
    """The job as requested; None if it cannot run without further splitting."""
    try:
        return asked.job()
    except UsageError:
        return None


def _scale(
    asked: Question, job: TrainingJob, figures: Figures | None, progress: PlanProgress
) -> dict[str, Any]:
    from weft.plan.answer import scaling_document
    from weft.plan.scaling import curves, parse_range
    from weft.plan.step import predict

    low, high = parse_range(asked.options.scale)
    batch = "global_batch" in asked.fixed
    found = curves(
        job, low, high, batch_given=batch, run=lambda here: predict(here, figures), progress=progress
    )
    return scaling_document(job, found, _known_error())


def _launch(job: TrainingJob, path: Path) -> str:
    from weft.plan.launch import launch_text

    return launch_text(job, path)


def _page(document: dict[str, Any]) -> str:
    from weft.report.plan_page import plan_page

    return plan_page(document)
