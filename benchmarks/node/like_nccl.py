"""Do paced collectives share a GPU with compute as NCCL's own do? Real and paced, same CTAs, same length.

    WEFT_NCCL=/path/to/libnccl.so.2 python3 -m weft run -- python3 benchmarks/node/like_nccl.py --out FILE

Real: two NCCL ranks on this GPU, each with its CTAs, as in the lab. Paced: the same two ranks as paced
collectives, which last as long alone as the real ones. For each compute operation:

- slowdown: how much longer it takes while collectives run back to back (bar: within 3 points of each other);
- placement: what a control changes in the pipeline of the lab, relative to plain overlap (bar: the same sign
  wherever the real effect is over 2%).

Rounds are interleaved, figures are medians. Ends by itself before --seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from weft.comm import nccl, paced
from weft.comm.node import Paced
from weft.comm.node_kernel import memory_traffic
from weft.comm.paced_launch import PacedLauncher
from weft.errors import WeftError
from weft.execute.base import PipelineSample
from weft.execute.compute import build_compute
from weft.execute.cuda import CudaExecutor
from weft.execute.gpu import TorchGpu
from weft.gpu.driver import load_driver
from weft.policy import Policy, Rule
from weft.workload import Compute, Workload

RANKS, ITERATIONS, ROUNDS = 2, 8, 7
MiB = 1 << 20
COMPUTES = {
    "cuBLAS": Compute(kind="gemm", shape=(8192, 8192, 8192)),
    "attention": Compute(kind="attention", shape=(2, 32, 4096, 128)),
    "Triton GEMM": Compute(kind="triton_gemm", shape=(8192, 8192, 4096), tile=(64, 64, 64)),
    "LayerNorm": Compute(kind="layer_norm", shape=(16384, 8192), repeat=8),
}
SETTINGS = ((8, 0.8), (4, 0.8), (8, 1.2))
"""CTAs per rank, and the collective's length relative to the compute's."""
CONTROLS = {
    "priority": Policy(priority="high"),
    "head start 5 us": Policy(head_start_us=5.0),
    "head start placed": Policy(head_start="placed"),
}
RESIDENCY = {"priority, residency 3": Policy(priority="high", rules=(Rule("weft_gemm", 3),))}


class FixedNode:
    """In place of a node profile: every collective takes what this run measured for the real one."""

    name = "like_nccl"

    def __init__(self) -> None:
        self.us = 100.0

    def collective(
        self,
        kind: str,
        nbytes: int,
        ctas: int | None = None,
        ranks: int | None = None,
        algorithm: str | None = None,
    ) -> Paced:
        read, write = memory_traffic(kind, nbytes, ranks or RANKS, "ring")
        return Paced(self.us, ctas or 8, 544, 4, 119040, 96, read, write, "measured", None, "ring")


class PacedPair:
    """Makes both ranks as paced collectives on this GPU. Each has its own data for all."""

    mirrored = True

    def __init__(self, node: FixedNode) -> None:
        self.node, self._launcher = node, PacedLauncher(load_driver())

    def __call__(self, size: int, ctas: int | None) -> Any:
        library = paced.load_paced(self.node, paced.Lateness(), launcher=self._launcher)  # type: ignore[arg-type]
        return nccl.NcclRanks(library, size, ctas)

    def info(self) -> dict[str, Any]:
        return {"nccl": "paced"}


class Lab(CudaExecutor):
    """Two of these share a process, so that each applies its policy before every measurement."""

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> PipelineSample:
        self._applied = None
        return super().measure(workload, policy, mode)


def median_ms(lab: Lab, workload: Workload, policy: Policy, mode: str, times: int = 4) -> float:
    return statistics.median(lab.measure(workload, policy, mode).ms for _ in range(times))


def sized(real: Lab, workload: Workload, share: float, compute_ms: float, ctas: int) -> Workload:
    """The workload with a collective of `share` times the compute's length."""
    size = 64 * MiB
    for _ in range(3):
        workload = workload.but(bytes=size)
        took = median_ms(real, workload, Policy(max_ctas=ctas), "comm", 3)
        size = max(4 * MiB, round(size * share * compute_ms / took) // MiB * MiB)
    return workload.but(bytes=size)


def same_length(labs: dict[str, Lab], node: FixedNode, workload: Workload, ctas: int) -> dict[str, float]:
    """Let the paced collective last as long as the real one, alone. The node's figures are asked for anew."""
    policy = Policy(max_ctas=ctas)
    real = median_ms(labs["real"], workload, policy, "comm")
    node.us = 1e3 * real / workload.iterations - 3.0
    for _ in range(3):
        labs["paced"]._communicators.clear()  # with them the figures that the library keeps
        took = median_ms(labs["paced"], workload, policy, "comm")
        node.us = max(1.0, node.us + 1e3 * (real - took) / workload.iterations)
    labs["paced"]._communicators.clear()
    return {"real_ms": real, "paced_ms": median_ms(labs["paced"], workload, policy, "comm")}


def placement(labs: dict[str, Lab], workload: Workload, ctas: int, name: str) -> list[dict[str, Any]]:
    """By control: what it changes in the overlapped pipeline, real and paced."""
    controls = {**CONTROLS, **(RESIDENCY if name == "Triton GEMM" else {})}
    policies = {"plain": Policy(max_ctas=ctas)}
    policies |= {label: replace(one, max_ctas=ctas) for label, one in controls.items()}
    ratios: dict[tuple[str, str], list[float]] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for kind, lab in labs.items():
            took = {label: lab.measure(workload, policy).ms for label, policy in policies.items()}
            for label, ms in took.items():
                times.setdefault((kind, label), []).append(ms)
                ratios.setdefault((kind, label), []).append(ms / took["plain"])
    rows = []
    for label in controls:
        effect = {kind: 100 * (statistics.median(ratios[kind, label]) - 1) for kind in labs}
        rows.append({"control": label, **{f"{kind}_pct": round(value, 2) for kind, value in effect.items()}})
    plain = {f"plain_{kind}_ms": round(statistics.median(times[kind, "plain"]), 3) for kind in labs}
    return [{**row, **plain} for row in rows]


def slowdown(
    gpu: TorchGpu, makers: dict[str, Any], compute: Compute, workload: Workload, ctas: int
) -> dict[str, float]:
    """Percent by which compute takes longer while collectives run back to back."""
    lane, streams = gpu.stream(), [gpu.stream() for _ in range(RANKS)]
    with gpu.on(lane):
        call = build_compute(compute, gpu.device)
    data = [torch.ones(workload.elements, dtype=torch.bfloat16, device=gpu.device) for _ in range(2 * RANKS)]
    ranks = {"real": real_pair(makers["real"], ctas), "paced": makers["paced"](RANKS, ctas)}

    def once(kind: str, collectives: int, computes: int) -> float:
        begin, end = gpu.event(timing=True), gpu.event(timing=True)
        with gpu.on(lane):
            gpu.sleep(6.0)
            started = gpu.event()
            started.record(lane)
        for stream in streams:
            stream.wait_event(started)
        for _ in range(collectives):
            ranks[kind].all_reduce(data[:RANKS], data[RANKS:], streams)
        with gpu.on(lane):
            gpu.sleep(0.2)  # the first collective is running
            begin.record(lane)
            for _ in range(computes):
                call()
            end.record(lane)
        gpu.synchronize()
        return gpu.elapsed_ms(begin, end)

    alone = once("real", 0, 4)
    per_call = statistics.median(once("real", 0, 4) for _ in range(3)) / 4
    computes = max(4, round(12 / per_call))
    length = workload_length(workload)
    collectives = max(4, round(2.2 * computes * per_call / length) + 2)
    found: dict[str, list[float]] = {kind: [] for kind in ranks}
    for kind in ranks:
        once(kind, 2, 1)
    for _ in range(ROUNDS):
        alone = once("real", 0, computes)
        for kind in ranks:
            found[kind].append(100 * (once(kind, collectives, computes) / alone - 1))
    return {kind: statistics.median(values) for kind, values in found.items()}


@cache
def real_pair(make: Any, ctas: int) -> Any:
    return make(RANKS, ctas)


_lengths: dict[int, float] = {}


def workload_length(workload: Workload) -> float:
    """Milliseconds of the workload's collective alone, as `same_length` measured it."""
    return _lengths[workload.bytes]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=85.0)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds + 12, exit=True)
    until = time.monotonic() + args.seconds
    gpu, node = TorchGpu(), FixedNode()
    makers: dict[str, Callable[..., Any]] = {"real": NcclReal(), "paced": PacedPair(node)}
    labs = {
        "real": Lab(gpu=gpu, ranks=makers["real"]),
        "paced": Lab(gpu=gpu, ranks=makers["paced"]),
    }
    rows: list[dict[str, Any]] = []
    for ctas, share in SETTINGS:
        for name, compute in COMPUTES.items():
            if time.monotonic() > until - 8:
                break
            row: dict[str, Any] = {"compute": name, "ctas": ctas, "share": share}
            try:
                workload = Workload(compute=compute, ranks=RANKS, iterations=ITERATIONS)
                compute_ms = median_ms(labs["real"], workload.but(bytes=64 * MiB), Policy(), "compute", 3)
                workload = sized(labs["real"], workload, share, compute_ms, ctas)
                lengths = same_length(labs, node, workload, ctas)
                _lengths[workload.bytes] = lengths["real_ms"] / ITERATIONS
                row |= {
                    "bytes": workload.bytes,
                    **{k: round(v, 3) for k, v in lengths.items()},
                    "us": round(node.us, 1),
                }
                row["slowdown_pct"] = {
                    kind: round(value, 2)
                    for kind, value in slowdown(gpu, makers, compute, workload, ctas).items()
                }
                row["placement"] = placement(labs, workload, ctas, name)
            except WeftError as error:
                row["error"] = str(error)
            rows.append(row)
            print(json.dumps(row), flush=True)
            document = {"gpu": gpu.info(), "nccl": makers["real"].info(), "rows": rows, **summary(rows)}
            args.out.write_text(json.dumps(document, indent=1))
    print(json.dumps(summary(rows)))


class NcclReal:
    """Both ranks as NCCL's."""

    def __init__(self) -> None:
        self.library = nccl.load_nccl()

    def __call__(self, size: int, ctas: int | None) -> Any:
        return nccl.NcclRanks(self.library, size, ctas)

    def info(self) -> dict[str, Any]:
        return {"nccl": self.library.version_text}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The bars."""
    slow = [r["slowdown_pct"] for r in rows if "slowdown_pct" in r]
    apart = [round(abs(s["real"] - s["paced"]), 2) for s in slow]
    effects = [p for r in rows for p in r.get("placement", ())]
    large = [p for p in effects if abs(p["real_pct"]) > 2]
    same = [p for p in large if p["real_pct"] * p["paced_pct"] > 0]
    return {
        "cases": len(apart),
        "slowdown_apart_points": sorted(apart),
        "slowdown_within_3": sum(a <= 3 for a in apart),
        "effects_over_2_pct": len(large),
        "same_sign": len(same),
    }


if __name__ == "__main__":
    main()
