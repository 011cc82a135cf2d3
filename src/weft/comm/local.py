"""Collectives of R ranks in one process, computed by torch: the test reference, and ghost ranks on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LocalRanks:
    """The interface of `weft.comm.nccl.NcclRanks` for tensors on any device. Streams are ignored."""

    def __init__(self, size: int, max_ctas: int | None = None) -> None:
        self.size, self.max_ctas = size, max_ctas

    def all_reduce(self, send: Any, recv: Any, streams: Any = None, op: str = "sum") -> None:
        """Reduce all inputs into every output; `send` and `recv` have one tensor per rank."""
        total = _reduce(send, op)
        for out in recv:
            out.copy_(total)

    def all_gather(self, send: Any, recv: Any, streams: Any = None) -> None:
        """Concatenate all inputs into every output."""
        import torch

        whole = torch.cat([part.reshape(-1) for part in send])
        for out in recv:
            out.view(-1).copy_(whole)

    def reduce_scatter(self, send: Any, recv: Any, streams: Any = None, op: str = "sum") -> None:
        """Reduce all inputs; each rank receives its equal part."""
        for out, part in zip(recv, _reduce(send, op).reshape(-1).chunk(self.size), strict=True):
            out.view(-1).copy_(part)

    def broadcast(self, send: Any, recv: Any, streams: Any = None, root: int = 0) -> None:
        """Copy the input of `root` into every output."""
        source = send[root].clone()
        for out in recv:
            out.copy_(source)

    def all_to_all(self, send: Any, recv: Any, streams: Any = None) -> None:
        """Exchange equal parts: part j of rank i's `send` becomes part i of rank j's `recv`."""
        part = send[0].numel() // self.size
        self.exchange(
            [
                (i, send[i][j * part : (j + 1) * part], j, recv[j][i * part : (i + 1) * part])
                for i in range(self.size)
                for j in range(self.size)
            ]
        )

    def exchange(self, moves: Sequence[tuple[int, Any, int, Any]], streams: Any = None) -> None:
        """Point-to-point transfers: (from rank, tensor, to rank, tensor of the same size)."""
        kept = [given.clone() for _, given, _, _ in moves]
        for (_, _, _, taken), value in zip(moves, kept, strict=True):
            taken.copy_(value)

    def close(self, *, abort: bool = False) -> None:
        """Nothing to free."""


def _reduce(send: Any, op: str) -> Any:
    import torch

    stack = torch.stack([part.clone() for part in send])
    if op == "avg":
        return stack.sum(0) / len(send)
    if op == "product":
        return stack.prod(0)
    return {"sum": stack.sum, "max": stack.amax, "min": stack.amin}[op](0).to(send[0].dtype)
