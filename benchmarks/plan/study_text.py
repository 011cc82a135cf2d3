"""The tables, answers and pictures of the study's page, made from the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.plan.accuracy import TITLES
from weft.plan.compression import parse
from weft.report.figures import heatmap, lines

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
GBITS = (12.5, 25, 50, 100, 200, 400, 800)
COMPRESSIONS = ("fp8", "int8", "powersgd:4", "topk:0.01", "topk:0.001")
SHARDED = ("int8", "qwz", "qgz", "zero++")

Row = dict[str, Any]


def names(found: Row) -> list[str]:
    """The jobs, in the order of the study."""
    return list(dict.fromkeys(row["name"] for row in found["scale"]))


def table(heads: list[str], rows: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(heads) - 1)
    body = ["| " + " | ".join(cells) + " |" for cells in ([*heads], align, *rows)]
    return "\n".join(body)


def block_scale(found: Row) -> str:
    heads = [
        "job, weak scaling",
        "GPUs",
        "communication alone",
        "exposed",
        "contention",
        "with controls: exposed",
    ]
    heads += ["contention", "step", "gain"]
    rows = []
    for name in names(found):
        mine = [row for row in found["scale"] if row["name"] == name and row["kind"] == "weak"]
        for row in mine:
            if row["gpus"] in (128, 1024, 4096, 16384):
                rows.append(
                    [
                        name,
                        f"{row['gpus']}",
                        f"{row['communication_pct']:.0f}%",
                        f"{row['exposed_without_pct']:.1f}%",
                        f"{row['contention_without_pct']:.1f}%",
                        f"{row['exposed_pct']:.1f}%",
                        f"{row['contention_pct']:.1f}%",
                        f"{row['step_s']:.3g} s",
                        f"{row['gain_pct']:.1f}%",
                    ]
                )
    return table(heads, rows)


def block_strong(found: Row) -> str:
    sizes = [64, 256, 1024, 4096, 16384]
    heads = ["job, strong scaling", *(f"{size} GPUs" for size in sizes)]
    rows = []
    for name in names(found):
        cells = [name]
        for size in sizes:
            row = _one(found["scale"], name=name, kind="strong", gpus=size)
            cells.append(
                "-" if row is None else f"{row['exposed_without_pct']:.1f}% → {row['gain_pct']:.1f}%"
            )
        rows.append(cells)
    return table(heads, rows)


def _one(rows: list[Row], **wanted: object) -> Row | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def block_pipeline(found: Row) -> str:
    heads = [
        "network",
        "stages",
        "chunks",
        "bubble",
        "exposed",
        "of which data parallel",
        "contention",
        "gain",
        "step",
    ]
    rows = [
        [
            row["network"],
            str(row["pp"]),
            str(row["interleave"]),
            f"{row['bubble_pct']:.1f}%",
            f"{row['exposed_without_pct']:.1f}%",
            f"{row['data_parallel_pct']:.1f}%",
            f"{row['contention_without_pct']:.1f}%",
            f"{row['gain_pct']:.1f}%",
            f"{row['step_s']:.3g} s",
        ]
        for row in found["pipelines"]
    ]
    return table(heads, rows)


def block_pays(found: Row) -> str:
    """The best method by bandwidth and scale."""
    parts = []
    for weights, methods in (("replicated", COMPRESSIONS), ("fully sharded", SHARDED)):
        heads = [f"{weights} weights, GPUs", *(f"{gbit:g} Gbit/s" for gbit in GBITS)]
        rows = []
        for gpus in (64, 512, 4096):
            cells = [str(gpus)]
            for gbit in GBITS:
                mine = [
                    row
                    for row in found["compression"]
                    if (row["weights"], row["gpus"], row["gbit_per_gpu"]) == (weights, gpus, gbit)
                ]
                best = max(mine, key=lambda row: row["gain_pct"])
                cells.append(
                    f"{best['method']} {best['gain_pct']:.0f}%" if best["gain_pct"] >= 0.5 else "none"
                )
            rows.append(cells)
        parts.append(table(heads, rows))
        heads = [f"{weights} weights, 512 GPUs", *(f"{gbit:g} Gbit/s" for gbit in GBITS), "kernels"]
        rows = []
        for method in methods:
            mine = [
                _one(
                    found["compression"], weights=weights, gpus=512, gbit_per_gpu=g, method=str(parse(method))
                )
                for g in GBITS
            ]
            cells = [str(parse(method))] + [f"{row['gain_pct']:+.1f}%" for row in mine if row]
            rows.append([*cells, f"{mine[-1]['kernels_pct']:.1f}%" if mine[-1] else "-"])
        parts.append(table(heads, rows))
    return "\n\n".join(parts)


def block_interaction(found: Row) -> str:
    heads = ["weights", "Gbit/s", "method", "compression gains without controls", "with controls"]
    heads += ["controls gain without compression", "with compression"]
    rows = []
    for weights, method in (
        ("replicated", "int8"),
        ("replicated", "powersgd:4"),
        ("fully sharded", "zero++"),
    ):
        for gbit in (12.5, 50, 200, 400):
            row = _one(found["compression"], weights=weights, gpus=512, gbit_per_gpu=gbit, method=method)
            if row:
                rows.append(
                    [
                        weights,
                        f"{gbit:g}",
                        method,
                        f"{row['gain_without_controls_pct']:+.1f}%",
                        f"{row['gain_pct']:+.1f}%",
                        f"{row['controls_gain_pct']:+.1f}%",
                        f"{row['controls_gain_compressed_pct']:+.1f}%",
                    ]
                )
    return table(heads, rows)


def block_stages(found: Row) -> str:
    heads = ["Gbit/s per GPU", "stages", "bubble", "data parallel exposed", "fp8", "int8", "powersgd:4"]
    rows = [
        [
            f"{row['gbit_per_gpu']:g}",
            str(row["pp"]),
            f"{row['bubble_pct']:.1f}%",
            f"{row['exposed_pct']:.1f}%",
            *(f"{row[method]:+.1f}%" for method in ("fp8", "int8", "powersgd:4")),
        ]
        for row in found["pipelines_compressed"]
    ]
    return table(heads, rows)


def block_zeropp(found: Row) -> str:
    heads = ["model", "tokens", "Gbit/s of a node", "published", "predicted", "error"]
    rows = [
        [
            row["model"],
            str(row["tokens"]),
            str(row["node_gbit_s"]),
            f"{row['published_speedup']:.2f}x",
            f"{row['predicted_speedup']:.2f}x",
            f"{row['error_pct']:+.1f}%",
        ]
        for row in found["zeropp"]["rows"]
    ]
    mean, most = found["zeropp"]["mean_pct"], found["zeropp"]["max_pct"]
    adam = [row["error_pct"] for row in found["zeropp"]["all_reduces"]]
    return table(heads, rows) + (
        f"\n\nMean error of the speed-up {mean:.1f}%, largest {most:.1f}%. For the uncompressed all-reduces "
        f"of the 1-bit Adam paper (V100, TCP, EDR, 2020), predictions are off by {min(adam):+d} to "
        f"{max(adam):+d}%: the network model describes clusters of 2021 to 2025."
    )


def block_accuracy(found: Row) -> str:
    """Errors and intervals by family, each run predicted with its source left out of the fit."""
    lines = [
        "| jobs | runs | mean error | 90th percentile | 90% of true steps lie within | covered |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for name, one in found["accuracy"]["families"].items():
        lines.append(
            f"| {TITLES[name]} (`{name}`) | {one['runs']} | {one['mean_pct']:.1f}% | {one['p90_pct']:.1f}% | "
            f"{one['low_pct']:+.0f}% to {one['high_pct']:+.0f}% | {one['covered_pct']:.0f}% |"
        )
    whole = found["accuracy"]
    lines.append(
        f"| all | {whole['runs']} | {whole['mean_pct']:.1f}% | {whole['p90_pct']:.1f}% | | "
        f"{whole['covered_pct']:.0f}% |"
    )
    return "\n".join(lines)


def block_findings(found: Row) -> str:
    """The answers, with their numbers."""
    said = [_about_scale(found), _about_strong(found), _about_stages(found), *_about_compression(found)]
    return "\n".join(f"{number}. {text}" for number, text in enumerate(said, 1))


def _about_scale(found: Row) -> str:
    weak = [row for row in found["scale"] if row["kind"] == "weak"]
    large = [row for row in weak if row["gpus"] >= 1024]
    small = [row for row in weak if row["gpus"] <= 128]
    exposed = [_range(rows, "exposed_without_pct") for rows in (small, large)]
    return (
        "**Weak scaling.** The share of exposed communication without a control is "
        f"{exposed[0]} at up to 128 GPUs and {exposed[1]} from 1,024 to 16,384; contention takes "
        f"{_range(large, 'contention_without_pct')} more. The controls gain {_range(large, 'gain_pct')} of "
        f"the step from 1,024 GPUs on, {_range(small, 'gain_pct')} at up to 128."
    )


def _about_strong(found: Row) -> str:
    strong = [row for row in found["scale"] if row["kind"] == "strong"]
    ends = []
    for name in names(found):
        mine = [row for row in strong if row["name"] == name]
        if mine:
            ends.append(max(mine, key=lambda row: row["gpus"]))
    parts = [
        f"{row['name']} on {row['gpus']:,} GPUs: {row['exposed_without_pct']:.1f}% exposed, controls gain "
        f"{row['gain_pct']:.1f}%"
        for row in ends
    ]
    return (
        "**Strong scaling.** At the largest number of GPUs that the batch can be divided among: "
        + "; ".join(parts)
        + "."
    )


def _about_stages(found: Row) -> str:
    rows = [row for row in found["pipelines"] if row["network"] == "ndr400"]
    one, most = ([row for row in rows if row["pp"] == stages] for stages in (1, 16))
    slow = [row for row in found["pipelines"] if row["network"] == "eth100" and row["pp"] == 16]
    chunks = {row["interleave"]: row for row in slow}
    return (
        "**Pipeline stages trade exposed communication for bubble.** 70B on 1,024 GPUs: one stage has "
        f"{_range(one, 'data_parallel_pct')} exposed data-parallel communication and no bubble; 16 stages "
        f"{_range(most, 'data_parallel_pct')} and a bubble of {_range(most, 'bubble_pct')}. The controls "
        f"gain {_range(one, 'gain_pct')} with one stage and {_range(most, 'gain_pct')} with 16. Chunks "
        "shrink the bubble and add transfers: with 12.5 Gbit/s and 16 stages a step takes "
        f"{chunks[1]['step_s']:.3g} s with one chunk and {chunks[5]['step_s']:.3g} s with five."
    )


def block_schedules(found: Row) -> str:
    heads = [
        "GPUs",
        "original step",
        "exposed",
        "best controls gain",
        "hiding gradients and parameters gains",
        "both",
    ]
    rows = [
        [
            f"{row['gpus']:,}",
            f"{row['step_s']:.3g} s",
            f"{row['exposed_pct']:.1f}%",
            f"{row['controls_pct']:.1f}%",
            f"{row['schedule_pct']:.1f}%",
            f"{row['both_pct']:.1f}%",
        ]
        for row in found["schedules"]
    ]
    return table(heads, rows)


def _best(rows: list[Row]) -> list[Row]:
    """The best method of each scale and bandwidth."""
    found: dict[tuple[int, float], Row] = {}
    for row in rows:
        key = (row["gpus"], row["gbit_per_gpu"])
        if key not in found or row["gain_pct"] > found[key]["gain_pct"]:
            found[key] = row
    return list(found.values())


def _about_compression(found: Row) -> list[str]:
    plain = [row for row in found["compression"] if row["weights"] == "replicated"]
    best = _best(plain)
    slow, fast = (
        [r for r in best if keep(r["gbit_per_gpu"])] for keep in (lambda g: g <= 100, lambda g: g >= 400)
    )
    narrow = [r for r in plain if r["method"] in ("fp8", "int8") and r["gbit_per_gpu"] >= 400]
    sparse = [r for r in plain if r["method"] == "topk:0.01" and r["gpus"] >= 512]
    zero = [row for row in found["compression"] if row["method"] == "zero++"]
    quick = [row for row in zero if row["gbit_per_gpu"] >= 400]
    return [
        "**Compressed gradients.** Replicated weights, one sequence per rank: the best method gains "
        f"{_range(slow, 'gain_pct')} of the step at 100 Gbit/s per GPU and below, and at most "
        f"{max(r['gain_pct'] for r in fast):.1f}% at 400 and above; there fp8 and int8 change it by "
        f"{_range(narrow, 'gain_pct')} and their kernels take {_range(narrow, 'kernels_pct')}. Top-k's "
        f"gather grows with the ranks: 1% density changes the step by {_range(sparse, 'gain_pct')} from 512 "
        "GPUs on. Negative values are losses.",
        "**Compressed gathers.** Fully sharded training moves weights twice and gradients once for every "
        f"layer: ZeRO++ gains {_range(zero, 'gain_pct')} over all bandwidths and scales, "
        f"{_range(quick, 'gain_pct')} at 400 Gbit/s and above.",
        _about_both(found),
    ]


def _about_both(found: Row) -> str:
    rows = [
        r
        for r in found["compression"]
        if r["method"] in ("int8", "powersgd:4", "zero++") and r["gpus"] == 512
    ]
    hidden = [r for r in rows if r["gbit_per_gpu"] >= 400]
    bound = [r for r in rows if r["gbit_per_gpu"] <= 50]
    plain, packed = "controls_gain_pct", "controls_gain_compressed_pct"
    return (
        "**Compression and controls.** Where the network is the bottleneck (50 Gbit/s and below, 512 GPUs) "
        "the controls gain "
        f"{_range(bound, plain)} without compression and {_range(bound, packed)} with it"
        f"{_reason(bound, 'compression makes transfers short enough for the controls to hide')}. "
        f"At 400 and above they gain {_range(hidden, plain)} without and {_range(hidden, packed)} with."
    )


def _reason(rows: list[Row], words: str) -> str:
    """The reason, if the numbers support it: on average the controls gain more with compression."""
    more = sum(row["controls_gain_compressed_pct"] - row["controls_gain_pct"] for row in rows)
    return f": {words}" if more > 0 else ""


def _range(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows]
    if not values:
        return "-"
    low, high = (round(value, 1) + 0.0 for value in (min(values), max(values)))  # never -0.0
    return f"{low:.1f}%" if high - low < 0.05 else f"{low:.1f} to {high:.1f}%"


BLOCKS: dict[str, Callable[[Row], str]] = {
    "findings": block_findings,
    "scale": block_scale,
    "strong": block_strong,
    "schedules": block_schedules,
    "pipeline": block_pipeline,
    "pays": block_pays,
    "interaction": block_interaction,
    "stages": block_stages,
    "zeropp": block_zeropp,
}


def pictures(found: Row) -> dict[str, str]:
    panels: dict[str, dict[str, list[float | None]]] = {}
    for kind, title in (("weak", "Weak scaling"), ("strong", "Strong scaling")):
        for key, what in (("exposed_without_pct", "exposed, no control"), ("gain_pct", "gain by controls")):
            series = {}
            for name in names(found):
                rows = [_one(found["scale"], name=name, kind=kind, gpus=size) for size in SIZES]
                series[name] = [None if row is None else row[key] for row in rows]
            panels[f"{title}: {what}"] = series
    shown = [str(size) if size < 1024 else f"{size // 1024}k" for size in SIZES]
    made = {
        "plan-scale.svg": lines(
            "Exposed communication and what controls gain, percent of the step (simulated)",
            panels,
            shown,
            y_label="% of the step",
            low=0.0,
        )
    }
    methods = [str(parse(m)) for m in COMPRESSIONS]
    values = [
        [
            (_one(found["compression"], weights="replicated", gpus=512, gbit_per_gpu=g, method=m) or {}).get(
                "gain_pct"
            )
            for g in GBITS
        ]
        for m in methods
    ]
    sharded = [str(parse(m)) for m in SHARDED]
    values += [
        [
            (
                _one(found["compression"], weights="fully sharded", gpus=512, gbit_per_gpu=g, method=m) or {}
            ).get("gain_pct")
            for g in GBITS
        ]
        for m in sharded
    ]
    made["plan-compression.svg"] = heatmap(
        "Gain by compression, % of the step, 8B on 512 H100 (simulated)",
        [*methods, *(f"{m} (sharded)" for m in sharded)],
        [f"{g:g} Gb/s" for g in GBITS],
        values,
        digits=1,
    )
    return made
