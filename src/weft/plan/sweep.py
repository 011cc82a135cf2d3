"""A sweep over the ways to split a job, with and without weft's controls, and its Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from weft.errors import UsageError
from weft.plan.config import AUTO, TrainingJob
from weft.plan.figures import Figures, shipped
from weft.plan.memory import MARGIN, check_fits, memory_bytes
from weft.plan.model_presets import model as preset
from weft.plan.models import Model
from weft.plan.step import PlanProgress, Predict, Prediction, predict
from weft.policy import Policy

_LIMIT = 200
"""Default number of predictions that a sweep keeps."""
SCREENED = 2000
"""Most splits to predict without controls in order to keep the fastest ones; more if more are kept."""
TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16, 32)
CONTEXT = (1, 2, 4, 8, 16)
EXPERT = (1, 2, 4, 8, 16, 32, 64, 128)
_CHUNKS = (1, 2, 4)
MICRO = (1, 2, 4)
_SHARDINGS = ("zero1", "zero3")
RECOMPUTE = ("none", "selective", "full")
_SCHEDULES = ("", "zero-bubble", "dualpipe")
"""The first stands for 1F1B, or for interleaved if a stage has several chunks."""
TOKENS_PER_RANK = 4096
"""Fewest tokens of a sequence per rank for which context parallelism is tried."""

Options = Mapping[str, Any]
"""Keyword arguments of a TrainingJob that need not be valid together before the job is split."""


@dataclass(frozen=True)
class SweepRow:
    """One way to run the job, and its prediction."""

    job: TrainingJob
    prediction: Prediction
    best: bool = False
    """Whether it is on the Pareto front: no faster row needs as little memory and as few GPU-seconds."""

    @property
    def label(self) -> str:
        """The varied options, abbreviated."""
        job = self.job
        parts = [f"tp{job.tp}", f"pp{job.pp}" + (f"x{job.interleave}" if job.interleave > 1 else "")]
        parts += [f"{name}{getattr(job, name)}" for name in ("cp", "ep") if getattr(job, name) > 1]
        parts += [f"dp{job.dp}", f"mb{job.micro_batch}", job.sharding.replace("zero", "z")]
        parts += {"selective": ["re"], "full": ["re-all"]}.get(job.recompute, [])
        parts += {"zero-bubble": ["zb"], "dualpipe": ["dualpipe"], "gpipe": ["gpipe"]}.get(job.schedule, [])
        return " ".join(parts)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.job.tokens / self.prediction.step_s / self.job.gpus

    @property
    def gpu_s_per_token(self) -> float:
        """GPU-seconds per token."""
        return self.prediction.step_s * self.job.gpus / self.job.tokens


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep."""

    rows: tuple[SweepRow, ...]
    """Fastest first."""
    refused: tuple[str, ...]
    """Reasons why ways were rejected: they do not fit into memory, or do not divide."""
    left_out: int = 0
    """Number of valid ways beyond the limit."""


def options_of(job: TrainingJob) -> dict[str, Any]:
    """A job as options; fields derived from the split are reset, to be derived again."""
    found = {field.name: getattr(job, field.name) for field in fields(job)}
    derived = {"dp": 0, "schedule": "", "sequence_parallel": None, "shard_ranks": 0, "expert_tp": 0}
    return {**found, **derived}


def axes(options: Options, held: set[str]) -> dict[str, Sequence[object]]:
    """The varied options and their values. Options in `held`, chosen by the user, have one value."""
    model = options["model"]
    shape: Model = model if isinstance(model, Model) else preset(model)
    gpus = int(options["gpus"])
    seq = int(options.get("seq_len") or shape.seq_len)
    whole = [
        p for p in range(1, min(shape.layers, 64) + 1) if shape.layers % p == 0 or (shape.layers + 2) % p == 0
    ]
    stages = sorted({p for p in (*PIPELINE, *whole) if p <= shape.layers and gpus % p == 0})
    found: dict[str, Sequence[object]] = {
        "tp": [t for t in TENSOR if shape.heads % t == 0 and gpus % t == 0],
        "pp": stages,
        "cp": [c for c in CONTEXT if c == 1 or seq // c >= TOKENS_PER_RANK],
        "ep": [e for e in EXPERT if shape.experts % e == 0] if shape.experts else (1,),
        "expert_tp": (1, 0) if shape.experts else (0,),
        "interleave": _CHUNKS,
        "schedule": _SCHEDULES,
        "micro_batch": MICRO,
        "sharding": _SHARDINGS,
        "recompute": RECOMPUTE,
    }
    return {
        name: (options.get(name, values[0]),) if name in held else values for name, values in found.items()
    }


def splits(options: Options, fixed: Iterable[str] = ()) -> Iterator[TrainingJob | None]:
    """Every way to split the job; None for one that does not divide."""
    held = set(fixed)
    varied = axes(options, held)
    for values in product(*varied.values()):
        chosen = dict(zip(varied, values, strict=True))
        if _pointless(options, chosen, held):
            continue
        try:
            yield TrainingJob(**{**options, **chosen})
        except UsageError:
            yield None


def _pointless(options: Options, chosen: Mapping[str, Any], held: set[str]) -> bool:
    """Whether the combination repeats another one, or cannot divide the GPUs."""
    tp, pp, cp, v = (int(chosen[name]) for name in ("tp", "pp", "cp", "interleave"))
    if int(options["gpus"]) % (tp * pp * cp):
        return True
    if pp == 1 and (v != 1 or chosen["schedule"] in ("zero-bubble", "dualpipe")):
        return True
    if v > 1 and chosen["schedule"] and "schedule" not in held:
        return True
    if chosen["schedule"] == "dualpipe" and (pp < 4 or pp % 2):
        return True
    if chosen["expert_tp"] == 0 and tp == 1 and "expert_tp" not in held:
        return len(held & {"ep"}) == 0 and chosen["ep"] != 1
    # With pipelining, zero3 behaves like zero1: see TrainingJob.gathers_layers.
    return chosen["sharding"] == "zero3" and pp != 1 and "sharding" not in held


def ways(job: TrainingJob | Options, fixed: Iterable[str] = ()) -> tuple[list[TrainingJob], int]:
    """Jobs that differ in how they are split, and the number of splits that do not divide.

    `fixed` names the options that the user chose; the others vary. The GPUs, the batch and the model stay.
    """
    held = set(fixed)
    options = options_of(job) if isinstance(job, TrainingJob) else job
    if isinstance(job, TrainingJob):
        names = ("dp", "schedule", "sequence_parallel", "shard_ranks", "expert_tp")
        options = {**options, **{name: getattr(job, name) for name in names if name in held}}
    found: list[TrainingJob] = []
    impossible = 0
    for way in splits(options, held):
        if way is None:
            impossible += 1
        else:
            found.append(way)
    return list(dict.fromkeys(found)), impossible


def spread(found: Sequence[TrainingJob], most: int) -> list[TrainingJob]:
    """At most `most` of the jobs, evenly spaced."""
    if len(found) <= most:
        return list(found)
    return [found[i * len(found) // most] for i in range(most)]


def sweep(
    job: TrainingJob | Options,
    *,
    fixed: Iterable[str] = (),
    limit: int = _LIMIT,
    run: Predict = predict,
    fits: Callable[[TrainingJob], str] = lambda job: "",
    progress: PlanProgress | None = None,
) -> Sweep:
    """Predict the ways without controls, then the best of them with controls; keep `limit` predictions.

    `fits` returns the reason why a job does not fit into memory; empty if it fits.
    """
    held = set(fixed)
    given = job.policy if isinstance(job, TrainingJob) else job.get("policy")
    policies: list[Policy | str | None] = [given] if "policy" in held else [None, AUTO]
    found, impossible = ways(job, held)
    reasons = [fits(way) for way in found]
    roomy = [way for way, reason in zip(found, reasons, strict=True) if not reason]
    full = [reason for reason in reasons if reason]
    refused = [f"{len(full)} ways do not fit into memory, such as {full[-1]}"] if full else []
    kept = max(1, limit // len(policies))
    screened = spread(roomy, max(kept, min(SCREENED, 10 * kept)))
    total = len(screened) + kept * (len(policies) - 1)
    first: list[SweepRow] = []
    for at, way in enumerate(screened):
        try:
            plain = way.but(policy=policies[0])
            first.append(SweepRow(plain, run(plain)))
        except UsageError as error:
            refused.append(str(error))
        if progress:
            progress(at + 1, total)
    if not first:
        reason = refused[0] if refused else f"none of the {impossible} splits divides the job"
        raise UsageError(f"--sweep found nothing that can run: {reason}")
    chosen = _chosen(front(first), kept)
    rows = list(chosen)
    for at, row in enumerate(chosen):
        for policy in policies[1:]:
            way = row.job.but(policy=policy)
            rows.append(SweepRow(way, run(way)))
        if progress:
            progress(min(total, len(screened) + at + 1), total)
    refused += [f"{impossible} splits do not divide the model, the GPUs or the batch"] if impossible else []
    return Sweep(tuple(front(rows)), tuple(refused), len(roomy) - len(chosen))


def _chosen(rows: Sequence[SweepRow], most: int) -> list[SweepRow]:
    """At most `most` rows: those on the front first, then the fastest others."""
    best = [row for row in rows if row.best][:most]
    rest = [row for row in rows if not row.best][: most - len(best)]
    return sorted([*best, *rest], key=lambda row: row.prediction.step_s)


def front(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows, fastest first, with those on the Pareto front of step time, memory and cost marked."""
    ordered = sorted(rows, key=lambda row: (row.prediction.step_s, total_memory(row.prediction)))
    marked: list[SweepRow] = []
    known: list[tuple[float, float]] = []
    for row in ordered:
        memory, cost = total_memory(row.prediction), row.gpu_s_per_token
        best = not any(m <= memory and c <= cost * (1 + 1e-9) for m, c in known)
        marked.append(SweepRow(row.job, row.prediction, best))
        if best:
            known.append((memory, cost))
    return marked


def total_memory(found: Prediction) -> float:
    """Bytes on the GPU that needs most."""
    return float(sum(found.memory_bytes.values()))


def room(figures: Figures | None = None) -> Callable[[TrainingJob], str]:
    """A function that returns why a job does not fit into memory with a margin; empty if it fits."""
    known = figures or shipped()

    def reason(job: TrainingJob) -> str:
        kinds = memory_bytes(job, known)
        try:
            check_fits(job, kinds, share=MARGIN)
        except UsageError as error:
            return str(error)
        return ""

    return reason
