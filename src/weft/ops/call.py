"""Call: the arguments of a fused operation, except its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Call(NamedTuple):
    """Everything about a call except its tensors. Counts are rows of the flattened x. None: left open."""

    operation: str
    rows: tuple[int, ...] | None = None
    """Rows of each rank's part; for an all-to-all, rows that come from each rank."""
    sent: tuple[int, ...] | None = None
    """All-to-all only: rows that go to each rank."""
    schedule: str | None = None
    engine: str | None = None
    pieces: int | None = None
    out_dtype: str | None = None
    """Dtype of the result if x is fp8."""
    fast_accum: bool = False
    return_gathered: bool = False
    dim: int = 0
    """The dimension of the caller's x to gather or scatter; all ranks must use the same one."""

    @property
    def scatters(self) -> bool:
        return self.operation == "matmul_reduce_scatter"

    def encode(self) -> str:
        """The call as a string, which torch.compile can trace; without the counts, which may be symbolic."""
        pieces = "" if self.pieces is None else str(self.pieces)
        options = (self.schedule or "", self.engine or "", pieces, self.out_dtype or "")
        flags = f"{int(self.fast_accum)} {int(self.return_gathered)} {self.dim}"
        return f"{self.operation} {flags} {','.join(options)}"

    @classmethod
    def decode(cls, text: str, rows: Sequence[int] | None, sent: Sequence[int] | None) -> Call:
        operation, fast_accum, gathered, dim, options = text.split(" ")
        schedule, engine, pieces, out_dtype = options.split(",")
        return cls(
            operation,
            None if rows is None else tuple(rows),
            None if sent is None else tuple(sent),
            schedule or None,
            engine or None,
            int(pieces) if pieces else None,
            out_dtype or None,
            fast_accum == "1",
            gathered == "1",
            int(dim),
        )

    def backward(self, operation: str, rows: tuple[int, ...] | None) -> Call:
        """The call that computes a gradient: another operation with the same schedule, engine and pieces."""
        return Call(operation, rows, None, self.schedule, self.engine, self.pieces)


def out_rows(call: Call, shape: Sequence[int], rank: int, ranks: int) -> int:
    """The first dimension of the result, for an x of this shape."""
    first, inner = shape[0], prod(shape[1:-1])
    if call.rows is not None:
        return (call.rows[rank] if call.scatters else sum(call.rows)) // inner
    if call.operation == "all_gather_matmul":
        return first * ranks
    mine = (first + ranks - 1 - rank) // ranks  # as in `split`, but also for symbolic sizes
    return mine if call.scatters else mine * ranks
