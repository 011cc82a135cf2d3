"""Compute times from a profiler trace of one rank: the time of its kernels by kind, without communication.

A collective slows the kernels it overlaps with. If a kernel also ran alone, only its time alone counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.checks import use_one_of
from weft.errors import InputError, UsageError
from weft.gpu.presets import GPU_PRESETS
from weft.plan.compute import Pass, Work, head, layer
from weft.plan.config import TrainingJob
from weft.plan.figures import Figures
from weft.timeline import Intervals, Kind, Timeline
from weft.trace import kineto
from weft.trace.record import Trace

_KINDS = ("gemm", "attention", "optimizer", "elementwise")
"""Kinds of compute kernels; the last is for kernels whose names match none of the other kinds."""
_NAMES = {
    "attention": re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE),
    "gemm": re.compile(r"gemm|nvjet|cutlass|cublas|xmma|matmul|Cijk_|_mm_|wgmma", re.IGNORECASE),
    "optimizer": re.compile(r"multi_tensor_apply|adam|lamb|sgd", re.IGNORECASE),
}
_BACKWARD = re.compile(r"bwd|backward|bprop|_dkv|_dq|dgrad|wgrad", re.IGNORECASE)
_REDUCTION = re.compile(r"combine|reduce|convert|postprocess|preprocess|dot_do_o", re.IGNORECASE)
_MAX_MATCHED = 1 << 12
_ROUNDS = 12
"""Iterations to fit the figures; setting one figure changes the times that the others produce."""
MAX_GAP_NS = 1_000_000
"""A longer pause counts as a wait, not as the gap between two launches."""


@dataclass(frozen=True)
class MeasuredStep:
    """Times of one step on one GPU."""

    device_name: str
    steps: int
    gemm_s: float
    attention_s: float
    optimizer_s: float
    elementwise_s: float
    gap_s: float
    """Median pause between consecutive kernels on the busiest compute stream."""
    launches: float
    """Compute kernels in a step."""
    beside_pct: float
    """Percentage of compute time in kernels that never ran alone: communication may have slowed them."""

    @property
    def compute_s(self) -> float:
        return self.gemm_s + self.attention_s + self.optimizer_s + self.elementwise_s


def kernel_kind(name: str) -> str:
    """The kind of a compute kernel, from its name."""
    head = name[:_MAX_MATCHED]
    return next((kind for kind, pattern in _NAMES.items() if pattern.search(head)), _KINDS[-1])


def measure_trace(path: Path, layers: float) -> MeasuredStep:
    """The time of the kernels in a trace, per step.

    `layers`: forward passes over a layer in a step of this GPU (its layers times the micro-batches). Steps
    are counted by the profiler's marks or, without marks, by the forward attention kernels.
    """
    traces = kineto.read(path)
    trace = max(traces, key=lambda found: int((found.timeline.kind == Kind.COMPUTE).sum()))
    timeline = trace.timeline
    compute = np.flatnonzero(timeline.kind == Kind.COMPUTE)
    if not len(compute):
        raise InputError(f"{path}: no compute kernels in it; profile a whole training step")
    steps = _steps(trace, compute, layers, path)
    length = (timeline.end_ns - timeline.start_ns)[compute]
    alone = ~_touches(timeline, compute, timeline.covered(Kind.COMM))
    seconds = dict.fromkeys(_KINDS, 0.0)
    shared = 0.0
    names, which = np.unique(timeline.name[compute], return_inverse=True)
    blocks = timeline.resources.get("blocks", np.full(len(timeline), -1, dtype=np.int64))[compute]
    # One kernel name covers several shapes; the grid distinguishes most of them.
    for name, grid in {(int(n), int(b)) for n, b in zip(which, blocks, strict=True)}:
        mine = (which == name) & (blocks == grid)
        free = mine & alone
        total = float(length[mine].sum())
        if free.any():
            total = float(np.median(length[free])) * int(mine.sum())
        else:
            shared += total
        seconds[kernel_kind(timeline.names[int(names[name])])] += total * 1e-9
    whole = sum(seconds.values())
    return MeasuredStep(
        device_name=trace.device_name,
        steps=steps,
        gap_s=_gap_ns(timeline, compute) * 1e-9,
        launches=len(compute) / steps,
        beside_pct=100.0 * shared * 1e-9 / whole if whole else 0.0,
        **{f"{kind}_s": total / steps for kind, total in seconds.items()},
    )


def _steps(trace: Trace, compute: npt.NDArray[np.intp], layers: float, path: Path) -> int:
    marked = len({step.name for step in trace.steps})
    if marked:
        return marked
    timeline = trace.timeline
    forward = 0
    counts = np.bincount(timeline.name[compute], minlength=len(timeline.names))
    for index in np.flatnonzero(counts).tolist():
        name = timeline.names[index][:_MAX_MATCHED]
        if kernel_kind(name) == "attention" and not _BACKWARD.search(name) and not _REDUCTION.search(name):
            forward += int(counts[index])
    steps = round(forward / layers)
    if steps < 1 or abs(steps * layers - forward) > 0.01 * forward:
        raise UsageError(
            f"--calibrate {path}: cannot count its steps: no ProfilerStep marks, and {forward} forward "
            f"attention kernels are no multiple of {layers:g} layers a step; mark steps with prof.step(), "
            "or give the options of the job that was traced"
        )
    return steps


def _touches(timeline: Timeline, index: npt.NDArray[np.intp], comm: Intervals) -> npt.NDArray[np.bool_]:
    """Whether each span overlapped with communication at any time."""
    if not len(comm.start):
        return np.zeros(len(index), dtype=bool)
    start, end = timeline.start_ns[index], timeline.end_ns[index]
    first = np.searchsorted(comm.end, start, side="right")
    later = np.minimum(first, len(comm.start) - 1)
    return (first < len(comm.start)) & (comm.start[later] < end)


def _gap_ns(timeline: Timeline, compute: npt.NDArray[np.intp]) -> float:
    streams, counts = np.unique(timeline.stream[compute], return_counts=True)
    mine = compute[timeline.stream[compute] == streams[counts.argmax()]]
    gaps = timeline.start_ns[mine][1:] - np.maximum.accumulate(timeline.end_ns[mine])[:-1]
    short = gaps[(gaps >= 0) & (gaps < MAX_GAP_NS)]
    return float(np.median(short)) if len(short) else 0.0


@dataclass(frozen=True)
class Calibration:
    """Figures that reproduce a trace's compute, and the values they replaced."""

    figures: Figures
    measured: MeasuredStep
    changes: tuple[tuple[str, float, float], ...]
    """(name, value before, value after) of each figure."""
    model_s: float
    """Compute time of the step with the original figures, in seconds, for comparison with the trace."""


def calibrate(measured: MeasuredStep, job: TrainingJob, figures: Figures) -> Calibration:
    """Set the software's figures so that, for each kind of kernel, the model takes as long as the trace.

    `job` is the traced job. Raises UsageError if the trace cannot be of this job, such as matmuls faster than
    the GPU's peak.
    """
    _check_possible(measured, job)
    before = figures.find(job.software)
    gaps_us = 1e6 * measured.gap_s * measured.launches / (3 * _layer_passes(job))
    found = figures.with_software(job.software, layer_us=gaps_us)
    for _ in range(_ROUNDS):
        rank, software = _rank(job, found), found.find(job.software)
        changes: dict[str, float] = {}
        if measured.gemm_s > 0 and rank.gemm > 0:
            changes["speed"] = software.speed * rank.gemm / measured.gemm_s
        if measured.attention_s > 0 and rank.attention > 0:
            wanted = software.attention_efficiency * rank.attention / measured.attention_s
            changes["attention_efficiency"] = min(1.0, wanted)
        if measured.elementwise_s > 0 and rank.elementwise > 0:
            changes["elementwise"] = software.elementwise * measured.elementwise_s / rank.elementwise
        found = found.with_software(job.software, **changes)
    after = found.find(job.software)
    names = (*changes, "layer_us")
    pairs = tuple((name, float(getattr(before, name)), float(getattr(after, name))) for name in names)
    return Calibration(found, measured, pairs, _rank(job, figures).total)


def _check_possible(measured: MeasuredStep, job: TrainingJob) -> None:
    """Raise UsageError if the traced matmuls cannot be this job's."""
    passes = 4 if job.recompute == "full" else 3
    tokens = job.tokens / (job.dp * job.cp)
    flops = 2.0 * passes * job.model.active_params * tokens / (job.tp * job.pp)
    reached = flops / (measured.gemm_s * job.gpu.flops(job.precision)) if measured.gemm_s > 0 else 0.5
    if not 0.02 < reached <= 1.0:
        raise UsageError(
            f"--calibrate: for this job the trace's matmuls ran at {100 * reached:.0f}% of the "
            f"{job.gpu.title}'s peak, so the trace is of another job; give the options of the traced one"
        )


def _layer_passes(job: TrainingJob) -> float:
    """Number of forward passes over a layer in a step of one GPU."""
    return job.model.layers / job.pp * job.micro_batches


def _rank(job: TrainingJob, figures: Figures) -> Work:
    """The compute of one GPU in a step, as modelled; the output's work is divided evenly among the stages."""
    moe_share = job.model.moe_layers / job.model.layers
    plain, routed = layer(job, figures), layer(job, figures, moe=True) if moe_share else Pass()
    each = plain * (1 - moe_share) + routed * moe_share
    whole = each * (job.model.layers / job.pp) + head(job, figures) * (1 / job.pp)
    return (whole.forward + whole.backward + whole.recompute) * job.micro_batches


def calibrated(path: Path, job: TrainingJob, figures: Figures) -> Calibration:
    """Measure a trace of `job` and calibrate the figures with it."""
    found = measure_trace(path, _layer_passes(job))
    _check_gpu(found.device_name, job, path)
    return calibrate(found, job, figures)


def _check_gpu(title: str, job: TrainingJob, path: Path) -> None:
    """Reject a trace of another GPU than the job's; a GPU that matches no preset is accepted."""
    words = title.lower().replace("-", " ").split()
    traced = next((name for name in GPU_PRESETS if name.split("-")[0] in words), None)
    if traced and traced.split("-")[0] != job.gpu.name.split("-")[0]:
        raise UsageError(
            f"--calibrate {path}: the trace is of {title}, the plan for {job.gpu.title}; use --gpu {traced}"
        )


def traced_job(job: TrainingJob, words: str) -> TrainingJob:
    """The traced job: the planned one with the changes in `words`, such as `layers=4 tp=1 gpus=2`."""
    known = {"layers", "gpus", "tp", "pp", "cp", "ep", "dp", "micro_batch", "global_batch", "seq_len"}
    changes: dict[str, int] = {}
    for part in words.replace(",", " ").split():
        name, _, value = part.partition("=")
        key = name.strip().replace("-", "_")
        if key not in known or not value.isdecimal() or len(value) > 9 or not int(value):
            raise UsageError(
                f"--traced {part!r} is not valid; write it as layers=4; {use_one_of(key, sorted(known))}"
            )
        changes[key] = int(value)
    layers = changes.pop("layers", None)
    traced = job.but(model=job.model.but(layers=layers), seq_len=job.seq_len) if layers else job
    if changes.keys() & {"gpus", "tp", "pp", "cp", "dp", "micro_batch"} and "global_batch" not in changes:
        changes["global_batch"] = 0
    return traced.but(**changes) if changes else traced
