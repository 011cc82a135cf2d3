"""Starts the ranks of a job as processes of their own, under a port that is held for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ports import held_port


def run_rank_processes(
    program: Sequence[str | Path], ranks: int, env: Mapping[str, str], folder: Path, *, timeout_s: float = 200
) -> tuple[list[int], list[str]]:
    """Run a Python program once per rank, with torchrun's variables; the exit code and the output of each rank.

    The output goes to `folder`/output.RANK, not to a pipe: a rank that writes more than a pipe holds would wait for
    its reader, and the other ranks for it. Ranks that have not ended after `timeout_s` are killed.
    """
    outputs = [folder / f"output.{rank}" for rank in range(ranks)]
    common = {**env, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = []
        for rank, output in enumerate(outputs):
            process = subprocess.Popen(
                [sys.executable, *map(str, program)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=stack.enter_context(output.open("w")),
                stderr=subprocess.STDOUT,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        codes = [process.wait(timeout_s) for process in processes]
    return codes, [output.read_text(errors="replace") for output in outputs]
