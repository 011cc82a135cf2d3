"""Shared by the programs of test_launchers.py: each rank reports how it was started."""

from __future__ import annotations

import os
from pathlib import Path


def report(framework: str, ranks: int, losses: list[float]) -> None:
    """One line per rank: how many ranks there are, whether the shim is loaded, whether the loss went down."""
    shim = "libweft_shim.so" in Path("/proc/self/maps").read_text()
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    line = f"{framework}: rank {rank} of {ranks}, shim {shim}, learns {losses[-1] < losses[0]}\n"
    os.write(1, line.encode())  # in one write, so lines of ranks do not mix
