"""Compression of gradients and weights: the collectives that replace a collective, and their cost on the GPU.

One pure function, `apply_compression`, turns a collective into the collectives that replace it, the kernels
that compress and restore, and the kernels' time. Accuracy is not modelled: nothing here says whether a run
converges.

Sources of the byte counts
  bf16, fp8  the same collective on narrower elements; fp8 with one scale per tensor, summed by NCCL (since
             2.24, from Hopper on), as FP8-LM (arXiv:2310.18313) does
  int8       sums of int8 overflow, so a reduction becomes all-to-alls of quantised pieces (within the node,
             then across), sums in full precision, and an all-gather of the quantised result (blocks of 256)
  powersgd   arXiv:1905.13727, Algorithm 1: all-reduces of r n and r m numbers for an n x m matrix, with error
             feedback
  topk       values and 32-bit indices of every rank go to every rank: an all-gather that grows with the ranks
  zero++     arXiv:2306.10209: qwz gathers int8 weights, hpz gathers within the node in the backward pass, qgz
             reduces int4 gradients in two all-to-alls, within the node and then across
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.checks import use_one_of
from weft.errors import UsageError
from weft.gpu.specs import GpuSpec

METHODS = ("none", "bf16", "fp8", "int8", "powersgd", "topk", "qwz", "hpz", "qgz", "zero++")
PARTS = ("qwz", "hpz", "qgz")
"""The parts of ZeRO++; `zero++` uses all three."""

STREAM_SHARE = 0.73
"""Fraction of peak memory bandwidth of an elementwise kernel: 4.73 / 1.35 of 4.8 TB/s, fitted on an H200."""
LAUNCH_S = 5e-6
"""Time of a small kernel from launch to end if nothing hides it. Assumed."""
SCALE_BYTES = 4
INT8_BLOCK = 256
"""Elements that share a scale in int8 and int4 blocks."""
INDEX_BYTES = 4
SECTOR_BYTES = 32
"""Bytes of memory traffic for one scattered element."""
SELECT_PASSES = 4
"""Passes over all elements of a radix selection of the k largest 32-bit keys, 8 bits at a time."""


@dataclass(frozen=True)
class Method:
    """How gradients or weights are compressed."""

    name: str = "none"
    rank: int = 4
    """PowerSGD: columns of the two factors."""
    density: float = 0.01
    """Top-k: fraction of the elements that is sent."""
    parts: tuple[str, ...] = ()
    """ZeRO++: those of qwz, hpz and qgz that are used."""

    def __str__(self) -> str:
        if self.name == "powersgd":
            return f"powersgd:{self.rank}"
        if self.name == "topk":
            return f"topk:{self.density:g}"
        return "+".join(self.parts) if self.name == "zero++" and self.parts != PARTS else self.name


NONE = Method()


@dataclass(frozen=True)
class Matrix:
    """Gradient matrices of one shape on one rank."""

    rows: int
    columns: int
    count: float = 1


@dataclass(frozen=True)
class Traffic:
    """One collective on gradients or weights, before compression."""

    kind: str
    """`all_reduce`, `reduce_scatter` or `all_gather`."""
    purpose: str
    """`gradient`, `weight`, or `weight-backward` for the second gather of a fully sharded layer."""
    elements: float
    """Elements of the whole buffer: the input of a reduction, or the result of a gather."""
    element_bytes: float
    ranks: int
    ranks_per_node: int = 1
    """Ranks of the group that share a node (an NVLink domain)."""
    matrices: tuple[Matrix, ...] = ()
    """Shapes of the matrices, for PowerSGD; elements outside of them are sent uncompressed."""

    @property
    def bytes(self) -> float:
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Piece:
    """One collective after compression. `bytes` as in nccl-tests: the whole buffer, not a rank's share."""

    kind: str
    bytes: float
    ranks: int
    ranks_per_node: int


@dataclass(frozen=True)
class CompressionKernel:
    """Work on the SMs that compression adds."""

    name: str
    bytes: float
    """Device memory traffic in bytes."""
    flops: float = 0.0
    launches: float = 1.0
    """Launches whose latency is exposed: they run one after the other and are too small to fill the GPU."""

    def seconds(self, gpu: GpuSpec) -> float:
        """Duration on an otherwise idle GPU: the longer of memory and arithmetic, plus the launches."""
        rate = gpu.flops("fp32") * 0.5
        return max(self.bytes / (STREAM_SHARE * gpu.memory_bytes_per_s), self.flops / rate) + (
            self.launches * LAUNCH_S
        )


@dataclass(frozen=True)
class Compressed:
    """The replacement of one collective."""

    pieces: tuple[Piece, ...]
    kernels: tuple[CompressionKernel, ...] = ()
    compute_s: float = 0.0
    """Seconds of the kernels. They need the SMs and the memory bandwidth that compute uses, so nothing hides
    them: they count fully as compute."""


def parse(words: str) -> Method:
    """A method from the command line: `none`, `fp8`, `powersgd:4`, `topk:0.01`, `qwz+qgz`, `zero++`, …"""
    text = words.strip().lower()
    head, _, value = text.partition(":")
    pieces = head.split("+") if head != "zero++" else ["zero++"]
    if all(piece in PARTS for piece in pieces) and not value:
        chosen = tuple(part for part in PARTS if part in pieces)
        return Method("zero++", parts=chosen)
    if head == "zero++" and not value:
        return Method("zero++", parts=PARTS)
    if head == "powersgd":
        return Method("powersgd", rank=int(_number(value or "4", "powersgd rank", 1, 1024, whole=True)))
    if head == "topk":
        return Method("topk", density=_number(value or "0.01", "topk density", 1e-6, 1.0, whole=False))
    if head in METHODS and not value:
        return Method(head)
    raise UsageError(
        f"no compression named {words!r}; {use_one_of(head, METHODS)}; "
        "or powersgd:RANK, topk:DENSITY, qwz+hpz+qgz"
    )


def _number(value: str, name: str, low: float, high: float, *, whole: bool) -> float:
    try:
        found = int(value) if whole else float(value)
    except ValueError:
        found = math.nan
    if not low <= found <= high:
        raise UsageError(f"{name} {value!r} is not valid; use a number from {low:g} to {high:g}")
    return found


def check_compression(method: Method, *, sharding: str, data_ranks: int, stages: int, gpu: GpuSpec) -> None:
    """Reject a method that no software implements for such a job, or that has nothing to compress."""
    if method == NONE:
        return
    if data_ranks < 2:
        raise UsageError(
            f"--compression {method}: one data-parallel rank has no gradients to exchange; "
            "use more GPUs, or --compression none"
        )
    if method.name in ("powersgd", "topk") and sharding != "none":
        raise UsageError(
            f"--compression {method} needs whole gradients on every rank, and --sharding {sharding} reduces "
            "them to shards; use --sharding none, or --compression int8"
        )
    if method.name == "zero++" and sharding != "zero3":
        raise UsageError(
            f"--compression {method} compresses the gathers of fully sharded weights; use --sharding zero3, "
            f"or --compression int8 with --sharding {sharding}"
        )
    if method.name == "zero++" and stages > 1:
        raise UsageError(
            f"--compression {method}: with pipeline stages the weights are not gathered layer by layer; "
            "use --pp 1, or --compression int8"
        )
    if method.name == "fp8" and gpu.throughput.fp8_tflops is None:
        raise UsageError(f"--compression fp8: {gpu.title} has no fp8; use int8 or bf16")


def apply_compression(method: Method, traffic: Traffic, gpu: GpuSpec) -> Compressed:
    """The replacement of a collective under a method; the collective itself if the method does not apply."""
    plain = Compressed((_piece(traffic, traffic.kind, traffic.bytes),))
    if traffic.ranks < 2 or traffic.elements <= 0:
        return plain
    gradient = traffic.purpose == "gradient"
    if method.name in ("bf16", "fp8") and gradient:
        found = _narrow(traffic, 2.0 if method.name == "bf16" else 1.0, scaled=method.name == "fp8")
    elif method.name == "int8" and gradient:
        found = _quantised(traffic)
    elif method.name == "powersgd" and gradient:
        found = _low_rank(traffic, method.rank)
    elif method.name == "topk" and gradient:
        found = _sparse(traffic, method.density)
    elif method.name == "zero++":
        found = _zeropp(traffic, method.parts)
    else:
        found = None
    if found is None:
        return plain
    return replace(found, compute_s=sum(kernel.seconds(gpu) for kernel in found.kernels))


def kept_bytes(method: Method, elements: float, element_bytes: float, *, node: int, nodes: int) -> float:
    """Bytes that a method keeps on a rank: the error to feed back, or its shard of the node's copy of the
    weights."""
    if method.name in ("powersgd", "topk"):
        return elements * element_bytes
    return elements * 2.0 / node if "hpz" in method.parts and node > 1 and nodes > 1 else 0.0


def _piece(traffic: Traffic, kind: str, size: float) -> Piece:
    return Piece(kind, size, traffic.ranks, traffic.ranks_per_node)


def _narrow(traffic: Traffic, width: float, *, scaled: bool) -> Compressed | None:
    """The same collective on narrower elements."""
    if width >= traffic.element_bytes:
        return None
    wide = traffic.element_bytes
    back = traffic.elements * _kept(traffic)
    passes = wide if scaled else 0.0  # finding the largest magnitude takes a separate pass
    kernels = (
        CompressionKernel("narrow", traffic.elements * (wide + width + passes)),
        CompressionKernel("widen", back * (wide + width)),
    )
    return Compressed((_piece(traffic, traffic.kind, traffic.elements * width),), kernels)


def _kept(traffic: Traffic) -> float:
    """Fraction of the buffer that a rank holds after a reduction."""
    return 1.0 / traffic.ranks if traffic.kind == "reduce_scatter" else 1.0


def _quantised(traffic: Traffic) -> Compressed | None:
    """Int8 gradients: all-to-alls instead of the reduction, then a gather if all ranks need the sum."""
    width = 1 + SCALE_BYTES / INT8_BLOCK
    if width >= traffic.element_bytes:
        return None
    n, wide = traffic.elements, traffic.element_bytes
    found = _two_hops(traffic, width)
    if traffic.kind != "all_reduce":
        return found
    back = (
        CompressionKernel("quantise the sum", n / traffic.ranks * (wide + width)),
        CompressionKernel("restore", n * (wide + width)),
    )
    gather = _piece(traffic, "all_gather", n * width)
    return Compressed((*found.pieces, gather), (*found.kernels, *back))


def _low_rank(traffic: Traffic, rank: int) -> Compressed | None:
    """PowerSGD: two small all-reduces for the matrices and one for all other gradients."""
    if traffic.kind != "all_reduce":
        return None
    wide = traffic.element_bytes
    fit = [m for m in traffic.matrices if rank * (m.rows + m.columns) < m.rows * m.columns]
    covered = sum(m.rows * m.columns * m.count for m in fit)
    if covered <= 0:
        return None
    left = sum(m.rows * m.count for m in fit) * rank
    right = sum(m.columns * m.count for m in fit) * rank
    rest = max(traffic.elements - covered, 0.0)
    pieces = [_piece(traffic, "all_reduce", left * wide), _piece(traffic, "all_reduce", right * wide)]
    pieces += [_piece(traffic, "all_reduce", rest * wide)] if rest else []
    # Passes over a matrix: add the error (read two, write one), M Q (read), M^T P (read), P Q^T (write), keep
    # the new error (read two, write one).
    kernels = (
        CompressionKernel("error feedback", 6 * covered * wide, 2 * covered, launches=2 * len(fit)),
        CompressionKernel("factors", 3 * covered * wide, 6 * covered * rank, launches=3 * len(fit)),
        # Gram-Schmidt goes column by column with four launches each; equal shapes form one batch.
        CompressionKernel(
            "orthogonalise", 2 * left * wide * rank, 2 * left * rank, launches=4 * rank * len(fit)
        ),
    )
    return Compressed(tuple(pieces), kernels)


def _sparse(traffic: Traffic, density: float) -> Compressed | None:
    """Top-k: nothing is reduced on the way, so each rank gets all ranks' values and adds them up itself."""
    if traffic.kind != "all_reduce":
        return None
    n, wide = traffic.elements, traffic.element_bytes
    sent = density * n * (wide + INDEX_BYTES)
    kernels = (
        CompressionKernel("error feedback", 3 * n * wide, n),
        CompressionKernel("select", SELECT_PASSES * n * wide + 2 * sent),
        CompressionKernel("add up", n * wide + traffic.ranks * (sent + 2 * SECTOR_BYTES * density * n)),
    )
    return Compressed((_piece(traffic, "all_gather", traffic.ranks * sent),), kernels)


def _zeropp(traffic: Traffic, parts: Sequence[str]) -> Compressed | None:
    n, wide, node = traffic.elements, traffic.element_bytes, max(1, traffic.ranks_per_node)
    nodes = max(1, traffic.ranks // node)
    if traffic.purpose == "weight-backward" and "hpz" in parts and nodes > 1 and node > 1:
        return Compressed((Piece("all_gather", n * wide, node, node),))
    if traffic.purpose.startswith("weight") and "qwz" in parts:
        width = 1 + SCALE_BYTES / INT8_BLOCK
        shard = n / traffic.ranks
        kernels = (
            CompressionKernel("quantise", shard * (wide + width)),
            CompressionKernel("restore", n * (wide + width)),
        )
        return Compressed((_piece(traffic, "all_gather", n * width),), kernels) if width < wide else None
    if traffic.purpose == "gradient" and "qgz" in parts and traffic.kind == "reduce_scatter":
        return _two_hops(traffic, 0.5 + SCALE_BYTES / INT8_BLOCK)
    return None


def _two_hops(traffic: Traffic, width: float) -> Compressed:
    """A sum of quantised elements: an all-to-all and a sum within the node, then the same across nodes.

    A single all-to-all over all ranks would send each node's share between nodes once per rank of a node.
    """
    n, wide, node = traffic.elements, traffic.element_bytes, max(1, traffic.ranks_per_node)
    nodes = max(1, traffic.ranks // node)
    pieces, kernels = [], [CompressionKernel("quantise", n * (wide + width))]
    if node > 1:
        pieces.append(Piece("all_to_all", n * width, node, node))
    if node > 1 and nodes > 1:
        kernels.append(CompressionKernel("sum and quantise", n * width + n / node * width))
    if nodes > 1:
        pieces.append(Piece("all_to_all", n / node * width, nodes, 1))
    last = n / node if nodes > 1 else n
    kernels.append(CompressionKernel("sum", last * width + n / traffic.ranks * wide))
    return Compressed(tuple(pieces), tuple(kernels))
