"""TrainingJob: a training run to plan. The constructor checks it; errors name the nearest valid choice."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from weft.checks import check_choice
from weft.errors import UsageError
from weft.gpu.network import Network, network, usual_network
from weft.gpu.specs import GpuSpec, spec
from weft.plan.compression import NONE, Method, check_compression, parse
from weft.plan.model_presets import model
from weft.plan.models import Model, nearest_divisor
from weft.policy import Policy

PIPELINE_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe")
SHARDINGS = ("none", "zero1", "zero2", "zero3")
RECOMPUTES = ("none", "selective", "full")
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
AUTO = "auto"
SOFTWARE = "megatron-2025"


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model on a number of GPUs. Names of presets are looked up; omitted fields are derived."""

    model: Model
    """The constructor also accepts the name of a preset."""
    gpu: GpuSpec
    """The constructor also accepts the name of a preset."""
    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Ranks over which the experts are divided; these are ranks of the tp, cp and dp groups."""
    expert_tp: int = 0
    """Tensor parallelism inside an expert; 0: same as `tp`."""
    dp: int = 0
    """0: `gpus` / (tp x pp x cp)."""
    interleave: int = 1
    """Model chunks of each pipeline stage."""
    schedule: str = ""
    """`1f1b`, `gpipe`, `interleaved`, `zero-bubble` or `dualpipe`; empty: chosen by `interleave`."""
    micro_batch: int = 1
    """Sequences in a micro-batch."""
    global_batch: int = 0
    """Sequences in a step; 0: eight micro-batches per pipeline stage, or one without pipelining."""
    seq_len: int = 0
    """Tokens of a sequence; 0: the model's default."""
    sharding: str = "zero1"
    shard_ranks: int = 0
    """Ranks to shard over; 0: all ranks that hold the same part of the model."""
    sequence_parallel: bool | None = None
    """None: true if `tp` > 1."""
    recompute: str = "none"
    precision: str = "bf16"
    compression: Method = NONE
    """The constructor also accepts a name, such as `int8` or `powersgd:4`."""
    network: Network = None  # type: ignore[assignment]
    """The constructor also accepts the name of a preset; None: the usual network of the GPU."""
    policy: Policy | str | None = None
    """A Policy for all collectives, `auto` (the best for each), or None: without weft's controls."""
    software: str = SOFTWARE
    """The training framework and its year, which set how fast it computes and what it overlaps."""
    hide: frozenset[str] | None = None
    """Collectives (`tp`, `tp_backward`, `cp`, `ep`, `pp`, `grads`, `params`) that overlap with compute; None:
    those that the software overlaps."""

    def __post_init__(self) -> None:
        self._look_up()
        for field in ("gpus", "tp", "pp", "cp", "ep", "interleave", "micro_batch", "seq_len"):
            _whole(field, getattr(self, field))
        for field, choices in (
            ("sharding", SHARDINGS),
            ("recompute", RECOMPUTES),
            ("precision", PRECISIONS),
        ):
            check_choice(field, getattr(self, field), choices)
        self._derive_dp()
        self._check_split()
        self._derive_pipeline()
        self._derive_batch()
        self._check_experts()
        if self.sequence_parallel is None:
            self._set("sequence_parallel", self.tp > 1)
        if self.sequence_parallel and self.tp == 1:
            raise UsageError(
                "sequence_parallel needs tensor parallelism: set tp to 2 or more, or leave it off"
            )
        self._check_precision()
        check_compression(
            self.compression,
            sharding=self.sharding,
            data_ranks=self.dp * self.cp,
            stages=self.pp,
            gpu=self.gpu,
        )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _look_up(self) -> None:
        if isinstance(self.model, str):
            self._set("model", model(self.model))
        if isinstance(self.gpu, str):
            self._set("gpu", spec(self.gpu))
        if self.network is None:
            self._set("network", usual_network(self.gpu.name))
        elif isinstance(self.network, str):
            self._set("network", network(self.network))
        if not self.seq_len:
            self._set("seq_len", self.model.seq_len)
        if isinstance(self.policy, str):
            if self.policy not in (AUTO, "none"):
                raise UsageError(f"policy {self.policy!r} is not known; use auto, none or a Policy")
            if self.policy == "none":
                self._set("policy", None)
        if isinstance(self.compression, str):
            self._set("compression", parse(self.compression))
        if self.hide is not None:
            self._set("hide", frozenset(self.hide))

    def _derive_dp(self) -> None:
        rest = self.tp * self.pp * self.cp
        if self.gpus % rest:
            near = max(1, round(self.gpus / rest)) * rest
            raise UsageError(
                f"gpus {self.gpus} is not a multiple of tp {self.tp} x pp {self.pp} x cp {self.cp} = {rest}; "
                f"nearest is {near}"
            )
        if not self.dp:
            self._set("dp", self.gpus // rest)
        _whole("dp", self.dp)
        if self.dp * rest != self.gpus:
            raise UsageError(
                f"tp {self.tp} x pp {self.pp} x cp {self.cp} x dp {self.dp} = {rest * self.dp}, not gpus "
                f"{self.gpus}; with these, dp is {self.gpus // rest}"
            )

    def _check_split(self) -> None:
        m = self.model
        if m.heads % self.tp:
            raise UsageError(
                f"tp {self.tp} does not divide the {m.heads} heads of {m.name}; nearest is "
                f"{nearest_divisor(m.heads, self.tp)}"
            )
        if self.seq_len % self.cp:
            raise UsageError(
                f"cp {self.cp} does not divide seq_len {self.seq_len}; nearest is "
                f"{nearest_divisor(self.seq_len, self.cp)}"
            )
        replicas = self.dp * self.cp
        if not self.shard_ranks:
            self._set("shard_ranks", replicas)
        if replicas % self.shard_ranks:
            raise UsageError(
                f"shard_ranks {self.shard_ranks} does not divide dp x cp = {replicas}; nearest is "
                f"{nearest_divisor(replicas, self.shard_ranks)}"
            )

    def _derive_pipeline(self) -> None:
        v = self.interleave
        if not self.schedule:
            self._set("schedule", "interleaved" if v > 1 else "1f1b")
        check_choice("schedule", self.schedule, PIPELINE_SCHEDULES)
        if v > 1 and self.pp == 1:
            raise UsageError(f"interleave {v} needs pipeline stages: set pp to 2 or more, or interleave to 1")
        if v > 1 and self.schedule != "interleaved":
            raise UsageError(
                f"schedule {self.schedule} has one chunk for each stage, interleave is {v}; "
                "use schedule interleaved, or interleave 1"
            )
        if self.schedule == "interleaved" and v == 1 and self.pp > 1:
            raise UsageError("schedule interleaved needs interleave 2 or more, or use schedule 1f1b")
        if self.schedule == "dualpipe" and self.pp % 2:
            raise UsageError(
                f"schedule dualpipe needs an even number of stages, pp is {self.pp}; nearest is {self.pp + 1}"
            )
        if self.pp * v > self.model.layers and self.pp * v != self.model.layers + 2:
            shown = f"pp {self.pp}" + (f" x interleave {v}" if v > 1 else "")
            near = f"pp {max(1, self.model.layers // v)}" if v <= self.model.layers else "interleave 1"
            raise UsageError(
                f"{shown} is more than the {self.model.layers} layers of {self.model.name}; nearest is {near}"
            )

    def _derive_batch(self) -> None:
        unit = self.dp * self.micro_batch
        if not self.global_batch:
            self._set("global_batch", unit * (8 * self.pp if self.pp > 1 else 1))
        _whole("global_batch", self.global_batch)
        if self.global_batch % unit:
            near = max(1, round(self.global_batch / unit)) * unit
            raise UsageError(
                f"global_batch {self.global_batch} is not a multiple of dp {self.dp} x micro_batch "
                f"{self.micro_batch} = {unit}; nearest is {near}"
            )
        if self.schedule == "dualpipe" and self.micro_batches % 2:
            raise UsageError(
                f"schedule dualpipe needs an even number of micro-batches, not {self.micro_batches}; nearest "
                f"is global_batch {(self.micro_batches + 1) * unit}"
            )
        if self.schedule == "interleaved" and self.micro_batches % self.pp:
            near = max(1, round(self.micro_batches / self.pp)) * self.pp * unit
            raise UsageError(
                f"the interleaved schedule needs micro-batches in multiples of pp {self.pp}, not "
                f"{self.micro_batches}; nearest is global_batch {near}"
            )

    def _check_experts(self) -> None:
        m = self.model
        if not m.experts:
            if self.ep > 1 or self.expert_tp > 1:
                raise UsageError(f"ep {self.ep}: {m.name} has no experts; use ep 1")
            return
        if m.experts % self.ep:
            raise UsageError(
                f"ep {self.ep} does not divide the {m.experts} experts of {m.name}; nearest is "
                f"{nearest_divisor(m.experts, self.ep)}"
            )
        if not self.expert_tp:
            self._set("expert_tp", self.tp)
        room = self.tp * self.cp * self.dp
        if room % (self.ep * self.expert_tp):
            near = nearest_divisor(room // self.expert_tp if not room % self.expert_tp else room, self.ep)
            raise UsageError(
                f"ep {self.ep} x expert_tp {self.expert_tp} does not divide tp x cp x dp = {room}; "
                f"nearest is ep {near}"
            )

    def _check_precision(self) -> None:
        have = [kind for kind in PRECISIONS if _has(self.gpu, kind)]
        if self.precision not in have:
            raise UsageError(
                f"precision {self.precision}: {self.gpu.title} does not support it; nearest is {have[0]} "
                f"({', '.join(have)})"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one pipeline."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def gathers_layers(self) -> bool:
        """Whether weights are gathered layer by layer; with pipelining they are gathered once per step."""
        return self.sharding == "zero3" and self.pp == 1

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * max(1, self.expert_tp)))

    @property
    def tokens(self) -> int:
        """Tokens of a step over all GPUs."""
        return self.global_batch * self.seq_len

    def but(self, **changes: Any) -> TrainingJob:
        """This job with other values. Fields derived from changed ones are derived again unless given."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = set(changes)
        if "dp" not in moved and moved & {"gpus", "tp", "pp", "cp"}:
            kept["dp"] = 0
        if "schedule" not in moved and moved & {"interleave", "pp"}:
            kept["schedule"] = "" if self.schedule in ("1f1b", "interleaved") else self.schedule
        if "sequence_parallel" not in moved and "tp" in moved:
            kept["sequence_parallel"] = None
        if "shard_ranks" not in moved and (moved & {"gpus", "tp", "pp", "cp", "dp"}):
            kept["shard_ranks"] = 0 if self.shard_ranks == self.dp * self.cp else self.shard_ranks
        if "expert_tp" not in moved and moved & {"tp", "model"}:
            kept["expert_tp"] = 0
        if "seq_len" not in moved and "model" in moved:
            kept["seq_len"] = 0
        if "network" not in moved and "gpu" in moved:
            kept["network"] = None
        return replace(self, **{**kept, **changes})

    def __str__(self) -> str:
        split = [
            f"{name}{getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1
        ]
        return f"{self.model.name} on {self.gpus} {self.gpu.name} ({' '.join([*split, f'dp{self.dp}'])})"


def _has(gpu: GpuSpec, precision: str) -> bool:
    """Whether a GPU has a matmul rate for a training precision."""
    if precision in ("mxfp8", "nvfp4"):
        return bool(gpu.throughput.fp4_tflops) and (precision == "mxfp8" or gpu.vendor == "nvidia")
    return bool(getattr(gpu.throughput, f"{precision}_tflops"))


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} {value!r} is not valid; use an integer above 0")
