"""Published runs: a table of jobs with measured step times, used to fit and validate predictions."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import InputError
from weft.gpu.network import GBIT, network
from weft.gpu.specs import GpuSpec, spec
from weft.plan.config import TrainingJob
from weft.plan.model_presets import model as preset
from weft.plan.models import Model

_MODEL = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    *("experts", "experts_per_token", "window", "head_dim", "seq_len"),
)
_JOB = (
    *("gpus", "tp", "pp", "cp", "ep", "expert_tp", "dp"),
    *("interleave", "micro_batch", "global_batch", "shard_ranks"),
)


@dataclass(frozen=True)
class Published:
    """One published run: its job and its measured step."""

    source: str
    """The publication. To measure the error, one publication at a time is left out of the fit."""
    label: str
    job: TrainingJob
    step_s: float
    assumed: str
    """What the publication leaves open, and the values assumed for it; empty if nothing."""
    provenance: str
    memory_bytes: float = 0.0
    """Published peak of the fullest GPU; 0: not published."""


def gpu_of(name: str) -> GpuSpec:
    """A GPU by name. `h100-96gb` is that of Meta's Grand Teton: HBM2e, 500 W (torchtitan's benchmarks)."""
    if name == "h100-96gb":
        return replace(spec("h100"), name=name, memory_bytes=96 << 30, memory_bytes_per_s=2.4e12)
    return spec(name)


def load(path: str | os.PathLike[str]) -> list[Published]:
    """Read a table of published runs."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            return [_row(row) for row in csv.DictReader(file)]
    except OSError as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise InputError(f"{os.fspath(path)} is not a table of published runs: {error}") from None


def _row(row: dict[str, str]) -> Published:
    split: dict[str, Any] = {name: int(row[name]) for name in _JOB}
    fabric = network(row["network"])
    if row["rail_gbit"]:
        gbit = float(row["rail_gbit"])
        fabric = fabric.but(name=f"{gbit:g} Gbit/s", rail_bytes_per_s=gbit * GBIT)
    job = TrainingJob(
        model=preset(row["model"]) if row["model"] else _model(row),
        gpu=gpu_of(row["gpu"]),
        network=fabric,
        **split,
        seq_len=int(row["seq_len"]),
        schedule=row["schedule"],
        sharding=row["sharding"],
        sequence_parallel=row["sequence_parallel"] == "1",
        recompute=row["recompute"],
        precision=row["precision"],
        software=row["software"],
        hide=frozenset(row["hide"].split()) if row["hide"] else None,
    )
    label = f"{row['label']} {row['precision']} {job.software}"
    memory = float(row["memory_gib"]) * 2**30 if row["memory_gib"] else 0.0
    return Published(
        row["source"], label, job, float(row["step_s"]), row["assumed"], row["provenance"], memory
    )


def _model(row: dict[str, str]) -> Model:
    sizes: dict[str, Any] = {name: int(row[name]) for name in _MODEL}
    return Model(
        name=row["label"],
        **sizes,
        gated=row["gated"] == "1",
        tied=row["tied"] == "1",
        parallel_block=row["parallel_block"] == "1",
    )
