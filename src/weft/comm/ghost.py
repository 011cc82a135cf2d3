"""A torch.distributed backend with ghost ranks: one process is rank 0 of R on one GPU, with real collectives.

    python -m weft.comm.ghost --ranks 2 train.py …            # an unmodified DDP or FSDP2 script
    python -m weft.comm.ghost --node dgx-h100 train.py …      # the same as rank 0 of a DGX H100

The other R-1 ranks exist only as NCCL ranks on the same GPU. They join every collective with their own
buffers. By default these contain rank 0's data, as if every rank had the same batch: an averaged gradient
then equals rank 0's, and training proceeds as on one GPU, but with the communication of R ranks. FSDP2
gathers R copies of rank 0's shard: the model differs, but has the right shape and cost.

With a node profile there is neither NCCL nor a second rank: a collective is one kernel that has the CTAs and
the memory traffic of one rank and takes as long as on that node (weft.comm.paced). The results are the same.
`--late US[,SIGMA]` adds a straggler: the last rank arrives at each collective US microseconds later than
rank 0 (normally distributed with SIGMA), and the collective holds its CTAs until then. `--stage US` is for
pipeline parallelism: each stage after rank 0 takes US microseconds per microbatch, forward and backward
together, and the gradients come back after that time. Without `--stage` they come back immediately.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import torch.distributed as dist
except ImportError as error:
    if __name__ != "__main__":
        raise
    reason = str(error).partition("\n")[0]
    print(f"weft: ghost ranks need PyTorch: pip install torch ({reason})", file=sys.stderr)
    sys.exit(2)

from weft.comm.ghost_calls import adapt
from weft.comm.ghost_group import GhostGroup
from weft.comm.ghost_issue import BACKEND
from weft.comm.ghost_lane import GhostOptions
from weft.comm.ghost_processes import LAUNCHER_MODULES, LAUNCHERS
from weft.comm.ghost_world import make_world_of_ghosts
from weft.comm.node import NODE_VARIABLE, load_node
from weft.comm.node_file import MAX_PROFILE_RANKS
from weft.comm.paced import LATE_VARIABLE, STAGE_VARIABLE, Lateness, parse_stage
from weft.errors import InputError, UsageError

__all__ = ["BACKEND", "GhostGroup", "GhostOptions", "impersonate", "init", "register"]


def register(options: GhostOptions | None = None) -> None:
    """Register the backend with torch.distributed under the name `ghost`."""
    if BACKEND.upper() in dist.Backend._plugins:
        return

    def create(common: Any, given: Any) -> GhostGroup:
        chosen = given if isinstance(given, GhostOptions) else options or GhostOptions.from_environment()
        members = common.global_ranks_in_group or range(common.group_size)  # empty for the world group
        if chosen.node is not None:
            chosen = replace(chosen, stride=load_node(chosen.node).stride(members))
        return GhostGroup(common.group_rank, common.group_size, chosen)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    adapt()


def init(ranks: int, options: GhostOptions | None = None) -> None:
    """Make this process rank 0 of `ranks` ranks; the others are ghosts."""
    if ranks < 2:
        raise UsageError(f"ranks {ranks} is not valid; use 2 or more")
    register(options)
    dist.init_process_group(BACKEND, rank=0, world_size=ranks, store=dist.HashStore())


def impersonate(ranks: int, local_ranks: int | None = None) -> None:
    """Make an unmodified script in this process rank 0 of `ranks`, whatever backend it requests."""
    local = str(local_ranks or ranks)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": local}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    register()
    make_world_of_ghosts(ranks, local_ranks)


USAGE = (
    "usage: python -m weft.comm.ghost [--ranks R] [--node NODE [--late US[,SIGMA]] [--stage US]] "
    "(script.py | -m module) [arguments]; give --ranks, --node or both"
)


def run_script(arguments: Sequence[str]) -> None:
    """Run a script as rank 0. `arguments`: the options in USAGE, then the script and its own arguments."""
    import runpy

    if list(arguments[:1]) in (["-h"], ["--help"]):
        print(USAGE)
        return
    options, rest = _options(arguments)
    ranks, local = options.get("--ranks"), None
    chosen: dict[str, str] = {}
    if not rest or not options.keys() & {"--ranks", "--node"}:
        raise UsageError(USAGE)
    if ranks is not None and not (ranks.isdecimal() and 2 <= int(ranks) <= MAX_PROFILE_RANKS):
        raise UsageError(f"--ranks {ranks} is not valid; use 2 to {MAX_PROFILE_RANKS}")
    if "--node" in options:
        node = load_node(options["--node"])
        ranks = str(node.world(int(ranks) if ranks else None))
        local = min(int(ranks), node.domain)
        chosen[NODE_VARIABLE] = options["--node"]
    count = int(ranks or 2)
    for option, variable, check in (
        ("--late", LATE_VARIABLE, Lateness.parse),
        ("--stage", STAGE_VARIABLE, parse_stage),
    ):
        if option in options:
            if "--node" not in options:
                raise UsageError(f"{option} is for ranks of a node: add --node")
            check(options[option])
            chosen[variable] = options[option]
    module = rest[1] if rest[0] == "-m" else None
    _check_program(rest[0] if module is None else module, module is not None)
    os.environ.update(chosen)
    impersonate(count, local)
    if module is not None:
        sys.argv = rest[1:]
        sys.path[0] = os.getcwd()  # noqa: PTH109 (as python does)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv = list(rest)
    path = os.path.abspath(rest[0])  # noqa: PTH100 (as python does; __file__ holds after a chdir, too)
    sys.path[0] = os.path.dirname(path)  # noqa: PTH120
    runpy.run_path(path, run_name="__main__")


def _check_program(name: str, is_module: bool) -> None:
    if Path(name).name in LAUNCHERS or name in LAUNCHER_MODULES:
        raise UsageError(f"{name} starts other processes, which are not ghost ranks; give the script itself")
    if not is_module and not Path(name).exists():
        raise UsageError(f"cannot run {name}: no such file")
    if not is_module and Path(name).is_dir() and not (Path(name) / "__main__.py").exists():
        raise UsageError(f"cannot run {name}: a folder without __main__.py")
    if is_module and not _has_module(name):
        raise UsageError(f"cannot run -m {name}: no such module")


def _has_module(name: str) -> bool:
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (as python does)
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def _options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options before the script (`--ranks 8` or `--ranks=8`), and the script with its arguments."""
    found, rest = dict[str, str](), list(arguments)
    while rest and (word := rest[0].partition("="))[0] in ("--ranks", "--node", "--late", "--stage"):
        if not word[1] and len(rest) < 2:
            raise UsageError(USAGE)
        found[word[0]] = word[2] if word[1] else rest[1]
        rest = rest[1 if word[1] else 2 :]
    missing = rest[:1] == ["-m"] and len(rest) < 2
    return found, [] if missing or (rest and rest[0].startswith("-") and rest[0] != "-m") else rest


if __name__ == "__main__":
    # This copy of the module is __main__; the importable module must register the backend.
    from weft.comm import ghost

    try:
        ghost.run_script(sys.argv[1:])
    except (UsageError, InputError) as error:
        print(f"weft: {error}", file=sys.stderr)
        sys.exit(2)
