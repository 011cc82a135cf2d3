"""What does weft cost a program that waits for its host, part by part?

    WEFT_NCCL=libnccl.so.2 python benchmarks/live/parts.py --out FILE [--repeats 3]

A small DDP job with a ghost rank, in separate processes: without weft, under `weft run`, and under `weft run
--tune` and `--tune --tune-once` until the search is over. Then each runs blocks of single operations in
random order: launches, collectives, copies, events, GEMMs, backward passes, whole steps. Before each block a
loop of plain Python shows the current speed of the core. FILE has, for each process and part, the
microseconds of an operation: the median, the 10th percentile, and the median over blocks whose loop was fast.
The next process starts up meanwhile. About 15 seconds per process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import BASELINE_CTAS, RANKS, ROOT
from document import show

WAYS: dict[str, list[str] | None] = {"without": None, "run": [], "tune": ["--tune"]}
WAYS["once"] = ["--tune", "--tune-once"]
PLAIN_S, SEARCH_S, AFTER_S, MEASURED_S = 3.0, 25.0, 1.5, 7.0
READY_S = 8.0  # for the first process to import torch
FAST = 1.2  # a loop is fast if it takes at most this multiple of the fastest
Part = tuple[int, Callable[[], object]]


def parts(torch: Any, dist: Any, step: Callable[[], object]) -> dict[str, Part]:
    """Each operation, with the number of times it runs in a block."""
    small, few = torch.ones(4096, device="cuda"), torch.ones(21, device="cuda")
    weight = torch.ones(8, device="cuda", requires_grad=True)
    host, device = torch.ones(640).pin_memory(), torch.empty(640, device="cuda")
    event, square = torch.cuda.Event(), torch.randn(64, 64, device="cuda")

    def thread() -> None:
        one = threading.Thread(target=int)
        one.start()
        one.join()

    return {
        "launch": (500, lambda: small.add_(1.0)),
        "all-reduce": (60, lambda: dist.all_reduce(few)),
        "DDP step": (16, step),
        "backward": (50, lambda: (weight * 2).sum().backward()),
        "event": (500, event.record),
        "copy": (300, lambda: device.copy_(host, non_blocking=True)),
        "GEMM": (300, lambda: torch.mm(square, square)),
        "thread": (40, thread),
        "allocation": (300, lambda: torch.empty(1000, device="cuda")),
    }


def tuned() -> bool:
    """Whether this process's search is over: its result is in the job's folder."""
    path = Path(os.environ.get("WEFT_JOB", "."), "tuning.0.json")
    return path.exists() and "ended before tuning" not in path.read_text()


def measure(gate: Path, out: Path) -> None:
    """Runs in a separate process: tune the job if there is a tuner, then measure the parts."""
    import torch
    import torch.distributed as dist

    torch.zeros(1, device="cuda")
    while not gate.exists():
        time.sleep(0.01)
    from weft.comm import ghost

    ghost.impersonate(RANKS)
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 1).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 20, device="cuda"), torch.rand(32, 1, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    tunes, over = "WEFT_TUNE" in os.environ, False
    until = time.monotonic() + (SEARCH_S if tunes else PLAIN_S)
    while time.monotonic() < until:
        step()
        if tunes and not over and tuned():
            over, until = True, time.monotonic() + AFTER_S
    found, order = parts(torch, dist, step), random.Random(os.getpid())
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    until = time.monotonic() + MEASURED_S
    while time.monotonic() < until:
        for name in order.sample(list(found), len(found)):
            count, operation = found[name]
            began = time.perf_counter()
            sum(range(300_000))
            loop = time.perf_counter()
            for _ in range(count):
                operation()
            torch.cuda.synchronize()
            blocks[name].append((1e6 * (loop - began), 1e6 * (time.perf_counter() - loop) / count))
    out.write_text(json.dumps({"tuned": over, "blocks": blocks}))
    os._exit(0)  # no need to destroy the ghost's group


def summary(blocks: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Microseconds per operation, by part."""
    fast = FAST * min(loop for part in blocks.values() for loop, _ in part)
    found = {}
    for name, part in blocks.items():
        times = sorted(us for _, us in part)
        quick = [us for loop, us in part if loop <= fast]
        found[name] = {"median": statistics.median(times), "p10": times[len(times) // 10]}
        found[name] |= {"fast": statistics.median(quick)} if quick else {}
    return {name: {key: round(us, 3) for key, us in one.items()} for name, one in found.items()}


def start(way: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that gets ready and waits for its gate."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "WEFT_GHOST_CTAS": str(BASELINE_CTAS),
        "WEFT_STORE": str(folder / "store.sqlite"),
        "OMP_NUM_THREADS": "1",
    }
    options = WAYS[way]
    weft = [] if options is None else [sys.executable, "-m", "weft", "run", *options, "--"]
    program = [sys.executable, __file__, "--gate", str(folder / "gate"), "--out", str(folder / "blocks")]
    return subprocess.Popen([*weft, *program], env=env)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gate is not None:
        measure(args.gate, args.out)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        turns = [(way, Path(temporary, f"{way}{n}")) for n in range(args.repeats) for way in WAYS]
        for _, folder in turns:
            folder.mkdir()
        process = start(*turns[0])
        time.sleep(READY_S)
        for number, (way, folder) in enumerate(turns):
            (folder / "gate").touch()
            following = start(*turns[number + 1]) if number + 1 < len(turns) else None
            process.wait(timeout=120)
            found = json.loads((folder / "blocks").read_text())
            rows.append({"way": way, "tuned": found["tuned"], "us": summary(found["blocks"])})
            if following is not None:
                process = following
    show({"command": "python benchmarks/live/parts.py --out FILE", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
