"""Runs many examples with two ranks each, by gloo or NCCL, or one and a ghost: torch is imported once, a rank is a fork.

    python examples_runner.py FOLDER '[["ddp", "ddp.py", ["--steps", "4"]], …]' [ghost]

Leaves FOLDER/NAME.losses of rank 0, FOLDER/NAME.RANK.log, and FOLDER/results.json with the exit codes by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from forked import run_program, run_to_end
from ports import held_port

from weft.comm import ghost

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, DEADLINE_S = 2, float(os.environ.get("EXAMPLES_DEADLINE_S", "100"))  # for each example


def run_rank(rank: int, port: int, folder: Path, name: str, command: list[str], with_ghost: bool) -> None:
    """Run one rank in this child process, with the environment that torchrun would set."""
    log = os.open(folder / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if with_ghost:
        ghost.impersonate(RANKS)
    keep_the_group()
    losses = str(folder / f"{name}.losses")
    run_to_end(partial(run_program, [EXAMPLES / command[0], *command[1:], "--losses", losses]))


def keep_the_group() -> None:
    """Keep the process group alive until the rank ends by _exit.

    Gloo's destructor waits for its threads while it holds the GIL, which the last callback of a communication
    hook may need on one of those threads."""
    real, kept = dist.destroy_process_group, []

    def destroy() -> None:
        kept.append(dist.distributed_c10d._get_default_group())
        real()

    dist.destroy_process_group = destroy


def run(folder: Path, name: str, command: list[str], with_ghost: bool) -> list[int]:
    """The exit code of each rank of one example."""
    until = time.monotonic() + DEADLINE_S
    with held_port() as port:
        children: list[int] = []
        for rank in range(1 if with_ghost else RANKS):
            child = os.fork()
            if child == 0:
                run_rank(rank, port, folder, name, command, with_ghost)
            children.append(child)
        return exit_codes(children, until)


def exit_codes(children: list[int], until: float) -> list[int]:
    """Wait for all children; once one has failed, or at the deadline, kill the others."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until or any(codes.values()):
            for child in set(children) - set(codes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def main() -> None:
    folder, results = Path(sys.argv[1]), {}
    jobs, with_ghost = json.loads(sys.argv[2]), sys.argv[3:] == ["ghost"]
    if any(script.startswith("lightning") for _, script, _ in jobs):
        import lightning.pytorch  # noqa: F401 (once here, not in every rank)
    if any(script.startswith("huggingface") for _, script, _ in jobs):
        from transformers import Trainer  # noqa: F401
    for name, script, more in jobs:
        start = time.monotonic()
        results[name] = run(folder, name, [script, *more], with_ghost)
        print(f"{name}: {results[name]} {time.monotonic() - start:.1f} s", flush=True)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
