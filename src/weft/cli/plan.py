"""`weft plan`: a training step at scale, where communication is exposed, and what would hide it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.plan.calibrate import Calibration
    from weft.plan.config import TrainingJob
    from weft.plan.figures import Figures

QUIET_S = 2.0
"""Progress is shown only when the work takes longer than this."""


def _option(text: str, *names: str, metavar: str | None = None) -> Any:
    """An option whose help says its default, where there is one."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


def plan(
    model: Annotated[str, _option("A model, such as llama3-70b; or give its dimensions.", "--model")] = "",
    gpu: Annotated[str, _option("A GPU: a100-80gb, h100 (default), h200, b200, mi300x, …", "--gpu")] = "h100",
    gpus: Annotated[int, _option("GPUs of the whole job.", "--gpus")] = 0,
    tp: Annotated[int, _option("Tensor parallel ranks.", "--tp")] = 1,
    pp: Annotated[int, _option("Pipeline stages.", "--pp")] = 1,
    cp: Annotated[int, _option("Context parallel ranks.", "--cp")] = 1,
    ep: Annotated[int, _option("Expert parallel ranks.", "--ep")] = 1,
    expert_tp: Annotated[
        int, _option("Tensor parallel ranks of an expert; default: as --tp.", "--expert-tp")
    ] = 0,
    dp: Annotated[int, _option("Data parallel ranks; default: what is left.", "--dp")] = 0,
    interleave: Annotated[
        int, _option("Model chunks of each pipeline stage; default: 1.", "--interleave")
    ] = 1,
    schedule: Annotated[
        str, _option("1f1b, gpipe or interleaved; default: by --interleave.", "--schedule")
    ] = "",
    micro_batch: Annotated[int, _option("Sequences of a micro-batch; default: 1.", "--micro-batch")] = 1,
    global_batch: Annotated[
        int,
        _option("Sequences of a step; default: 8 micro-batches a stage, 1 if --pp 1.", "--global-batch"),
    ] = 0,
    seq: Annotated[int, _option("Tokens of a sequence; default: the model's.", "--seq")] = 0,
    sharding: Annotated[
        str, _option("none, zero1 (default), zero2 or zero3 (FSDP).", "--sharding")
    ] = "zero1",
    sequence_parallel: Annotated[
        bool | None,
        typer.Option("--sequence-parallel/--no-sequence-parallel", help="Default: where tp is above 1."),
    ] = None,
    recompute: Annotated[str, _option("none (default), selective or full.", "--recompute")] = "none",
    precision: Annotated[str, _option("bf16 (default), fp16 or fp8.", "--precision")] = "bf16",
    compression: Annotated[
        str,
        _option("none, bf16, fp8, int8, powersgd:RANK, topk:DENSITY, zero++, qwz+qgz, …", "--compression"),
    ] = "none",
    network: Annotated[
        str, _option("A fabric: hdr200, ndr400, eth100, …; default: the GPU's usual.", "--network")
    ] = "",
    rail_gbit: Annotated[
        float, _option("Gbit/s of the fabric for each GPU, instead of the network's own.", "--rail-gbit")
    ] = 0.0,
    oversubscription: Annotated[
        float, _option("Bandwidth lost above the leaf switches: 2 halves it.", "--oversubscription")
    ] = 0.0,
    policy: Annotated[
        str, _option("auto (default: the best for each collective), none, or a file.", "--policy")
    ] = "auto",
    software: Annotated[str, _option("Training software; default: megatron-2025.", "--software")] = "",
    layers: Annotated[int, _option("Dimensions instead of --model: layers.", "--layers")] = 0,
    hidden: Annotated[int, _option("Hidden size.", "--hidden")] = 0,
    heads: Annotated[int, _option("Attention heads.", "--heads")] = 0,
    kv_heads: Annotated[int, _option("Heads of keys and values.", "--kv-heads")] = 0,
    ffn: Annotated[int, _option("MLP width; default: four times hidden.", "--ffn")] = 0,
    vocab: Annotated[int, _option("Vocabulary; default: 51200.", "--vocab")] = 0,
    gated: Annotated[bool, typer.Option("--gated", help="A gated MLP (SwiGLU).")] = False,
    experts: Annotated[int, _option("Experts of each layer.", "--experts")] = 0,
    experts_per_token: Annotated[int, _option("Experts that a token visits.", "--experts-per-token")] = 0,
    expert_ffn: Annotated[int, _option("Width of one expert.", "--expert-ffn")] = 0,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try the ways to split the job; options given here stay fixed.")
    ] = False,
    limit: Annotated[int, _option("Predictions of a sweep; default: 200.", "--limit")] = 200,
    scale: Annotated[
        str,
        _option("Weak and strong scaling over a range of GPUs, such as 8..16384.", "--scale", metavar="A..B"),
    ] = "",
    calibrate: Annotated[
        Path | None,
        _option("A profiler trace of one node: sets the compute side.", "--calibrate", metavar="TRACE"),
    ] = None,
    traced: Annotated[
        str,
        _option("How the traced job differed: 'layers=4 tp=1 gpus=2'.", "--traced", metavar="K=V …"),
    ] = "",
    html: Annotated[Path | None, _option("Write a page to look at.", "--html", metavar="FILE")] = None,
    chakra: Annotated[
        Path | None, _option("Write Chakra execution traces into this folder.", "--chakra", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Predict a training step on many GPUs: simulated, with an error known from published runs."""
    from weft.plan import request

    typed = dict(locals())
    given = _given(context)
    request.check_numbers(given, typed)
    _check_flags(given, sweep=sweep, scale=scale)
    wanted = request.read_model(given, typed)
    options = {
        "gpu": gpu,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "expert_tp": expert_tp,
        "dp": dp,
        "interleave": interleave,
        "schedule": schedule,
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "seq_len": seq,
        "sharding": sharding,
        "sequence_parallel": sequence_parallel,
        "recompute": recompute,
        "precision": precision,
        "compression": compression,
        "policy": _policy(policy),
        "network": request.read_network(gpu, network, rail_gbit, oversubscription),
    }
    if software:
        options["software"] = software
    _check_output(html, chakra)
    job = request.read_job(wanted, _gpus(gpus, scale, options), options)
    with _progress(quiet=as_json) as tell:
        calibration = _calibration(calibrate, traced, job)
        figures = calibration.figures if calibration else None
        if sweep:
            document = _sweep(job, given, limit, figures, tell)
        elif scale:
            document = _scale(job, scale, "global_batch" in given, figures, tell)
        else:
            document = _one(job, figures, calibration, chakra, tell)
        page = _page(document) if html else ""
    if html:
        from weft.files import write_whole

        write_whole(html, page)
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return
    from weft.report.plan_terminal import show_plan

    show_plan(document)
    for path, what in ((html, "page"), (chakra, "execution traces")):
        if path:
            print(f"{what}: {path}")


def _given(context: typer.Context) -> set[str]:
    """Options that the user typed, by their parameter's name."""
    names = context.params if context is not None else {}
    found = set()
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found.add(name)
    return found


def _check_flags(given: set[str], *, sweep: bool, scale: str) -> None:
    if sweep and scale:
        raise UsageError("--sweep and --scale are two questions; ask them one after the other")
    if (sweep or scale) and "chakra" in given:
        raise UsageError(f"--chakra writes one configuration; leave out {'--sweep' if sweep else '--scale'}")
    if "limit" in given and not sweep:
        raise UsageError("--limit bounds a sweep; add --sweep, or leave it out")
    if "traced" in given and "calibrate" not in given:
        raise UsageError("--traced describes the job of a trace; add --calibrate TRACE, or leave it out")
    if scale and "dp" in given:
        raise UsageError("--scale varies the data parallel ranks; leave out --dp")
    if scale and "policy" in given:
        raise UsageError("--scale compares no policy with the best ones; leave out --policy")


def _policy(words: str) -> Any:
    from weft.policy import Policy

    if words in ("auto", "none"):
        return words
    if words.endswith(".json") or Path(words).exists():
        return Policy.load(words)
    raise UsageError(f"--policy {words!r} is no policy file; use auto, none, or a file that weft tune wrote")


def _check_output(html: Path | None, chakra: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    if html and (html.is_dir() or not html.parent.is_dir()):
        raise UsageError(f"--html {html}: not a file in a folder that exists")
    if chakra and chakra.exists() and (not chakra.is_dir() or any(chakra.iterdir())):
        raise UsageError(f"--chakra {chakra}: not an empty folder; give a new one")


def _gpus(gpus: int, scale: str, options: dict[str, Any]) -> int:
    """How many GPUs: as given, by the ranks, or where a range begins."""
    from weft.plan.scaling import parse_range

    unit: int = options["tp"] * options["pp"] * options["cp"]
    if not gpus and options["dp"]:
        return unit * int(options["dp"])
    if not gpus and scale:
        return -(-parse_range(scale)[0] // unit) * unit
    return gpus


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
    job: TrainingJob,
    figures: Figures | None,
    calibration: Calibration | None,
    chakra: Path | None,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    from weft.plan.answer import answer, document

    found = answer(job, figures)
    if chakra:
        from weft.plan.execution_trace import write

        write(chakra, job, found.prediction, tell)
    return document(found, calibration=calibration, error=_known_error())


def _sweep(
    job: TrainingJob, given: set[str], limit: int, figures: Figures | None, tell: Callable[[int, int], None]
) -> dict[str, Any]:
    from weft.plan.answer import sweep_document
    from weft.plan.step import predict
    from weft.plan.sweep import room, sweep

    fits = room(figures)
    found = sweep(job, fixed=given, limit=limit, run=lambda way: predict(way, figures), fits=fits, tell=tell)
    return sweep_document(job, found, _known_error())


def _scale(
    job: TrainingJob, words: str, batch_given: bool, figures: Figures | None, tell: Callable[[int, int], None]
) -> dict[str, Any]:
    from weft.plan.answer import scaling_document
    from weft.plan.scaling import curves, parse_range
    from weft.plan.step import predict

    low, high = parse_range(words)
    found = curves(
        job, low, high, batch_given=batch_given, run=lambda here: predict(here, figures), tell=tell
    )
    return scaling_document(job, found, _known_error())


def _page(document: dict[str, Any]) -> str:
    from weft.report.plan_page import plan_page

    return plan_page(document)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A moving line on stderr once the work has taken a while."""
    started, done = time.monotonic(), [0, 0]
    shown: list[Any] = []

    def start() -> None:
        from rich.console import Console

        shown.append(Console(stderr=True).status(_words(done, started)))
        shown[0].start()

    def tell(at: int, total: int) -> None:
        done[:] = [at, total]
        for status in shown:
            status.update(_words(done, started))

    timer = threading.Timer(QUIET_S, start)
    timer.daemon = True
    if not quiet and sys.stderr.isatty():
        timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        for status in shown:
            status.stop()


def _words(done: list[int], started: float) -> str:
    count = f"{done[0]} of {done[1]} done" if done[1] else "predicting"
    return f"{count}, {time.monotonic() - started:.0f} s …"
