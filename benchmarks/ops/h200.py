"""How much of a transfer does each schedule hide on one GPU, and what do the copies cost a matmul?

    PYTHONPATH=src python benchmarks/ops/h200.py --out DIR            # about two minutes on an H200

One GPU is rank 0 of eight. Its peers' data is in pinned host memory (`weft.ops.HostPeers`), so
copies are real transfers by a copy engine (`dma`) or by a kernel on 16 SMs (`sm`). Sizes are chosen so that
communication takes 0.5 to 1.5 times as long as the matmul. All variants of a size are interleaved, in random
order.

ideal = max(matmul, transfer) + the matmul of the last piece at the finest cut tried: nothing can hide it.
fraction of ideal = (serial - measured) / (serial - ideal).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weft.comm.dma import Block, copies
from weft.measure.intervals import bootstrap_ci
from weft.ops import HostPeers, all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter
from weft.ops.teams import forget
from weft.policy import SCHEDULES

RANKS = 8
ROUNDS = 11
PIECES = (4, 8, 16, 32)
OPERATIONS = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "all_to_all_matmul": all_to_all_matmul,
}
# Operation, M, N, K. The transfer is M x K (M x N for the reduce-scatter), so N (K) sets the balance.
SHAPES = [
    ("all_gather_matmul", 32768, 11264, 8192),
    ("all_gather_matmul", 32768, 22528, 8192),
    ("all_gather_matmul", 32768, 14848, 8192),
    ("all_gather_matmul", 32768, 9216, 8192),
    ("all_gather_matmul", 32768, 7680, 8192),
    ("all_gather_matmul", 65536, 11264, 4096),
    ("all_gather_matmul", 16384, 11264, 16384),
    ("all_gather_matmul", 16384, 11264, 4096),
    ("matmul_reduce_scatter", 32768, 8192, 11264),
    ("matmul_reduce_scatter", 32768, 8192, 22528),
    ("matmul_reduce_scatter", 32768, 8192, 7680),
    ("all_to_all_matmul", 32768, 11264, 8192),
    ("all_to_all_matmul", 32768, 16384, 8192),
]


class Case:
    """One size: its tensors, its peers, and every way to run it."""

    def __init__(self, operation: str, m: int, n: int, k: int) -> None:
        self.operation, self.m, self.n, self.k = operation, m, n, k
        device = torch.device("cuda")
        self.scatters = operation == "matmul_reduce_scatter"
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        self.w = torch.randn(k, n, device=device, dtype=torch.bfloat16) / k**0.5
        rows = m // RANKS
        if self.scatters:
            self.x, self.matmul_out = x, torch.empty(m, n, device=device, dtype=torch.bfloat16)
            held: list[torch.Tensor | None] = [
                torch.randn(rows, n, device=device, dtype=torch.bfloat16) for _ in range(RANKS)
            ]
            own = (x[:rows].float() @ self.w.float()).bfloat16()
            self.expected = (own.float() + sum(h.float() for h in held[1:] if h is not None)).bfloat16()
        else:
            self.matmul_out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
            self.whole = x
            if operation == "all_gather_matmul":
                held = list(x.split(rows))
                self.x = x[:rows].clone()
            else:  # rank p's block for this rank is its first
                held = [torch.randn_like(x) if p else None for p in range(RANKS)]
                self.x = x
                blocks = [x[:rows], *(h[:rows] for h in held if h is not None)]
                self.whole = torch.cat(blocks)
            self.expected = self.whole @ self.w
        self.peers = HostPeers(held)
        held.clear()
        self.out = torch.empty_like(self.expected)
        self.variants: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        for engine in ("dma", "sm"):
            for name in SCHEDULES:
                cuts: tuple[int | None, ...] = (None,) if name in ("serial", "shard") else (8,)
                if name == "hetero-fused-1d":
                    cuts = PIECES
                if name == "hetero-unfused-1d":
                    cuts = PIECES[:2]
                for pieces in cuts:
                    label = f"{name}{'' if pieces in (None, RANKS) else f'/{pieces}'} {engine}"
                    self.variants[label] = self._variant(name, engine, pieces)
        self.moved = (RANKS - 1) * rows * (n if self.scatters else k) * 2
        self.variants["matmul alone"] = lambda: torch.mm(
            self.x if self.scatters else self.whole, self.w, out=self.matmul_out
        )
        for engine in ("dma", "sm"):
            self.variants[f"transfer alone {engine}"] = self._transfer(engine)

    def _variant(self, name: str, engine: str, pieces: int | None) -> Any:
        function = OPERATIONS[self.operation]

        def call() -> None:
            function(self.x, self.w, self.peers, schedule=name, engine=engine, pieces=pieces, out=self.out)

        return call

    def _transfer(self, engine: str) -> Any:
        """Only the transfers of one call: all it receives and, for a reduce-scatter, sends meanwhile."""
        rows, cols = self.m // RANKS, self.n if self.scatters else self.k
        sources = [h[:rows] for h in self.peers.held if h is not None]
        arriving = torch.empty((RANKS - 1) * rows, cols, device="cuda", dtype=torch.bfloat16)
        targets = list(arriving.split(rows))
        lanes = [torch.cuda.Stream(), torch.cuda.Stream()]
        pairs = [(0, t, s) for t, s in zip(targets, sources, strict=True)]
        if self.scatters:
            boxes = [torch.empty(rows, cols, dtype=torch.bfloat16, pin_memory=True) for _ in sources]
            pairs += [(1, box, t) for box, t in zip(boxes, targets, strict=True)]
        driver = copies()

        def call() -> None:
            main = torch.cuda.current_stream()
            for lane in lanes:
                lane.wait_stream(main)
            for lane, target, source in pairs:
                if engine == "dma":
                    function, arguments = driver.entry(
                        Block.of(target), Block.of(source), lanes[lane].cuda_stream
                    )
                    function(*arguments)
                else:
                    from weft.comm.copy_kernel import launch_copy

                    launch_copy(source, target, lanes[lane])
            for lane in lanes:
                main.wait_stream(lane)

        return call

    def wrong(self) -> dict[str, float]:
        """The largest error of every variant, as a share of the largest value."""
        found = {}
        scale = self.expected.float().abs().max().item()
        for name, call in list(self.variants.items()):
            self.out.fill_(float("nan"))
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:  # a variant that cannot run must not stop the others
                self.failed[name] = f"{type(error).__name__}: {error}"[:500]
                del self.variants[name]
                continue
            if "alone" in name:
                continue
            found[name] = (
                max(
                    (a.float() - b.float()).abs().max().item()
                    for a, b in zip(self.out.split(4096), self.expected.split(4096), strict=True)
                )
                / scale
            )
        return found


def timed(call: Any) -> tuple[float, float]:
    """Milliseconds of a call on the GPU, and microseconds that the CPU took to issue it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    begun = time.perf_counter()
    call()
    issued = time.perf_counter() - begun
    end.record()
    end.synchronize()
    return start.elapsed_time(end), issued * 1e6


def contention(case: Case, engine: str, rng: random.Random) -> tuple[float, float]:
    """Slowdown of a matmul while copies run throughout, and of a transfer while matmuls run; in random order.

    A matmul is measured right after another one, so that clocks are those of a busy GPU. Both of two
    transfers count, because the first may wait for a free SM.
    """
    matmul = case.variants["matmul alone"]
    transfer = case.variants[f"transfer alone {engine}"]
    side = torch.cuda.Stream()
    usual, moved = timed(matmul)[0], timed(transfer)[0]
    copies, matmuls = int(3 * usual / moved) + 2, int(9 * moved / usual) + 2

    def one(call: Any, on: Any, other: Any, other_on: Any, count: int, both: bool) -> float:
        torch.cuda.synchronize()
        with torch.cuda.stream(other_on):
            for _ in range(count):
                other()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(on):
            if both:
                start.record()
            call()
            if not both:
                start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    main = torch.cuda.current_stream()
    ways = {
        "matmul": (matmul, main, transfer, side, 0, False),
        "matmul concurrent": (matmul, main, transfer, side, copies, False),
        "transfer": (transfer, side, matmul, main, 0, True),
        "transfer concurrent": (transfer, side, matmul, main, matmuls, True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name in rng.sample(list(ways), len(ways)):
            times[name].append(one(*ways[name]))
    middle = {name: median(found) for name, found in times.items()}
    return middle["matmul concurrent"] / middle["matmul"], middle["transfer concurrent"] / middle["transfer"]


def measure(case: Case, rng: random.Random, rounds: int) -> dict[str, Any]:
    errors = case.wrong()
    for call in case.variants.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in case.variants}
    issue: dict[str, list[float]] = {name: [] for name in case.variants}
    for _ in range(rounds):
        for name in rng.sample(list(case.variants), len(case.variants)):
            ms, us = timed(case.variants[name])
            samples[name].append(ms)
            issue[name].append(us)
    row: dict[str, Any] = {
        "operation": case.operation,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "moved_bytes": case.moved,
        "max_error": max(errors.values()),
        "failed": case.failed,
        "variants": {},
    }
    matmul = median(samples["matmul alone"])
    row["product_ms"], row["tflops"] = matmul, 2 * case.m * case.n * case.k / matmul / 1e9
    for engine in ("dma", "sm"):
        if not {f"serial {engine}", f"transfer alone {engine}"} <= set(samples):
            continue
        transfer = median(samples[f"transfer alone {engine}"])
        serial = median(samples[f"serial {engine}"])
        fill = matmul * (RANKS - 1) / RANKS / max(PIECES)
        ideal = max(matmul, transfer) + fill
        tried = {
            name: times for name, times in samples.items() if name.endswith(engine) and "alone" not in name
        }
        best = min(tried, key=lambda name: median(tried[name]))
        gemm, copy = contention(case, engine, rng)
        row[engine] = {
            "transfer_ms": transfer,
            "gbytes_per_s": case.moved / transfer / 1e6,
            "comm_over_compute": transfer / matmul,
            "serial_ms": serial,
            "ideal_ms": ideal,
            "best": best.removesuffix(f" {engine}"),
            "best_ms": median(tried[best]),
            "speedup": serial / median(tried[best]),
            "fraction_of_ideal": (serial - median(tried[best])) / (serial - ideal),
            "fraction_without_fill": (serial - median(tried[best])) / (serial - ideal + fill),
            "product_slowed_by_copies": gemm - 1,
            "copies_slowed_by_product": copy - 1,
        }
        for name, times in tried.items():
            row["variants"][name] = {
                "ms": median(times),
                "ci_ms": list(bootstrap_ci(times)),
                "speedup": serial / median(times),
                "fraction_of_ideal": (serial - median(times)) / (serial - ideal),
                "issue_us": median(issue[name]),
                "max_error": errors[name],
                "samples_ms": times,
            }
    return row


def table(rows: list[dict[str, Any]], machine: str, command: str) -> str:
    lines = [
        f"# Schedules on one GPU ({machine})",
        "",
        f"`{command}`. One GPU as rank 0 of {RANKS}, bf16, the peers' data in pinned host memory. Medians of "
        f"{ROUNDS} interleaved measurements.",
        "",
        "| operation | M, N, K | engine | transfer / matmul | serial ms | best ms | best | speed-up | "
        "of ideal | of ideal, no fill | matmul slowed | copies slowed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for engine in ("dma", "sm"):
            if engine not in row:
                continue
            e = row[engine]
            lines.append(
                f"| {row['operation']} | {row['m']}, {row['n']}, {row['k']} | {engine} | "
                f"{e['comm_over_compute']:.2f} | {e['serial_ms']:.2f} | {e['best_ms']:.2f} | {e['best']} | "
                f"{e['speedup']:.2f} | {e['fraction_of_ideal']:.0%} | {e['fraction_without_fill']:.0%} | "
                f"{e['product_slowed_by_copies']:+.1%} | {e['copies_slowed_by_product']:+.1%} |"
            )
    lines += ["", "Speed-up over serial of every schedule (after `/`: pieces, else 8):", ""]
    names = list(dict.fromkeys(name for row in rows for name in row["variants"]))
    lines += ["| schedule | " + " | ".join(f"{r['m']}, {r['n']}, {r['k']}" for r in rows) + " |"]
    lines += ["| --- |" + " --- |" * len(rows)]
    for name in names:
        found = (row["variants"].get(name) for row in rows)
        gains = (f"{variant['speedup']:.2f}" if variant else "-" for variant in found)
        lines.append(f"| {name} | " + " | ".join(gains) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=160.0, help="stop before a size that would not fit")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", action="append", help="OPERATION:MxNxK instead of the built-in sizes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shapes = SHAPES
    if arguments.shape:
        shapes = [(o, *map(int, s.split("x"))) for o, s in (text.split(":") for text in arguments.shape)]
    begun, longest = time.monotonic(), 0.0
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    rows: list[dict[str, Any]] = []
    skipped = []
    for shape in shapes:
        if time.monotonic() - begun + longest > arguments.seconds:
            skipped.append(shape)
            continue
        at = time.monotonic()
        case = Case(*shape)
        rows.append(measure(case, rng, arguments.rounds))
        del case
        forget()
        gc.collect()
        torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - at)
        command = "PYTHONPATH=src python benchmarks/ops/h200.py"
        document = {"machine": machine, "command": command, "ranks": RANKS, "rows": rows, "skipped": skipped}
        (arguments.out / "ops_h200.json").write_text(json.dumps(document, indent=1) + "\n")
        (arguments.out / "ops_h200.md").write_text(table(rows, machine, command))
        row = rows[-1]
        best = ", ".join(
            f"{e}: {row[e]['best']} {row[e]['speedup']:.2f}x {row[e]['fraction_of_ideal']:.0%}, matmul "
            f"{row[e]['product_slowed_by_copies']:+.1%}"
            for e in ("dma", "sm")
            if e in row
        )
        for name, problem in row["failed"].items():
            print(f"failed: {name}: {problem}", flush=True)
        print(f"{time.monotonic() - begun:5.0f} s {shape} error {row['max_error']:.1e} {best}", flush=True)
    for shape in skipped:
        print(f"no time left for {shape}", flush=True)


if __name__ == "__main__":
    main()
