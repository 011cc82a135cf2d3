"""Does one GPU as rank 0 of a node overlap as a real node does? A published figure, nothing fitted to it.

    PYTHONPATH=src python3 benchmarks/node/like_node.py --out FILE [--node dgx-h100]

pytorch PR 172714 (8 x H100): an 8192x8192x8192 fp16 matmul and an all-gather of 64 MiB per rank take 2.96 ms
one after the other, and 2.02 ms with the all-gather on a stream of its own, issued first (SM kernels): 0.68.
Here it is measured in the same way, one iteration at a time, with the all-gather of the node profile. The GPU
is idle when an iteration starts, so launches count: `host_us` is the launch time of one all-gather.

Absolute times need the H100's matmul rate, since the matmul here runs on another GPU. It comes from a source
unrelated to the PR: 794.5 TFLOPS, the best bf16 rate found on an H100 SXM (stas00/ml-engineering,
compute/accelerator, "Maximum Achievable Matmul FLOPS"). As the best of many shapes it is an upper bound.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import torch.distributed as dist

from weft.comm import ghost
from weft.comm.node import load_node

PUBLISHED = {"sequential_ms": 2.96, "overlap_ms": 2.02}
H100_TFLOPS = 794.5
SIZE, PART_BYTES = 8192, 64 << 20
BLOCKS, ITERATIONS, WARMUP = 8, 25, 20


def time_ms(step: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each iteration between events on the default stream, the GPU idle before each."""
    found = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return found


def measure(group: Any) -> dict[str, float]:
    """Median milliseconds of both modes and of each part alone, in interleaved blocks."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16) for _ in range(2))
    part = torch.randn(PART_BYTES // 2, device="cuda", dtype=torch.float16)
    whole = torch.empty(group.size() * part.numel(), device="cuda", dtype=torch.float16)
    side = torch.cuda.Stream()

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part, group=group)

    def sequential() -> None:
        a @ b
        gather()

    def overlap() -> None:
        with torch.cuda.stream(side):
            gather()
        a @ b
        torch.cuda.current_stream().wait_stream(side)

    modes = {"sequential": sequential, "overlap": overlap, "matmul": lambda: a @ b, "all_gather": gather}
    times: dict[str, list[float]] = {}
    for step in modes.values():
        time_ms(step, WARMUP)
    for _ in range(BLOCKS):
        for name, step in modes.items():
            times.setdefault(name, []).extend(time_ms(step, ITERATIONS))
    started = time.perf_counter()
    for _ in range(40):
        gather()
    host_us = 1e6 * (time.perf_counter() - started) / 40
    torch.cuda.synchronize()
    return {**{f"{name}_ms": statistics.median(values) for name, values in times.items()}, "host_us": host_us}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--node", default="dgx-h100")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(55, exit=True)
    torch.cuda.set_device(0)
    node = load_node(args.node)
    paced = node.collective("all_gather", node.ranks * PART_BYTES)
    document: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "node": node.name,
        "published": PUBLISHED,
    }
    document["all_gather"] = {"us": paced.us, "ctas": paced.ctas, "basis": paced.basis}
    for ctas in (None, 16, 8):
        ghost.init(node.ranks, ghost.GhostOptions(max_ctas=ctas, node=args.node))
        found = measure(dist.group.WORLD)
        dist.destroy_process_group()
        dist.Backend._plugins.pop(ghost.BACKEND.upper())  # the next group needs other options
        ratio = found["overlap_ms"] / found["sequential_ms"]
        matmul_h100 = 2e3 * SIZE**3 / H100_TFLOPS / 1e12
        longer = max(found["matmul_ms"], found["all_gather_ms"])
        found |= {
            "overlap_over_sequential": ratio,
            "apart_points": 100 * (ratio - PUBLISHED["overlap_ms"] / PUBLISHED["sequential_ms"]),
            "h100_matmul_ms": matmul_h100,
            "h100_sequential_ms": found["sequential_ms"] - found["matmul_ms"] + matmul_h100,
            "h100_overlap_ms": found["overlap_ms"] * max(matmul_h100, found["all_gather_ms"]) / longer,
        }
        document["NCCL's CTAs" if ctas is None else f"{ctas} CTAs"] = {
            k: round(v, 4) for k, v in found.items()
        }
    args.out.write_text(json.dumps(document, indent=1))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
