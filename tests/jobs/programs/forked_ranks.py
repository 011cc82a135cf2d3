"""Forks P ranks that join one gloo group and run a function; used by the programs of weft.ops."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from forked import run_to_end
from ports import held_port


def run_ranks(ranks: int, folder: str, timeout_s: float, main: Callable[[int, int], None]) -> int:
    """Returns how many ranks failed. Import the modules that `main` needs beforehand, once for all ranks."""
    if os.environ.get("OPS_STORE") == "tcp":  # then rank 0 hosts the store
        with held_port() as port:
            return _run_ranks(ranks, f"tcp://127.0.0.1:{port}", timeout_s, main)
    return _run_ranks(ranks, f"file://{folder}/rendezvous", timeout_s, main)


def _run_ranks(ranks: int, init: str, timeout_s: float, main: Callable[[int, int], None]) -> int:
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            run_to_end(partial(_be_rank, rank, ranks, init, timeout_s, main))
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _be_rank(rank: int, ranks: int, init: str, timeout_s: float, main: Callable[[int, int], None]) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks, timeout=timeout)
    main(rank, ranks)
