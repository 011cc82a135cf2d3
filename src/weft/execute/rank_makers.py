"""The communicators of the lab: NCCL ranks that share the GPU, or one rank of a node profile."""

from __future__ import annotations

from typing import Any

from weft.errors import WeftError


class NcclMaker:
    """Creates communicators of NCCL ranks that share this GPU; loads NCCL on first use."""

    def __init__(self) -> None:
        self._library: Any = None

    def __call__(self, size: int, ctas: int | None) -> Any:
        from weft.comm import nccl

        if self._library is None:
            self._library = nccl.load_nccl()
        return nccl.NcclRanks(self._library, size, ctas)

    def info(self) -> dict[str, Any]:
        """The version of NCCL, or why there is none."""
        from weft.comm import nccl

        try:
            self._library = self._library or nccl.load_nccl()
        except WeftError as error:
            return {"nccl": str(error)}
        return {"nccl": self._library.version_text}


class PacedMaker:
    """Creates communicators with one rank of a node on this GPU and ghosts with its data; needs no NCCL."""

    mirrored = True
    """Every rank has the data of this one."""

    def __init__(self, node: str) -> None:
        from weft.comm.node import load_node

        self._node = load_node(node)
        self._library: Any = None

    def __call__(self, size: int, ctas: int | None) -> Any:
        from weft.comm import nccl, paced

        if self._library is None:
            self._library = paced.load_paced(self._node)
        return nccl.NcclRanks(self._library, size, ctas, own=0)

    def ranks_here(self, size: int) -> int:
        """Number of a communicator's ranks on this GPU."""
        return 1

    def copies(self, kind: str, size: int) -> bool:
        """Whether the node's copy engines, here a delay, can serve a collective of `size` ranks."""
        return self._node.copies(kind, size)

    def info(self) -> dict[str, Any]:
        """The node, and the basis of its figures."""
        return {
            "nccl": "none: collectives are paced",
            "ranks": f"rank 0 of {self._node.name}",
            "node": self._node.name,
            "node_basis": self._node.basis,
        }
