"""Runs a program of several ranks under a held port. Ranks are forks: torch is imported once for all of them.

    python rank_processes.py RANKS FOLDER PROGRAM.py ARGUMENTS…

Writes FOLDER/output.RANK and FOLDER/codes.json. With WEFT_TUNE in the environment each rank starts live
tuning, as importing torch does under `weft run --tune`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from forked import run_program, run_to_end
from ports import held_port
from torch_programs import run_torch_program


def run_rank_processes(
    program: Sequence[str | Path], ranks: int, env: Mapping[str, str], folder: Path, *, timeout_s: float = 200
) -> tuple[list[int], list[str]]:
    """Run a Python program once per rank, with torchrun's variables. Returns exit codes and outputs by rank.

    The output goes to files: with pipes, a rank that writes more than a pipe holds would block, and so would
    the other ranks.
    """
    command = [__file__, ranks, folder, *program]
    said = folder / "runner"
    code = run_torch_program(
        command, {**env, "OMP_NUM_THREADS": "1"}, Path(os.devnull), said, timeout_s=timeout_s
    )
    assert code == 0, said.read_text()[-3000:]
    outputs = [(folder / f"output.{rank}").read_text(errors="replace") for rank in range(ranks)]
    return json.loads((folder / "codes.json").read_text()), outputs


def be_rank(rank: int, ranks: int, port: int, folder: Path, program: list[str]) -> None:
    """Run one rank in this fork, and exit."""
    output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}

    def part() -> None:
        if os.environ.get("WEFT_TUNE"):
            from weft.shim.inject import AUTOLOAD

            sys.path.append(str(AUTOLOAD))
            import weft_autoload

            weft_autoload.start()
        run_program(program)

    run_to_end(part)


def main() -> None:
    import torch._dynamo  # what programs of these tests import, or torch imports late
    import torch.distributed.fsdp
    import torch.nn.parallel

    ranks, folder, program = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    with held_port() as port:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                be_rank(rank, ranks, port, folder, program)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
