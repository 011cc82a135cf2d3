"""NCCL's collective kernel: CTAs by message size, launch shape, and the memory traffic of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CTA_BYTES = 512 * 64
"""Bytes of a message per CTA of a ring or tree: NCCL launches fewer CTAs if the message is smaller. It is the
number of threads times the bytes per thread (src/enqueue.cc, NCCL_SIMPLE_THREAD_THRESHOLD)."""


@dataclass(frozen=True)
class CommKernel:
    """Shape of the kernel that runs a collective."""

    registers: int
    """Registers per thread."""
    shared_bytes: int
    """Shared memory per CTA, static and dynamic."""
    cluster: int
    """CTAs per cluster if the grid is divisible by it; 1: no clusters."""
    threads: Mapping[str, int] = field(default_factory=dict)
    """Threads per CTA by algorithm; `ring` applies to algorithms that are absent."""
    basis: str = "assumed"
    source: str = ""

    def threads_of(self, algorithm: str) -> int:
        """Threads per CTA."""
        return self.threads.get(algorithm, self.threads["ring"])

    def cluster_of(self, ctas: int) -> int:
        """CTAs per cluster; 1 if they do not divide the grid: NCCL then uses no clusters (src/enqueue.cc)."""
        return 1 if ctas % self.cluster else self.cluster


def nccl_ctas(algorithm: str, nbytes: int, most: int) -> int:
    """CTAs that NCCL launches: fewer for small messages, unless the switch reduces."""
    if algorithm in ("nvls", "nvlstree"):
        return most
    return max(1, min(most, nbytes // CTA_BYTES))


def memory_traffic(kind: str, nbytes: int, ranks: int, algorithm: str) -> tuple[int, int]:
    """Bytes read from and written to one rank's memory, including the writes of peers.

    NCCL moves data through a buffer in the receiver's memory: a peer writes to it, and the receiver's kernel
    reads it and writes the result. This assumes that user buffers are not registered.
    """
    passed = nbytes * (ranks - 1) / ranks
    own = nbytes / ranks
    if kind == "all_reduce":
        if algorithm in ("nvls", "nvlstree"):  # in and out of a multicast buffer that the switch reads
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
