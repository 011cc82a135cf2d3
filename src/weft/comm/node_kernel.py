"""The kernel of NCCL's collectives: its CTAs for a size, its shape, and the memory traffic of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CTA_BYTES = 512 * 64
"""Bytes below which NCCL drops a CTA of a ring or a tree: threads times bytes of a thread (src/enqueue.cc,
NCCL_SIMPLE_THREAD_THRESHOLD)."""


@dataclass(frozen=True)
class CommKernel:
    """Shape of the kernel that runs a collective."""

    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a CTA, static and dynamic."""
    cluster: int
    """CTAs of a cluster where the grid is divisible by it; 1: no clusters."""
    threads: Mapping[str, int] = field(default_factory=dict)
    """By algorithm, with `ring` for those that are absent."""
    basis: str = "assumed"
    source: str = ""

    def threads_of(self, algorithm: str) -> int:
        """Threads of a CTA."""
        return self.threads.get(algorithm, self.threads["ring"])

    def cluster_of(self, ctas: int) -> int:
        """CTAs of a cluster; NCCL launches none where they do not divide the grid (src/enqueue.cc)."""
        return 1 if ctas % self.cluster else self.cluster


def nccl_ctas(algorithm: str, nbytes: int, most: int) -> int:
    """CTAs that NCCL launches: fewer for small messages, except where the switch reduces."""
    if algorithm in ("nvls", "nvlstree"):
        return most
    return max(1, min(most, nbytes // CTA_BYTES))


def memory_traffic(kind: str, nbytes: int, ranks: int, algorithm: str) -> tuple[int, int]:
    """Bytes read from and written to one rank's memory, those that peers write there included.

    NCCL moves data through buffers in the receiver's memory: a peer writes there, the kernel reads it, and
    writes the result. User buffers are not registered.
    """
    passed = nbytes * (ranks - 1) / ranks
    own = nbytes / ranks
    if kind == "all_reduce":
        if algorithm in ("nvls", "nvlstree"):  # in and out of a multicast buffer, which the switch reads
            return 3 * nbytes, 3 * nbytes
        if algorithm == "tree":
            return 3 * nbytes, 3 * nbytes
        return round(nbytes + 2 * passed), round(nbytes + 2 * passed)
    table = {
        "all_gather": (own + passed, nbytes + passed),
        "reduce_scatter": (nbytes + passed, passed + own),
        "all_to_all": (nbytes + passed, nbytes + passed),
        "broadcast": (nbytes, 2 * nbytes),
        "reduce": (2 * nbytes, nbytes),
        "send_recv": (2 * nbytes, 2 * nbytes),
    }
    read, write = table[kind]
    return round(read), round(write)
