"""Overlap at scale: against the number of GPUs, pipeline parallelism and compression. All of it is simulated.

python benchmarks/plan/study.py

Writes benchmarks/results/plan/study.json, the pictures under docs/images/, the tables between the marks of
docs/study-overlap-at-scale.md and docs/plan.md. One command, under two minutes; run it again when the
planner's constants change, after validate.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import zeropp
from study_text import BLOCKS, COMPRESSIONS, GBITS, SHARDED, SIZES, Row, block_accuracy, pictures

from weft.errors import UsageError
from weft.gpu.network import GBIT
from weft.gpu.network import NETWORKS as NETWORKS
from weft.plan import Prediction, TrainingJob, predict
from weft.plan.accuracy import known_error
from weft.plan.compression import parse
from weft.plan.config import AUTO
from weft.plan.scaling import resized

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
COMMUNICATION = ("tp", "cp", "ep", "pp", "grads", "params")


def jobs() -> dict[str, TrainingJob]:
    """The jobs of the study, each on 64 GPUs or the fewest that it needs."""
    return {
        "Llama-3 8B, FSDP": TrainingJob(
            model="llama3-8b", gpu="h100", gpus=64, sharding="zero3", recompute="selective"
        ),
        "Llama-3 70B, tp8 pp4": TrainingJob(
            model="llama3-70b", gpu="h100", gpus=64, tp=8, pp=4, interleave=5, global_batch=16
        ),
        "Llama-3 405B, tp8 pp16": TrainingJob(
            model="llama3-405b", gpu="h100", gpus=128, tp=8, pp=16, global_batch=32, recompute="selective"
        ),
        "GPT 175B on A100, tp8 pp8": TrainingJob(
            model="gpt-175b",
            gpu="a100-80gb",
            gpus=64,
            tp=8,
            pp=8,
            interleave=3,
            global_batch=16,
            recompute="selective",
            software="megatron-2022",
        ),
        "Mixtral 8x22B, ep8 pp4": TrainingJob(
            model="mixtral-8x22b", gpu="h100", gpus=64, tp=2, pp=4, ep=8, expert_tp=1, global_batch=64
        ),
    }


def share(found: Prediction, *parts: str) -> float:
    return round(100 * sum(found.breakdown.get(part, 0.0) for part in parts) / found.step_s, 2)


def figures_of(job: TrainingJob, without: Prediction, best: Prediction) -> Row:
    return {
        "job": str(job),
        "gpus": job.gpus,
        "step_s": round(best.step_s, 5),
        "step_without_s": round(without.step_s, 5),
        "gain_pct": round(100 * (1 - best.step_s / without.step_s), 2),
        "mfu_pct": round(best.mfu_pct, 2),
        "communication_pct": round(100 * sum(c.alone_s for c in without.collectives) / without.step_s, 2),
        "exposed_without_pct": share(without, *COMMUNICATION),
        "contention_without_pct": share(without, "contention"),
        "exposed_pct": share(best, *COMMUNICATION),
        "contention_pct": share(best, "contention"),
        "bubble_pct": share(best, "bubble"),
        "data_parallel_pct": share(without, "grads", "params"),
    }


def both(job: TrainingJob) -> Row:
    """The job without a control and with the best for each collective."""
    options = {"check_memory": False}
    return figures_of(job, predict(job.but(policy=None), **options), predict(job.but(policy=AUTO), **options))


def scale() -> list[Row]:
    """Weak scaling (the batch grows) and strong scaling (it stays) of every job."""
    rows = []
    for name, job in jobs().items():
        largest = job.micro_batch * job.pp * 2048
        for kind in ("weak", "strong"):
            for gpus in SIZES:
                try:
                    base = (
                        job.but(global_batch=max(job.global_batch, _multiple(largest, job)))
                        if kind == "strong"
                        else job
                    )
                    here = resized(base, gpus, kind)
                    rows.append({"name": name, "kind": kind, **both(here)})
                except UsageError:
                    continue
    return rows


def _multiple(wanted: int, job: TrainingJob) -> int:
    unit = job.dp * job.micro_batch * job.pp
    return max(1, wanted // unit) * unit


def pipelines() -> list[Row]:
    """Llama-3 70B on 1024 GPUs and the same batch, with more and more stages, on two networks."""
    rows = []
    for network in ("ndr400", "eth100"):
        for stages in (1, 2, 4, 8, 16):
            for chunks in (1, 5):
                if chunks > 1 and (stages == 1 or 80 % (stages * chunks)):
                    continue
                try:
                    job = TrainingJob(
                        model="llama3-70b",
                        gpu="h100",
                        gpus=1024,
                        tp=8,
                        pp=stages,
                        interleave=chunks,
                        global_batch=1024,
                        recompute="selective",
                        network=network,
                    )
                except UsageError:
                    continue
                rows.append({"network": network, "pp": stages, "interleave": chunks, **both(job)})
    return rows


def schedules() -> list[Row]:
    """What a schedule is worth next to a control: GPT 175B under the software of 2022, which hides little."""
    rows = []
    job = jobs()["GPT 175B on A100, tp8 pp8"]
    hide = frozenset({"tp_backward", "grads", "params"})
    for gpus in (256, 1024, 4096, 16384):
        here = resized(job, gpus, "weak")
        base = predict(here.but(policy=None), check_memory=False)
        row: Row = {"gpus": gpus, "step_s": base.step_s, "exposed_pct": share(base, *COMMUNICATION)}
        for name, changes in (
            ("controls_pct", {"policy": AUTO}),
            ("schedule_pct", {"policy": None, "hide": hide}),
            ("both_pct", {"policy": AUTO, "hide": hide}),
        ):
            other = predict(here.but(**changes), check_memory=False)
            row[name] = round(100 * (1 - other.step_s / base.step_s), 2)
        rows.append(row)
    return rows


def compressed() -> Iterator[Row]:
    """Gain of each method by bandwidth and scale, under the best controls: replicated and sharded weights."""
    plain = TrainingJob(model="llama3-8b", gpu="h100", gpus=64, tp=4, sharding="none", policy=AUTO)
    sharded = TrainingJob(
        model="llama3-8b", gpu="h100", gpus=64, sharding="zero3", recompute="selective", policy=AUTO
    )
    for kind, base, methods in (("replicated", plain, COMPRESSIONS), ("fully sharded", sharded, SHARDED)):
        for gpus in (64, 512, 4096):
            for gbit in GBITS:
                network = NETWORKS["ndr400"].but(name=f"{gbit:g}", rail_bytes_per_s=gbit * GBIT)
                job = resized(base, gpus, "weak").but(network=network)
                before = predict(job, check_memory=False)
                loose = predict(job.but(policy=None), check_memory=False)
                for method in methods:
                    after = predict(job.but(compression=method), check_memory=False)
                    after_loose = predict(job.but(compression=method, policy=None), check_memory=False)
                    yield {
                        "weights": kind,
                        "gpus": gpus,
                        "gbit_per_gpu": gbit,
                        "method": str(parse(method)),
                        "step_plain_s": round(before.step_s, 5),
                        "exposed_plain_pct": share(before, "grads", "params"),
                        "gain_pct": round(100 * (1 - after.step_s / before.step_s), 2),
                        "kernels_pct": share(after, "compression"),
                        "gain_without_controls_pct": round(100 * (1 - after_loose.step_s / loose.step_s), 2),
                        "controls_gain_pct": round(100 * (1 - before.step_s / loose.step_s), 2),
                        "controls_gain_compressed_pct": round(
                            100 * (1 - after.step_s / after_loose.step_s), 2
                        ),
                    }


def pipelines_compressed() -> list[Row]:
    """Whether compression still pays with more stages: Llama-3 70B, 1024 GPUs, by bandwidth."""
    rows = []
    for gbit in (12.5, 50, 400):
        network = NETWORKS["ndr400"].but(name=f"{gbit:g}", rail_bytes_per_s=gbit * GBIT)
        for stages in (1, 2, 4, 8, 16):
            job = TrainingJob(
                model="llama3-70b",
                gpu="h100",
                gpus=1024,
                tp=8,
                pp=stages,
                sharding="none",
                global_batch=1024,
                recompute="selective",
                network=network,
                policy=AUTO,
            )
            before = predict(job, check_memory=False)
            row: Row = {"gbit_per_gpu": gbit, "pp": stages, "exposed_pct": share(before, "grads", "params")}
            row["bubble_pct"] = share(before, "bubble")
            for method in ("fp8", "int8", "powersgd:4"):
                after = predict(job.but(compression=method), check_memory=False)
                row[method] = round(100 * (1 - after.step_s / before.step_s), 2)
            rows.append(row)
    return rows


def fill(path: Path, blocks: dict[str, Callable[[Row], str]], found: Row) -> None:
    """Make the tables of a document anew, each between its marks."""
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        start, end = f"<!-- study: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(start)
        _, found_end, after = rest.partition(end)
        if not found_end:
            raise SystemExit(f"{path}: no marks for {name}")
        text = f"{before}{start}\n{block(found)}\n{end}{after}"
    path.write_text(text, encoding="utf-8")


def accuracy() -> Row:
    """The error on published runs with their source left out, by family (data/accuracy.json)."""
    return known_error() or {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/plan/study.json")
    options = parser.parse_args()
    started = time.perf_counter()
    found: Row = {"command": "python benchmarks/plan/study.py", "simulated": True}
    for name, make in (
        ("scale", scale),
        ("schedules", schedules),
        ("pipelines", pipelines),
        ("compression", lambda: list(compressed())),
        ("pipelines_compressed", pipelines_compressed),
        ("zeropp", zeropp.compare),
        ("accuracy", accuracy),
    ):
        found[name] = make()
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    fill(ROOT / "docs" / "study-overlap-at-scale.md", BLOCKS, found)
    fill(ROOT / "docs" / "plan.md", {"accuracy": block_accuracy}, found)
    IMAGES.mkdir(exist_ok=True)
    for name, svg in pictures(found).items():
        (IMAGES / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
