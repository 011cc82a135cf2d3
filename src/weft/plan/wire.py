"""What a compression does to the bytes of data parallelism: pure data. The methods are in `compression`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How gradients and gathered parameters travel."""

    name: str = "none"
    grad_bytes: float | None = None
    """Bytes on the wire for each gradient element; None: as the job's precision has it."""
    gather_bytes: float | None = None
    """Bytes on the wire for each gathered parameter; None: as the job's precision has it."""
    reduction: str = "ring"
    """`ring` reduces on the way; `gather` sends every rank's part to all (sparse formats: grows with ranks);
    `all_to_all` sends each part once and reduces at its end (quantised formats)."""
    traffic_bytes: float = 0.0
    """Extra memory traffic of encoding and decoding, for each gradient element of a rank."""
    flops: float = 0.0
    """Extra matrix FLOPs, for each gradient element of a rank (low-rank methods)."""
    launches: int = 0
    """Extra kernels for each bucket."""


NONE = Wire()
