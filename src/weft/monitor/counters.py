"""The counters of one process of a job, read repeatedly from its open file.

The file is read with `pread` into one buffer: a memory map would touch pages that the shim left as holes. The
open file can still be read after the job has removed its folder.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import InputError
from weft.files import open_regular
from weft.policy import Policy
from weft.shim import binding, layout, policy_image

_ROW = np.dtype(
    [
        ("name", f"S{layout.NAME_BYTES}"),
        *((name, "<u4") for name in ("kind", "threads", "shared_bytes", "natural_blocks")),
        *((name, "<u4") for name in ("shaped_blocks", "shaped_bytes", "reason", "grid_blocks")),
    ]
)
_CELL = np.dtype([("launches", "<u8"), ("shaped", "<u8"), ("beside", "<u8")])
COUNTER_CHUNK = np.dtype(
    [("rows", _ROW, (layout.CHUNK_ROWS,)), ("cells", _CELL, (layout.SHARDS, layout.CHUNK_ROWS))]
)
_COMM = layout.KINDS.index("comm")


@dataclass(frozen=True)
class ProcessCount:
    """The counters of a process since it started."""

    launches: int
    comm_launches: int
    shaped: int
    counters: dict[str, int]
    ctas: int | None
    """Thread blocks of the collective kernel launched most since the last reading; None if there was none."""


class ProcessFile:
    """The open counter file of a process. Raises InputError if this version of weft did not write it."""

    def __init__(self, path: Path) -> None:
        self._number = open_regular(path)
        try:
            self._read_head()
        except BaseException:
            os.close(self._number)
            raise
        self.path = path
        self._buffer = bytearray()
        self._comm_launches = np.zeros(0, np.uint64)
        self._ctas: int | None = None
        self._policy: Policy | None = None

    def _read_head(self) -> layout.CHead:
        head = binding.read_head(self._number)
        self.pid, self.rank = int(head.pid), int(head.rank) if head.rank >= 0 else None
        self.command = head.command.decode(errors="replace").strip()
        self.api = layout.APIS.get(head.api, "unknown")
        return head

    def close(self) -> None:
        os.close(self._number)

    def read(self) -> ProcessCount:
        """The counters now."""
        head = binding.read_head(self._number)
        chunks = self._chunks(-(-int(head.rows_used) // layout.CHUNK_ROWS))
        launches = chunks["cells"]["launches"].sum(axis=1).reshape(-1)
        comm = chunks["rows"]["kind"].reshape(-1) == _COMM
        counters = dict(zip(layout.COUNTERS, map(int, head.counters), strict=False))
        self._note_ctas(np.where(comm, launches, 0), chunks["rows"]["grid_blocks"].reshape(-1))
        return ProcessCount(
            launches=int(launches.sum()) + counters["head_starts"],  # each is a kernel that weft launches
            comm_launches=int(launches[comm].sum()),
            shaped=int(chunks["cells"]["shaped"].sum()),
            counters=counters,
            ctas=self._ctas,
        )

    def policy(self) -> Policy | None:
        """The process's own policy, which takes precedence over the job's; None if it has none."""
        with suppress(InputError):  # being written: keep the previous one until the next reading
            self._policy = policy_image.policy_in_file(self._number)[0]
        return self._policy

    def _chunks(self, wanted: int) -> np.ndarray:
        size = wanted * COUNTER_CHUNK.itemsize
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        done = os.preadv(self._number, [view], layout.CHUNKS_OFFSET) if size else 0
        return np.frombuffer(self._buffer, COUNTER_CHUNK, done // COUNTER_CHUNK.itemsize)

    def _note_ctas(self, launches: np.ndarray, blocks: np.ndarray) -> None:
        since = launches.copy()
        since[: len(self._comm_launches)] -= self._comm_launches
        self._comm_launches = launches
        if len(since) and since.max() > 0:
            self._ctas = int(blocks[int(since.argmax())]) or None
