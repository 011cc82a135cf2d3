"""Workload: a pipeline of iterations, each with a compute operation and a collective that depends on it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.checks import check_choice, check_int, check_keys
from weft.errors import UsageError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The collectives of a Workload."""
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Bytes per element."""

COMPUTE_SHAPES: dict[str, tuple[str, ...]] = {
    "gemm": ("M", "N", "K"),
    "triton_gemm": ("M", "N", "K"),
    "tile_gemm": ("M", "N", "K"),
    "triton_mlp": ("tokens", "hidden", "inner"),
    "layer_norm": ("rows", "columns"),
    "softmax": ("rows", "columns"),
    "gelu": ("rows", "columns"),
    "attention": ("batch", "heads", "sequence", "head"),
    "conv": ("batch", "channels", "height", "width", "filters", "kernel"),
    "callable": (),
}
"""Names of the dimensions in `Compute.shape`, by kind."""
TRITON_KINDS = ("triton_gemm", "tile_gemm", "triton_mlp")
"""Kinds of compute that weft's Triton kernels run."""
GRID_KINDS = ("triton_gemm", "tile_gemm")
"""Kinds of compute with a configurable grid."""
READINGS = ("lab", "paper")
"""How a named workload runs: `lab` is weft's own kernels on one compute stream, `paper` the setting of
arXiv:2606.09200 (see `paper_reading`)."""

MAX_WORKLOAD_RANKS = 1024
MAX_ITERATIONS = 4096
MAX_COMPUTE_STREAMS = 16
MAX_WORKLOAD_BYTES = 1 << 40

_MAX_DIGITS = 40  # of a size: no real size has more, and float() might overflow
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}ib": 1 << (10 * i) for i, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", 1)}


_Shape = tuple[int, ...]
_Cost = Callable[[_Shape], tuple[float, float]]

MODES = ("overlap", "sequential", "compute", "comm")
"""`sequential`: compute waits for each collective. `compute`, `comm`: only one of the two runs. The policy's
controls apply only in `overlap`, except its CTAs, which apply in every mode."""

BASELINE_CTAS = 8
"""CTAs of a collective per rank if ranks share a GPU and the policy does not set them. NCCL's default there
(64) is an artifact of the shared GPU; on a Hopper node it uses about 8 to 12 per rank."""


def _gemm(s: _Shape) -> tuple[float, float]:
    return 2.0 * math.prod(s), s[0] * s[2] + s[2] * s[1] + s[0] * s[1]


def _rows(s: _Shape) -> tuple[float, float]:
    return 0.0, 2.0 * math.prod(s)


# Floating-point operations and elements moved by one call. Attention is causal: half of 4·B·H·S²·D.
_COSTS: dict[str, _Cost] = {
    "gemm": _gemm,
    "triton_gemm": _gemm,
    "tile_gemm": _gemm,
    "triton_mlp": lambda s: (4.0 * math.prod(s), 2 * s[0] * (s[1] + s[2]) + 2 * s[1] * s[2]),
    "attention": lambda s: (2.0 * s[0] * s[1] * s[2] ** 2 * s[3], 4 * math.prod(s)),
    "conv": lambda s: (
        2.0 * math.prod(s) * s[5],
        math.prod(s[:4]) + s[0] * s[2] * s[3] * s[4] + s[1] * s[4] * s[5] ** 2,
    ),
}


def parse_bytes(text: str | int) -> int:
    """Bytes from a size such as `896MiB`, `900 MB`, `1.5GiB` or `4096`."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if not match or len(match[1]) > _MAX_DIGITS or match[2].lower() not in _UNITS:
        raise UsageError(f"size {text!r} is not a size; write a number with kB/MB/GB or KiB/MiB/GiB")
    return round(float(match[1]) * _UNITS[match[2].lower()])


def parse_shape(text: str, names: tuple[str, ...] = ("M", "N", "K")) -> tuple[int, ...]:
    """Positive integers from a text such as `8192x8192x8192`; one per name."""
    parts = re.split(r"[x\u00d7,]", text.strip().lower())  # \u00d7: a pasted multiplication sign
    if len(parts) != len(names) or not all(re.fullmatch(r"[1-9]\d*", part.strip()) for part in parts):
        raise UsageError(f"{text!r} is not {'x'.join(names)}; write it like {'x'.join(['64'] * len(names))}")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The compute operation of one iteration."""

    kind: str = "gemm"
    """`gemm` uses the vendor's library; `triton_*` are weft's kernels, with a configurable tile and grid.
    `tile_gemm` is a textbook GEMM: vector units, one tile in shared memory, load, barrier, compute."""
    shape: tuple[int, ...] = (8192, 8192, 8192)
    """See COMPUTE_SHAPES; MxNxK for a GEMM."""
    dtype: str = "bf16"
    repeat: int = 1
    """Calls per iteration, in sequence."""
    tile: tuple[int, int, int] | None = None
    """Tile MxNxK of a Triton kernel; None for 64x64x64."""
    grid: tuple[int, int] | None = None
    """Blocks X (along N) x Y (along M) of a Triton GEMM; None for one per tile. Blocks of a smaller grid loop
    over tiles; surplus blocks of a larger grid exit immediately."""
    warps: int = 4
    stages: int = 3
    target: str = ""
    """For `callable`: `module:function` that returns the function to call in each iteration."""
    call: Callable[[], object] | None = None
    """For `callable` in this process: the function to call in each iteration."""

    def __post_init__(self) -> None:
        check_choice("compute kind", self.kind, tuple(COMPUTE_SHAPES))
        check_choice("dtype", self.dtype, tuple(DTYPE_BYTES))
        names = COMPUTE_SHAPES[self.kind]
        if self.kind == "callable":
            object.__setattr__(self, "shape", ())
            if not self.target and self.call is None:
                raise UsageError("compute callable: give target='module:function' or call=")
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != len(names):
            raise UsageError(f"{self.kind} needs {'x'.join(names)}, not {len(self.shape)} numbers")
        for name, value in zip(names, self.shape, strict=True):
            check_int(f"{self.kind} {name}", value, 1, 1 << 31, optional=False)
        check_int("repeat", self.repeat, 1, 4096, optional=False)
        _check_launch(self)

    @property
    def flops(self) -> float:
        """Floating-point operations of one iteration; 0 for operations limited by memory."""
        return self.repeat * _COSTS.get(self.kind, _rows)(self.shape)[0]

    @property
    def traffic_bytes(self) -> float:
        """Minimum bytes through device memory in one iteration."""
        return self.repeat * _COSTS.get(self.kind, _rows)(self.shape)[1] * DTYPE_BYTES[self.dtype]

    def tiles(self) -> tuple[int, int]:
        """Tiles X (along N) x Y (along M) of a Triton GEMM, its default grid."""
        tile = self.tile or (64, 64, 64)
        return -(-self.shape[1] // tile[1]), -(-self.shape[0] // tile[0])

    def __str__(self) -> str:
        if self.kind == "callable":
            return self.target or "callable"
        text = f"{self.kind} {'x'.join(map(str, self.shape))} {self.dtype}"
        text += f" tile {'x'.join(map(str, self.tile))}" if self.tile else ""
        text += f" grid {self.grid[0]}x{self.grid[1]}" if self.grid else ""
        return text + (f" x{self.repeat}" if self.repeat > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A pipeline of `iterations`, each with a compute operation and a collective that depends on it."""

    name: str = ""
    compute: Compute = field(default_factory=Compute)
    collective: str = "all_reduce"
    bytes: int = 8192 * 57344 * 2
    """The larger buffer of each rank: all-reduce, reduce-scatter and all-to-all input, all-gather output.
    Rounded up to whole elements and, except for all-reduce, to equal parts for every rank."""
    ranks: int = 2
    iterations: int = 8
    compute_streams: int = 1
    """Streams over which the compute of the iterations is distributed in turn."""

    def __post_init__(self) -> None:
        check_choice("collective", self.collective, COLLECTIVES)
        check_int("bytes", self.bytes, 1, MAX_WORKLOAD_BYTES, optional=False)
        check_int("ranks", self.ranks, 2, MAX_WORKLOAD_RANKS, optional=False)
        check_int("iterations", self.iterations, 1, MAX_ITERATIONS, optional=False)
        check_int("compute_streams", self.compute_streams, 1, MAX_COMPUTE_STREAMS, optional=False)

    @property
    def elements(self) -> int:
        """Elements of the larger buffer of a rank, rounded up as `bytes` says."""
        count = -(-self.bytes // DTYPE_BYTES[self.compute.dtype])
        part = 1 if self.collective == "all_reduce" else self.ranks
        return -(-count // part) * part

    @property
    def whole_bytes(self) -> int:
        """Bytes of the larger buffer of a rank, rounded up as `bytes` says; policy rules match this size."""
        return self.elements * DTYPE_BYTES[self.compute.dtype]

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank must send (nccl-tests' bus-bandwidth factor times the size)."""
        factor = 2.0 if self.collective == "all_reduce" else 1.0
        return factor * (self.ranks - 1) / self.ranks * self.whole_bytes

    def to_dict(self) -> dict[str, Any]:
        """The JSON document. Raises UsageError for a callable given by value."""
        if self.compute.call is not None:
            raise UsageError(
                f"workload {self.name or 'callable'}: a function has no JSON form; give it as module:function"
            )
        compute = {f.name: getattr(self.compute, f.name) for f in fields(Compute) if f.name != "call"}
        compute = {k: list(v) if isinstance(v, tuple) else v for k, v in compute.items()}
        return {**{f.name: getattr(self, f.name) for f in fields(Workload)}, "compute": compute}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Workload:
        """A workload from its JSON document. Raises UsageError for unknown keys."""
        values = dict(document)
        compute = dict(values.pop("compute", {}))
        for known, given, where in ((cls, values, "workload"), (Compute, compute, "compute")):
            names = [f.name for f in fields(known) if f.name not in ("call", "compute")]
            check_keys(where, given, names)
        for key in ("shape", "tile", "grid"):
            if compute.get(key) is not None:
                compute[key] = tuple(compute[key])
        return cls(compute=Compute(**compute), **values)

    def but(self, **changes: Any) -> Workload:
        """A copy with some fields replaced; fields of `compute` can be given directly."""
        inner = {f.name for f in fields(Compute)}
        compute = replace(self.compute, **{k: v for k, v in changes.items() if k in inner})
        return replace(self, compute=compute, **{k: v for k, v in changes.items() if k not in inner})

    @property
    def described(self) -> str:
        """All settings in one line, even if it has a name."""
        streams = f", {self.compute_streams} compute streams" if self.compute_streams > 1 else ""
        return (
            f"{self.compute}, {self.collective} of {self.bytes / 1e6:.0f} MB over {self.ranks} ranks, "
            f"{self.iterations} iterations{streams}"
        )

    def __str__(self) -> str:
        return self.name or f"{self.compute} + {self.collective} {self.bytes / 1e6:.0f} MB x{self.ranks}"


# arXiv:2606.09200: two GEMMs, 896 MB (= 8192·57344·2 B), four GPUs.
_PAPER_GEMMS = {"cb": (8192, 8192, 8192), "mb": (8192, 57344, 8192)}
_PAPER_COLLECTIVES = {"ar": "all_reduce", "a2a": "all_to_all"}
_PAPER_TILES = {"opt1": (64, 64, 32), "opt2": (64, 64, 64)}
PAPER_WARPS = 8
"""Warps of a block in the paper's GEMM (assumed)."""


def named_workloads() -> dict[str, Workload]:
    """The named workloads; names without `opt1` or `opt2` have the tile of `opt2`."""
    found = {}
    for gemm, shape in _PAPER_GEMMS.items():
        for short, collective in _PAPER_COLLECTIVES.items():
            for option, tile in {"": _PAPER_TILES["opt2"], **_PAPER_TILES}.items():
                name = "-".join(part for part in (gemm, short, option) if part)
                compute = Compute(kind="triton_gemm", shape=shape, tile=tile)
                found[name] = Workload(name=name, compute=compute, collective=collective, ranks=4)
    return found


def named(name: str) -> Workload:
    """The workload with this name. Raises UsageError for an unknown name."""
    known = named_workloads()
    if name not in known:
        raise UsageError(
            f"workload {name!r} is not known; use one of {', '.join(known)}, or give a shape with --gemm"
        )
    return known[name]


def paper_reading(workload: Workload) -> Workload:
    """A named workload as arXiv:2606.09200 ran it, as far as the paper and its Fig. 2 describe it.

    The GEMM is unpipelined (one tile in shared memory), ten iterations take four compute streams in turn
    (ratios under 0.5 cannot come from one), and each rank has a GPU of its own. The paper drops the first
    third of its runs as warm-up.
    """
    return workload.but(kind="tile_gemm", warps=PAPER_WARPS, stages=1, iterations=10, compute_streams=4)


def specify(
    name: str = "",
    *,
    gemm: str = "",
    dtype: str = "",
    tile: str = "",
    grid: str = "",
    collective: str = "",
    size: str = "",
    ranks: int = 0,
    iterations: int = 0,
    streams: int = 0,
    reading: str = "lab",
) -> Workload:
    """A named workload, or one built from its parts; given parts override those of the named workload.

    Shapes are texts such as `8192x8192x8192`, `size` such as `896MiB`; empty and 0 mean "not given".
    `reading`: one of READINGS, for named workloads.
    """
    check_choice("reading", reading, READINGS)
    if reading == "paper" and not name:
        raise UsageError("--reading paper is for the paper's workloads; give a name such as cb-ar")
    if not name and not gemm:
        raise UsageError("no workload: give a name such as cb-ar, or describe it: --gemm 8192x8192x8192 …")
    if name and gemm:
        raise UsageError(f"both the workload {name!r} and --gemm are given; use one of them")
    compute: dict[str, Any] = {}
    if dtype:
        compute["dtype"] = dtype
    if tile:
        compute["tile"] = parse_shape(tile)
    if grid:
        compute["grid"] = parse_shape(grid, ("X", "Y"))
    if name:
        workload = named(name)
        workload = (paper_reading(workload) if reading == "paper" else workload).but(**compute)
    else:
        kind = "triton_gemm" if tile or grid else "gemm"
        workload = Workload(compute=Compute(kind=kind, shape=parse_shape(gemm), **compute))
    changes = {
        "collective": collective,
        "ranks": ranks,
        "iterations": iterations,
        "compute_streams": streams,
    }
    given = {key: value for key, value in changes.items() if value}
    if size:
        given["bytes"] = parse_bytes(size)  # "0" is rejected, not treated as the default
    return workload.but(**given)


def _check_launch(compute: Compute) -> None:
    """Check tile, grid, warps and stages against what Triton accepts."""
    if compute.kind not in TRITON_KINDS:
        if compute.tile or compute.grid:
            raise UsageError(f"tile and grid are for {', '.join(TRITON_KINDS)}, not for {compute.kind}")
        return
    if compute.dtype not in ("bf16", "fp16"):
        raise UsageError(f"{compute.kind} computes in bf16 or fp16, not {compute.dtype}; use gemm for that")
    if compute.grid is not None:
        if compute.kind not in GRID_KINDS or len(compute.grid) != 2:
            raise UsageError(f"grid {compute.grid!r} is not valid; a triton_gemm takes XxY blocks")
        object.__setattr__(compute, "grid", tuple(compute.grid))
        for value, most in zip(compute.grid, (2**31 - 1, 65535), strict=True):
            check_int("grid", value, 1, most, optional=False)
    tile = compute.tile or (64, 64, 64)
    object.__setattr__(compute, "tile", tuple(tile))
    if len(tile) != 3 or any(not isinstance(t, int) or t < 16 or t > 512 or t & (t - 1) for t in tile):
        raise UsageError(f"tile {tile!r} is not valid; use powers of two from 16 to 512, such as 64x64x64")
    if compute.warps not in (1, 2, 4, 8, 16, 32):
        raise UsageError(f"warps {compute.warps!r} is not valid; use 1, 2, 4, 8, 16 or 32")
    if compute.kind == "tile_gemm":
        object.__setattr__(compute, "stages", 1)
    check_int("stages", compute.stages, 1, 8, optional=False)
    shared = compute.stages * (tile[0] + tile[1]) * tile[2] * DTYPE_BYTES[compute.dtype]
    if shared > 227 << 10:
        raise UsageError(
            f"tile {'x'.join(map(str, tile))} with {compute.stages} stages needs {shared >> 10} KiB of "
            "shared memory; a block can have at most 227 KiB: use fewer stages or a smaller tile"
        )


def collective_ctas(workload: Workload, ctas: int) -> int:
    """CTAs of each rank's kernel; point-to-point collectives round them up to a power of two."""
    return 1 << (ctas - 1).bit_length() if workload.collective == "all_to_all" else ctas


def check_resident(workload: Workload, ctas: int, sm_count: int) -> None:
    """Raise UsageError if the CTAs of a collective do not all fit on the GPU shared by its ranks."""
    needed = workload.ranks * collective_ctas(workload, ctas)
    if needed > sm_count:
        raise UsageError(
            f"{workload}: {workload.ranks} ranks of {needed // workload.ranks} CTAs need {needed} SMs at "
            f"once, this GPU has {sm_count}, and the collective would hang: set comm.max_ctas to "
            f"{max(1, sm_count // workload.ranks // 2)} or less"
        )
