"""Does a launch cost what it cost before, once live tuning is over? Within one process.

    WEFT_NCCL=libnccl.so.2 weft run --tune -- python benchmarks/live/before_after.py --out FILE [--tiny]

1. Blocks of thousands of small launches, before torch.distributed is initialized: weft does nothing yet.
2. A DDP job with a ghost rank until its tuning is over, and SECONDS more while the watch runs.
3. The same blocks again, with a step of the job between blocks: the watch goes on.

The ratio of the medians, with a 95% interval from resampling blocks, is the cost that tuning leaves behind.
Blocks 1 and 3 are seconds apart, and the pace of a shared host changes by several percent meanwhile. So each
block mixes, in small pieces, launches and plain Python without launches. `ratio` compares launch time over
Python time; `ratio_ms` compares launch times alone. Without --tune the program gives the null result: how
much the process itself changes. About 40 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from configs import RANKS

BLOCKS, PIECES, LAUNCHES = 60, 30, 100  # blocks, pieces per block, launches per piece
COUNTED = 9000  # iterations per piece of plain Python, about as long as its launches
STEPS, SECONDS = 400, 4.0
DEADLINE_S = 100
RESAMPLED = 2000


def block_ms(launch: Callable[[], object], pieces: int, wait: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a block's launches, and of the plain Python in between."""
    launching = counting = 0.0
    for _ in range(pieces):
        wait()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        wait()
        middle = time.perf_counter()
        total = 0
        for number in range(COUNTED):
            total += number & 3
        launching, counting = launching + middle - start, counting + time.perf_counter() - middle
    return 1e3 * launching, 1e3 * counting


def job(device: str, width: int) -> Callable[[], object]:
    """A launch-bound DDP step."""
    import torch.distributed as dist

    from weft.comm import ghost

    ghost.impersonate(RANKS)
    dist.init_process_group("nccl")
    layers = [torch.nn.Linear(width, width) for _ in range(24)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(32, width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tuned() -> bool:
    """Whether this process's search is over: its result is in the job's folder."""
    folder = os.environ.get("WEFT_JOB", "")
    return bool(folder) and (Path(folder) / "tuning.0.json").exists()


def interval(before: list[float], after: list[float]) -> list[float]:
    """The ratio of the medians and its 95% interval."""
    draw = random.Random(0)
    found = sorted(
        statistics.median(draw.choices(after, k=len(after)))
        / statistics.median(draw.choices(before, k=len(before)))
        for _ in range(RESAMPLED)
    )
    ratio = statistics.median(after) / statistics.median(before)
    return [round(value, 4) for value in (ratio, found[RESAMPLED // 40], found[-RESAMPLED // 40])]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does everything work?")
    args = parser.parse_args()
    signal.alarm(DEADLINE_S)
    device = "cpu" if args.tiny else "cuda"
    pieces, blocks, steps = (2, 8, 30) if args.tiny else (PIECES, BLOCKS, STEPS)
    wait = (lambda: None) if args.tiny else torch.cuda.synchronize
    small = torch.ones(4096, device=device)

    def block() -> tuple[float, float]:
        return block_ms(lambda: small.add_(1.0), pieces, wait)

    for _ in range(blocks // 4):
        block()
    before = [block() for _ in range(blocks)]
    step = job(device, 64 if args.tiny else 512)
    done, until = 0, float("inf")
    most = 5 * steps if os.environ.get("WEFT_TUNE") else steps
    while done < most and time.monotonic() < until:
        step()
        done += 1
        if until == float("inf") and tuned():
            until = time.monotonic() + SECONDS
    for _ in range(blocks // 4):
        block()
    after = []
    for _ in range(blocks):
        step()
        after.append(block())
    launching = [[ms for ms, _ in found] for found in (before, after)]
    relative = [[ms / counting for ms, counting in found] for found in (before, after)]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "launches_of_a_block": pieces * LAUNCHES,
        "before_ms": round(statistics.median(launching[0]), 4),
        "after_ms": round(statistics.median(launching[1]), 4),
        "ratio": interval(*relative),
        "ratio_ms": interval(*launching),
        "steps_of_the_job": done,
        "tuned": tuned(),
        "blocks_before_ms": [[round(ms, 4) for ms in one] for one in before],
        "blocks_after_ms": [[round(ms, 4) for ms in one] for one in after],
    }
    args.out.write_text(json.dumps(result) + "\n")
    print(json.dumps({key: value for key, value in result.items() if "blocks_" not in key}), flush=True)


if __name__ == "__main__":
    main()
