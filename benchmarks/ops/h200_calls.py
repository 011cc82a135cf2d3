"""What fraction of the ideal do calls of real models reach on one GPU? Batch-first, several weights, fp8.

    PYTHONPATH=src python benchmarks/ops/h200_calls.py --out DIR            # about two minutes on an H200

As in h200.py, one GPU is rank 0 of eight, and its peers' data is in pinned host memory. Each case is measured
serial and with the schedules that pay off with copy engines, interleaved, as well as its GEMMs alone and its
transfer alone; results are checked against plain torch. A batch-first call includes the copy that puts
tokens first.

ideal = max(GEMMs, transfer) + the GEMMs of the last piece: nothing can hide it.
fraction of ideal = (serial - measured) / (serial - ideal).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weft.ops import HostPeers, all_gather_matmul, matmul_reduce_scatter
from weft.ops.teams import forget

RANKS, ROUNDS = 8, 11
NAMES = ("serial", "shard", "hetero-fused-1d", "hetero-unfused-1d")
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Call:
    """One case: tokens, columns of each weight, k. A reduce-scatter has a single weight, k by n."""

    name: str
    operation: str
    m: int
    ns: tuple[int, ...]
    k: int
    batch: int = 0
    """0: tokens by features. Otherwise batch, tokens, features."""
    dtype: torch.dtype = torch.bfloat16


CALLS = (
    Call("tokens first", "all_gather_matmul", 32768, (11264,), 8192),
    Call("batch first", "all_gather_matmul", 32768, (11264,), 8192, batch=8),
    Call("query, key, value", "all_gather_matmul", 32768, (8192, 1536, 1536), 8192),
    Call("gate and up, batch first", "all_gather_matmul", 32768, (5632, 5632), 8192, batch=8),
    Call("tokens first", "matmul_reduce_scatter", 32768, (8192,), 11264),
    Call("batch first", "matmul_reduce_scatter", 32768, (8192,), 11264, batch=8),
    Call("fp8", "all_gather_matmul", 32768, (11264,), 8192, dtype=FP8),
    Call("fp8, gate and up, batch first", "all_gather_matmul", 32768, (5632, 5632), 8192, batch=8, dtype=FP8),
    Call("fp8", "matmul_reduce_scatter", 32768, (8192,), 22528, dtype=FP8),
)


class Case:
    """The tensors of a call, its peers, and every way to run it."""

    def __init__(self, call: Call) -> None:
        self.call, self.rows = call, call.m // RANKS
        self.scatters = call.operation == "matmul_reduce_scatter"
        self.fp8 = call.dtype == FP8
        self.whole = self._random(call.m, call.k)
        self.ws = [self._random(n, call.k).t() for n in call.ns]
        self.scale = torch.full((), 0.25, device="cuda")
        kept = torch.bfloat16
        if self.scatters:
            held = [torch.randn(self.rows, call.ns[0], device="cuda").to(kept) for _ in range(RANKS)]
            own = self._matmul(self.whole[: self.rows], self.ws[0]).float()
            self.expected = [own + sum(part.float() for part in held[1:])]
            self.x = self.whole
        else:
            held = list(self.whole.split(self.rows))
            self.expected = [self._matmul(self.whole, w).float() for w in self.ws]
            self.x = self.whole[: self.rows].clone()
        if call.batch:  # batch, tokens, features: peers hold the same rows with tokens first
            self.x = self.x.view(-1, call.batch, call.k).movedim(0, 1).contiguous()
        self.peers = HostPeers(held)
        self.moved = (
            (RANKS - 1) * self.rows * (call.ns[0] * 2 if self.scatters else call.k * call.dtype.itemsize)
        )
        self.outs = [torch.empty(call.m, n, device="cuda", dtype=kept) for n in call.ns]
        self.ways: dict[str, Callable[[], Any]] = {name: self._way(name) for name in NAMES}
        self.ways["GEMM alone"] = self._gemms(self.whole)
        self.ways["GEMM of a piece"] = self._gemms(self.whole[: max(128, self.rows // RANKS)])
        self.ways["transfer alone"] = self._transfer()

    def _random(self, rows: int, cols: int) -> torch.Tensor:
        return (torch.randn(rows, cols, device="cuda") / cols**0.25).to(self.call.dtype)

    def _matmul(self, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if not self.fp8:
            return torch.mm(a, w, out=out)
        scale = self.scale if hasattr(self, "scale") else torch.full((), 0.25, device="cuda")
        more = {} if out is None else {"out": out}
        return torch._scaled_mm(a, w, scale, scale, out_dtype=torch.bfloat16, **more)

    def _gemms(self, a: torch.Tensor) -> Callable[[], Any]:
        return lambda: [self._matmul(a, w, out[: len(a)]) for w, out in zip(self.ws, self.outs, strict=True)]

    def _way(self, name: str) -> Callable[[], Any]:
        options: dict[str, Any] = {"schedule": name, "engine": "dma"}
        if self.fp8:
            options |= {
                "A_scale": self.scale,
                "B_scale": [self.scale] * len(self.ws),
                "out_dtype": torch.bfloat16,
            }
        dim = 1 if self.call.batch else 0
        if self.scatters:
            if self.fp8:
                options["B_scale"] = self.scale
            return lambda: [matmul_reduce_scatter(self.x, self.ws[0], self.peers, scatter_dim=dim, **options)]
        return lambda: all_gather_matmul(self.x, self.ws, self.peers, gather_dim=dim, **options)

    def _transfer(self) -> Callable[[], None]:
        held = [part for part in self.peers.held if part is not None]
        near = [torch.empty_like(part, device="cuda") for part in held]
        boxes = [torch.empty_like(part).pin_memory() for part in held] if self.scatters else []
        lanes = torch.cuda.Stream(), torch.cuda.Stream()

        def move() -> None:
            here = torch.cuda.current_stream()
            for lane in lanes:
                lane.wait_stream(here)
            with torch.cuda.stream(lanes[0]):
                for target, source in zip(near, held, strict=True):
                    target.copy_(source, non_blocking=True)
            with torch.cuda.stream(lanes[1]):
                for box, source in zip(boxes, near, strict=False):
                    box.copy_(source, non_blocking=True)
            for lane in lanes:
                here.wait_stream(lane)

        return move

    def check(self) -> float:
        """The largest error of any schedule, relative to the largest value."""
        worst = 0.0
        for name in NAMES:
            for got, want in zip(self.ways[name](), self.expected, strict=True):
                rows = got.movedim(1, 0).reshape(want.shape) if self.call.batch else got
                worst = max(worst, ((rows.float() - want).abs().max() / want.abs().max()).item())
        return worst


def measure(case: Case, until: float) -> dict[str, list[float]]:
    draw, times = random.Random(0), {name: [] for name in case.ways}
    for turn in range(ROUNDS + 1):
        if turn > 3 and time.monotonic() > until:
            break
        for name in draw.sample(list(case.ways), len(case.ways)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            case.ways[name]()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end))
    return times


def row(call: Call, until: float) -> dict[str, Any]:
    case = Case(call)
    error = case.check()
    times = {name: median(each) for name, each in measure(case, until).items()}
    best = min(NAMES, key=lambda name: times[name])
    ideal = max(times["GEMM alone"], times["transfer alone"]) + times["GEMM of a piece"]
    serial = times["serial"]
    return {
        "call": call.name,
        "operation": call.operation,
        "mnk": [call.m, list(call.ns), call.k],
        "dtype": str(call.dtype).removeprefix("torch."),
        "error": error,
        "ms": times,
        "transfer_gb_s": case.moved / times["transfer alone"] / 1e6,
        "best": best,
        "ideal_ms": ideal,
        "speedup": serial / times[best],
        "of_ideal_pct": 100 * (serial - times[best]) / (serial - ideal),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0, help="no new case begins after this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until, rows = time.monotonic() + options.seconds, []
    for call in CALLS:
        if time.monotonic() > until:
            print(f"out of time before {call.name} ({call.operation})", flush=True)
            break
        found = row(call, until)
        rows.append(found)
        print(
            f"{call.operation} {call.name}: serial {found['ms']['serial']:.2f} ms, {found['best']} "
            f"{found['ms'][found['best']]:.2f} ms, {found['speedup']:.2f}x, "
            f"{found['of_ideal_pct']:.0f}% of ideal, error {found['error']:.1e}",
            flush=True,
        )
        document = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "ranks": RANKS,
            "command": "python benchmarks/ops/h200_calls.py --out DIR",
            "rows": rows,
        }
        (options.out / "h200_calls.json").write_text(json.dumps(document, indent=1) + "\n")
        forget()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
