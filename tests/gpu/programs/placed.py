"""A pipeline of GEMMs and all-reduces with two ranks on one GPU; prints when its kernels ran, and digests.

`--blocked`: the collectives' streams first wait for a second, so compute must proceed without them.
`--graph`: the pipeline is captured and replayed.
`--bias`: the GEMMs add a bias, for which torch calls cuBLASLt.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from nccl_ranks import Ranks

SIZE, STEPS = 4096, 6
torch.manual_seed(0)
a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
c = torch.empty_like(a)
bias = torch.randn(SIZE, device="cuda", dtype=torch.bfloat16)
ranks, main = Ranks(2), torch.cuda.Stream()
buffers = [torch.full((32 << 20,), 1.0, device="cuda", dtype=torch.bfloat16) for _ in ranks.streams]


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def pipeline(marks: list[tuple[torch.cuda.Event, ...]] | None) -> None:
    for _ in range(STEPS):
        before, after = event(), event()
        if marks is not None:
            before.record()
        if "--bias" in sys.argv:
            c.copy_(torch.addmm(bias, a, b))
        else:
            torch.mm(a, b, out=c)
        after.record()
        ranks.wait_for(after)
        ranks.all_reduce(buffers)
        if marks is not None:
            ended = event()
            ended.record(ranks.streams[0])
            marks.append((before, after, ended))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


with torch.cuda.stream(main):
    pipeline(None)
    torch.cuda.synchronize()
    for buffer in buffers:
        buffer.fill_(1.0)
    marks: list[tuple[torch.cuda.Event, ...]] = []
    start = event()
    start.record()
    if "--graph" in sys.argv:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=main):
            for stream in ranks.streams:
                stream.wait_stream(main)
            pipeline(None)
            ranks.joined_by(main)
        graph.replay()
    else:
        if "--blocked" in sys.argv:
            for stream in ranks.streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_500_000_000)  # at least 0.7 s at any clock
        pipeline(marks)
    torch.cuda.synchronize()
rows = [[start.elapsed_time(mark) for mark in row] for row in marks]
exact = a.double() @ b.double() + (bias.double() if "--bias" in sys.argv else 0)
error = float((c.double() - exact).norm() / exact.norm())
print(
    json.dumps(
        {"rows": rows, "error": error, "gemm": digest(c), "sums": [digest(buffer) for buffer in buffers]}
    )
)
