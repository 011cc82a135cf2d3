"""Sentences and rows about a plan for the terminal and the page, from its document."""

from __future__ import annotations

from dataclasses import dataclass

from weft.report import words
from weft.report.reading import Document, amount, clean, number, record, records, text

LABELS = {
    "gemm": "matmuls",
    "attention": "attention",
    "elementwise": "norms, activations, loss",
    "recompute": "recomputation",
    "overhead": "launch gaps",
    "optimizer": "optimizer",
    "compression": "compression kernels",
    "tp": "exposed: tensor parallel",
    "cp": "exposed: context parallel",
    "ep": "exposed: expert parallel",
    "pp": "exposed: between stages",
    "grads": "exposed: gradients",
    "params": "exposed: parameters",
    "contention": "compute slowed by collectives",
    "bubble": "pipeline bubble",
    "skew": "skew and jitter",
}
OF = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "between stages",
    "grads": "gradients",
    "params": "parameters",
}
FAMILY = {
    "dense": "of dense models",
    "fsdp": "with fully sharded parameters",
    "moe": "of mixture-of-experts models",
    "long-context": "with long sequences",
    "large": "on more than 2,304 GPUs",
    "untested": "on this GPU or in this precision",
}
EXPOSED = tuple(OF)
WAY_PARTS = "ppSxC: C chunks per stage; mb: micro-batch; z: ZeRO; re, re-all: recomputation; zb: zero-bubble"
"""Explanation of the less obvious parts of a sweep's labels."""
_COMPUTE = ("gemm", "attention", "elementwise", "recompute", "optimizer", "compression")


@dataclass(frozen=True)
class CollectiveRow:
    """One kind of collective in a step; times in seconds."""

    name: str
    short: str
    ranks: str
    bytes: float
    count: float
    alone_s: float
    hidden_s: float
    exposed_s: float
    slows_s: float
    policy: str


@dataclass(frozen=True)
class Control:
    """The policy that a collective runs under."""

    collective: str
    policy: str


@dataclass(frozen=True)
class ChangeRow:
    """The effect of another schedule or compression."""

    label: str
    step_s: float
    gain_pct: float


def title(document: Document) -> str:
    """The job in a few words."""
    job = record(document, "job")
    split = [f"{key}{amount(job, key):.0f}" for key in ("tp", "pp", "cp", "ep", "dp") if amount(job, key) > 1]
    gpus = f"{amount(job, 'gpus'):,.0f} {text(job, 'gpu')}"
    return f"{text(job, 'model')} on {gpus}" + (f" ({' '.join(split)})" if split else "")


def subtitle(document: Document) -> str:
    """The rest of the configuration."""
    job = record(document, "job")
    parts = [
        f"{amount(job, 'params') / 1e9:.4g}B parameters",
        f"{amount(job, 'seq_len'):.0f} tokens a sequence",
        f"batch {amount(job, 'global_batch'):.0f} in micro-batches of {amount(job, 'micro_batch'):.0f}",
        f"{text(job, 'schedule')} pipeline" if amount(job, "pp") > 1 else "",
        f"sharding {text(job, 'sharding')}",
        f"{text(job, 'recompute')} recomputation" if text(job, "recompute") != "none" else "",
        text(job, "precision"),
        f"compression {text(job, 'compression')}" if text(job, "compression") != "none" else "",
        f"network {text(job, 'network')}",
        text(job, "software"),
    ]
    return ", ".join(part for part in parts if part)


def plan_sentence(document: Document) -> str:
    """The answer in one sentence."""
    kind = text(document, "kind")
    if kind == "plan-sweep":
        best = record(document, "best")
        gpus = amount(record(document, "job"), "gpus")
        where = (
            f"{text(record(document, 'job'), 'model')} on {gpus:,.0f} {text(record(document, 'job'), 'gpu')}"
        )
        base = amount(record(document, "without_weft"), "step_time_s") or amount(best, "step_time_s")
        return (
            f"{where}: the fastest of {len(records(document, 'rows'))} predictions is {text(best, 'label')}, "
            f"{words.duration(1e6 * base)} a step{_range(document)} without weft's controls, "
            f"{words.duration(1e6 * amount(best, 'step_time_s'))} with; {_mfu(document, best)}."
        )
    if kind == "plan-scaling":
        return f"{text(record(document, 'job'), 'model')}: {_scaling_words(document)}"
    plain = record(document, "without_weft")
    step, base = amount(document, "step_time_s"), amount(plain, "step_time_s")
    # The validated number comes first: published runs had none of weft's controls.
    shown, side = (base, plain) if base > 0 else (step, document)
    scale = step / shown if shown else 1.0
    exposed = amount(side, "exposed_comm_s")
    return (
        f"{title(document)}: {words.duration(1e6 * shown)} a step{_range(document)}, "
        f"{amount(document, 'tflops_per_gpu') * scale:.0f} TFLOP/s a GPU, "
        f"{_mfu(document, side)}, "
        f"{amount(document, 'tokens_per_s_per_gpu') * scale:,.0f} tokens/s a GPU; "
        f"{words.duration(1e6 * exposed)} of communication exposed "
        f"({words.percent(words.share(exposed, shown))})."
    )


def _range(document: Document) -> str:
    """The interval of the step, in parentheses; empty if there is none."""
    found = record(document, "interval")
    low, high = amount(found, "low_s"), amount(found, "high_s")
    if not high:
        return ""
    return f" (90%: {words.duration(1e6 * low)} to {words.duration(1e6 * high)})"


def _scaling_words(document: Document) -> str:
    parts = []
    for curve in records(document, "curves"):
        points = records(curve, "points")
        if not points:
            continue
        last = points[-1]
        without = number(record(last, "without"), "efficiency_pct")
        with_weft = number(record(last, "with_weft"), "efficiency_pct")
        parts.append(
            f"{text(curve, 'kind')} scaling from {amount(points[0], 'gpus'):,.0f} to "
            f"{amount(last, 'gpus'):,.0f} GPUs "
            f"keeps {words.percent(without)} of the rate without a control, {words.percent(with_weft)} with"
        )
    return "; ".join(parts) + "."


def _mfu(document: Document, found: Document) -> str:
    said = f"MFU {words.percent(number(found, 'mfu_pct'))}"
    low = text(record(document, "job"), "precision") in ("fp8", "mxfp8", "nvfp4")
    return f"{said} of the bf16 peak" if low else said


def honesty(document: Document) -> str:
    """How reliable the numbers are: simulated, and the known error of the model."""
    said = "Simulated, not measured."
    error = record(document, "known_error")
    mean, high = number(error, "mean_pct"), number(error, "p90_pct")
    kind = FAMILY.get(text(document, "family"), "of this kind")
    if mean is not None and high is not None:
        runs = amount(error, "runs")
        said += (
            f" On {runs:.0f} published runs {kind}, each predicted with its source left out of the fit, the "
            f"step was off by {mean:.1f}% on average, {high:.1f}% at the 90th percentile."
            if runs
            else f" No published run {kind} was checked: the interval is a judgement, not a measurement."
        )
    calibration = record(document, "calibration")
    if calibration:
        said += (
            " Compute calibrated by a trace: "
            f"{words.duration(1e6 * amount(calibration, 'trace_compute_s'))} a step there, "
            f"{words.duration(1e6 * amount(calibration, 'model_compute_s'))} by the figures before."
        )
    return said


def notes(document: Document) -> list[str]:
    """Notes about the prediction."""
    found = document.get("notes")
    return [clean(note) for note in found] if isinstance(found, list) else []


def breakdown(document: Document) -> list[tuple[str, float]]:
    """(label, seconds) of each part of the step that takes time."""
    found = record(document, "breakdown")
    known = [key for key in LABELS if key in found]
    rest = [key for key in found if key not in LABELS]
    return [
        (LABELS.get(key) or clean(key), amount(found, key))
        for key in (*known, *rest)
        if amount(found, key) > 0
    ]


def planned_collective_rows(document: Document) -> list[CollectiveRow]:
    """The collectives, the most exposed first."""
    rows = []
    for one in records(document, "collectives"):
        group = record(one, "group")
        ranks, near = amount(group, "ranks"), amount(group, "per_domain")
        where = f"{ranks:.0f}" if ranks <= near else f"{ranks:.0f} on {max(ranks / max(near, 1), 1):.0f}"
        kind = text(one, "kind").replace("_", "-")
        rows.append(
            CollectiveRow(
                name=f"{OF.get(text(one, 'name'), text(one, 'name'))} {kind}",
                short=f"{text(one, 'name')} {kind}",
                ranks=where,
                bytes=amount(one, "bytes"),
                count=amount(one, "count"),
                alone_s=amount(one, "alone_s"),
                hidden_s=amount(one, "hidden_s"),
                exposed_s=amount(one, "exposed_s"),
                slows_s=amount(one, "slows_compute_by_s"),
                policy=_policy(one.get("policy")),
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_s)


def _policy(policy: object) -> str:
    return "overlaps with nothing" if policy is None else words.policy_name(policy)


def weft_sentence(document: Document) -> str:
    """One sentence about what weft's controls change."""
    if text(document, "controls") == "none":
        return "Planned without weft's controls; --policy auto finds the best for each collective."
    before = record(document, "without_weft")
    step, base = amount(document, "step_time_s"), amount(before, "step_time_s")
    if base <= 0 or abs(step / base - 1) < 5e-4:
        return "What weft changes: nothing worth a control here; leave it alone."
    exposed = f"{words.duration(1e6 * amount(before, 'exposed_comm_s'))} to "
    exposed += words.duration(1e6 * amount(document, "exposed_comm_s"))
    return (
        f"What weft changes: {words.duration(1e6 * base)} a step without a control, "
        f"{words.duration(1e6 * step)} with ({100 * (1 - step / base):.1f}% less); exposed {exposed}."
    )


def controls(document: Document) -> list[Control]:
    """The collectives that run under a control."""
    found: dict[str, str] = {}
    for row in planned_collective_rows(document):
        if row.policy not in ("no control", "overlaps with nothing"):
            found.setdefault(row.name, row.policy)
    return [Control(name, policy) for name, policy in found.items()]


def change_rows(document: Document) -> list[ChangeRow]:
    """Other changes that would affect the step time."""
    rows = []
    for one in records(document, "changes"):
        option = text(one, "option")
        label = text(one, "text") + (f" ({option})" if option else "")
        rows.append(ChangeRow(label, amount(one, "step_time_s"), amount(one, "gain_pct")))
    return rows


def memory_sentence(document: Document) -> str:
    """Memory of the GPU that uses most, by kind."""
    total, limit = amount(document, "memory_bytes"), amount(document, "memory_limit_bytes")
    kinds = record(document, "memory")
    order = sorted(kinds, key=lambda kind: -amount(kinds, kind))
    parts = [
        f"{clean(kind)} {amount(kinds, kind) / 2**30:.1f}" for kind in order if amount(kinds, kind) > 5e7
    ]
    return f"Memory of the fullest GPU: {total / 2**30:.1f} of {limit / 2**30:.0f} GiB ({', '.join(parts)})."


def cost_sentence(document: Document) -> str:
    """GPU-hours and cost of a billion tokens; empty if unknown."""
    found = record(document, "cost")
    hours, money = amount(found, "gpu_hours_per_billion_tokens"), amount(found, "usd_per_billion_tokens")
    if not hours:
        return ""
    said = f"A billion tokens take {hours:,.0f} GPU-hours"
    return f"{said}, {money:,.0f} USD." if money else f"{said} (--price USD gives their cost)."


def refused(document: Document) -> list[str]:
    """Why configurations were left out of a sweep."""
    found = document.get("refused")
    reasons = [clean(reason) for reason in found] if isinstance(found, list) else []
    more = amount(document, "left_out")
    return reasons + ([f"{more:.0f} more ways that fit; raise --limit to try them"] if more else [])


def curve_title(curve: Document) -> str:
    """Title of a scaling curve."""
    if text(curve, "kind") == "weak":
        return "Weak scaling: the batch grows with the GPUs"
    return "Strong scaling: the batch stays"
