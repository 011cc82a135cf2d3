"""Do paced collectives share a GPU with compute as NCCL's own do? Real and paced, same CTAs, same length.

    WEFT_NCCL=/path/to/libnccl.so.2 python3 -m weft run -- python3 benchmarks/node/like_nccl.py --out FILE \
        [--parts slowdown placement]

Real: two NCCL ranks on this GPU, each with its CTAs, as in the lab. Paced: the same two ranks as paced
collectives, which last as long alone as the real ones. For each compute operation:

- slowdown: how much longer it takes while collectives run back to back (bar: within 3 points of each other).
  Two real ranks on one GPU wait for each other's SMs while compute runs, so real collectives then take up to
  1.7 times as long as paced ones. `stretched` are paced ones that take as long as the real ones then do;
- placement: what a control changes in the pipeline of the lab, relative to plain overlap (bar: the same sign
  wherever the real effect is over 2%).

Rounds are interleaved, figures are medians with their 95% intervals. Ends by itself before --seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
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
from weft.measure.intervals import bootstrap_ci, ratio_ci
from weft.policy import Policy, Rule
from weft.workload import Compute, Workload

RANKS, ITERATIONS, ROUNDS = 2, 8, 9
MiB = 1 << 20
COMPUTES = {
    "cuBLAS": Compute(kind="gemm", shape=(8192, 8192, 8192)),
    "attention": Compute(kind="attention", shape=(2, 32, 4096, 128)),
    "Triton GEMM": Compute(kind="triton_gemm", shape=(8192, 8192, 4096), tile=(64, 64, 64)),
    "LayerNorm": Compute(kind="layer_norm", shape=(16384, 8192), repeat=8),
}
SETTINGS = ((8, 0.8), (4, 0.8), (8, 1.2))
"""CTAs per rank, and the collective's duration relative to the compute's."""
CONTROLS = {
    "priority": Policy(priority="high"),
    "head start 5 us": Policy(head_start_us=5.0),
    "head start placed": Policy(head_start="placed"),
}
RESIDENCY = {"priority, residency 3": Policy(priority="high", rules=(Rule("weft_gemm", 3),))}


class FixedNode:
    """Stands in for a node profile: every collective takes the time this run measured for the real one."""

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
    """Makes both ranks as paced collectives on this GPU. Each uses its own data as everyone's."""

    mirrored = True

    def __init__(self, node: FixedNode) -> None:
        self.node, self._launcher = node, PacedLauncher(load_driver())

    def __call__(self, size: int, ctas: int | None) -> Any:
        library = paced.load_paced(self.node, paced.Lateness(), launcher=self._launcher)  # type: ignore[arg-type]
        return nccl.NcclRanks(library, size, ctas)

    def info(self) -> dict[str, Any]:
        return {"nccl": "paced"}


class Lab(CudaExecutor):
    """Two of these share a process, so each applies its policy before every measurement."""

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> PipelineSample:
        self._applied = None
        return super().measure(workload, policy, mode)


def median_ms(lab: Lab, workload: Workload, policy: Policy, mode: str, times: int = 4) -> float:
    return statistics.median(lab.measure(workload, policy, mode).ms for _ in range(times))


def sized(real: Lab, workload: Workload, share: float, compute_ms: float, ctas: int) -> Workload:
    """The workload with a collective that takes `share` times as long as its compute."""
    size = 64 * MiB
    for _ in range(3):
        workload = workload.but(bytes=size)
        took = median_ms(real, workload, Policy(max_ctas=ctas), "comm", 3)
        size = max(4 * MiB, round(size * share * compute_ms / took) // MiB * MiB)
    return workload.but(bytes=size)


def same_length(labs: dict[str, Lab], node: FixedNode, workload: Workload, ctas: int) -> dict[str, float]:
    """Make the paced collective as long as the real one, alone; the library must ask for the figures anew."""
    policy = Policy(max_ctas=ctas)
    real = median_ms(labs["real"], workload, policy, "comm")
    node.us = 1e3 * real / workload.iterations - 3.0
    for _ in range(3):
        labs["paced"]._communicators.clear()  # also drops the figures that the library keeps
        took = median_ms(labs["paced"], workload, policy, "comm")
        node.us = max(1.0, node.us + 1e3 * (real - took) / workload.iterations)
    labs["paced"]._communicators.clear()
    return {"real_ms": real, "paced_ms": median_ms(labs["paced"], workload, policy, "comm")}


def placement(labs: dict[str, Lab], workload: Workload, ctas: int, name: str) -> list[dict[str, Any]]:
    """The effect of each control on the overlapped pipeline, real and paced."""
    controls = {**CONTROLS, **(RESIDENCY if name == "Triton GEMM" else {})}
    policies = {"plain": Policy(max_ctas=ctas)}
    policies |= {label: replace(one, max_ctas=ctas) for label, one in controls.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for kind, lab in labs.items():
            for label, policy in policies.items():
                times.setdefault((kind, label), []).append(lab.measure(workload, policy).ms)
    plain = {f"plain_{kind}_ms": round(statistics.median(times[kind, "plain"]), 3) for kind in labs}
    rows = []
    for label in controls:
        row: dict[str, Any] = {"control": label}
        for kind in labs:
            effect = [100 * (ratio - 1) for ratio in ratio_ci(times[kind, label], times[kind, "plain"])]
            row[f"{kind}_pct"], *row[f"{kind}_ci"] = (round(value, 2) for value in effect)
        rows.append({**row, **plain})
    return rows


class Concurrent:
    """Compute while collectives run back to back, real or paced."""

    def __init__(self, gpu: TorchGpu, ranks: dict[str, Any], compute: Compute, elements: int) -> None:
        self.gpu, self.ranks = gpu, ranks
        self.lane, self.streams = gpu.stream(), [gpu.stream() for _ in range(RANKS)]
        with gpu.on(self.lane):
            self.call = build_compute(compute, gpu.device)
        data = [torch.ones(elements, dtype=torch.bfloat16, device=gpu.device) for _ in range(2 * RANKS)]
        self.sent, self.received = data[:RANKS], data[RANKS:]

    def run(self, kind: str, collectives: int, computes: int, marks: list[Any] | None = None) -> float:
        """Milliseconds of `computes` calls, the first of them 0.2 ms after the first collective.

        With `marks`, an event per collective and those around the compute are appended to it.
        """
        begin, end = self.gpu.event(timing=True), self.gpu.event(timing=True)
        with self.gpu.on(self.lane):
            self.gpu.sleep(6.0)
            started = self.gpu.event()
            started.record(self.lane)
        for stream in self.streams:
            stream.wait_event(started)
        for _ in range(collectives):
            self.ranks[kind].all_reduce(self.sent, self.received, self.streams)
            if marks is not None:
                marks.append(self.gpu.event(timing=True))
                marks[-1].record(self.streams[0])
        with self.gpu.on(self.lane):
            self.gpu.sleep(0.2)  # the first collective is running
            begin.record(self.lane)
            for _ in range(computes):
                self.call()
            end.record(self.lane)
        self.gpu.synchronize()
        if marks is not None:
            marks += [begin, end]
        return self.gpu.elapsed_ms(begin, end)

    def collective_ms(self, kind: str, collectives: int, computes: int) -> float:
        """Milliseconds per collective while compute runs, including the gap to the next."""
        marks: list[Any] = []
        self.run(kind, collectives, computes, marks)
        *ends, begin, end = marks
        within = [
            mark
            for mark in ends
            if self.gpu.elapsed_ms(begin, mark) > 0 and self.gpu.elapsed_ms(mark, end) > 0
        ]
        if len(within) < 2:
            return math.nan
        return self.gpu.elapsed_ms(within[0], within[-1]) / (len(within) - 1)


def slowdown(
    gpu: TorchGpu, makers: dict[str, Any], compute: Compute, workload: Workload, ctas: int, length_ms: float
) -> dict[str, Any]:
    """Percent by which compute takes longer while collectives run back to back, and how long they then take.

    "again" is the real one a second time in every round: the difference that chance alone makes.
    """
    ranks = {"real": real_pair(makers["real"], ctas), "paced": makers["paced"](RANKS, ctas)}
    pair = Concurrent(gpu, ranks, compute, workload.elements)
    pair.run("real", 0, 4)
    per_call = statistics.median(pair.run("real", 0, 4) for _ in range(3)) / 4
    computes = max(4, round(12 / per_call))
    collectives = max(4, round(2.2 * computes * per_call / length_ms) + 2)
    for kind in ranks:
        pair.run(kind, 2, 1)
    shape = collectives, computes
    found = compared(pair, shape, {"real": "real", "paced": "paced", "again": "real"})
    lengths = {kind: concurrent_ms(pair, kind, shape) for kind in ranks}
    # The library has one server, the latest: from here on `paced` is stretched, too.
    stretch(pair, makers["paced"], ctas, shape, lengths["real"])
    longer = compared(pair, shape, {"real": "real", "stretched": "stretched"})
    lengths["stretched"] = concurrent_ms(pair, "stretched", shape)
    apart = {label: minus(found[label], found["real"]) for label in ("paced", "again")}
    apart["stretched"] = minus(longer["stretched"], longer["real"])
    found["stretched"] = longer["stretched"]
    return {
        "slowdown_pct": {label: round(statistics.median(values), 2) for label, values in found.items()},
        **{f"{label}_minus_real": values for label, values in apart.items()},
        "collective_ms": {kind: round(ms, 4) for kind, ms in lengths.items()},
    }


def compared(pair: Concurrent, shape: tuple[int, int], kinds: dict[str, str]) -> dict[str, list[float]]:
    """Percent by which compute takes longer, by label; one figure per round."""
    found: dict[str, list[float]] = {label: [] for label in kinds}
    for _ in range(2 * ROUNDS):
        alone = pair.run("real", 0, shape[1])
        for label, kind in kinds.items():
            found[label].append(100 * (pair.run(kind, *shape) / alone - 1))
    return found


def minus(some: list[float], real: list[float]) -> list[float]:
    """The median of the differences with its interval, in percentage points."""
    apart = [a - b for a, b in zip(some, real, strict=True)]
    return [round(value, 2) for value in (statistics.median(apart), *bootstrap_ci(apart))]


def concurrent_ms(pair: Concurrent, kind: str, shape: tuple[int, int]) -> float:
    """Milliseconds that a collective takes while compute runs."""
    return statistics.median(pair.collective_ms(kind, *shape) for _ in range(5))


def stretch(pair: Concurrent, make: PacedPair, ctas: int, shape: tuple[int, int], wanted_ms: float) -> None:
    """Add paced ranks whose collectives take `wanted_ms` while compute runs."""
    alone_us = make.node.us
    for _ in range(4):
        pair.ranks["stretched"] = make(RANKS, ctas)
        pair.run("stretched", 2, 1)
        took = concurrent_ms(pair, "stretched", shape)
        if not abs(took / wanted_ms - 1) > 0.02:  # nan, too: fewer than two collectives ended
            break
        make.node.us = max(1.0, make.node.us + 1e3 * (wanted_ms - took))
    make.node.us = alone_us


@cache
def real_pair(make: Any, ctas: int) -> Any:
    return make(RANKS, ctas)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=125.0)
    parser.add_argument(
        "--parts", nargs="+", choices=("slowdown", "placement"), default=["slowdown", "placement"]
    )
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
                row |= {
                    "bytes": workload.bytes,
                    **{k: round(v, 3) for k, v in lengths.items()},
                    "us": round(node.us, 1),
                }
                length_ms = lengths["real_ms"] / ITERATIONS
                if "slowdown" in args.parts:
                    row |= slowdown(gpu, makers, compute, workload, ctas, length_ms)
                labs["paced"]._communicators.clear()  # the library has one server, the latest
                if "placement" in args.parts:
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
    """The bars. `certain`: neither interval of an effect includes zero."""
    slow = [r for r in rows if "slowdown_pct" in r]
    apart, apart_stretched = (
        sorted(abs(r[f"{kind}_minus_real"][0]) for r in slow) for kind in ("paced", "stretched")
    )
    effects = [p for r in rows for p in r.get("placement", ())]
    large = [p for p in effects if abs(p["real_pct"]) > 2]
    certain = [p for p in large if all(low * high > 0 for low, high in (p["real_ci"], p["paced_ci"]))]
    return {
        "cases": len(apart),
        "slowdown_apart_points": [round(points, 2) for points in apart],
        "slowdown_within_3": sum(points <= 3 for points in apart),
        "stretched_apart_points": [round(points, 2) for points in apart_stretched],
        "stretched_within_3": sum(points <= 3 for points in apart_stretched),
        "real_apart_from_itself": sorted(abs(r["again_minus_real"][0]) for r in slow),
        "effects_over_2_pct": len(large),
        "same_sign": sum(p["real_pct"] * p["paced_pct"] > 0 for p in large),
        "certain": len(certain),
        "certain_same_sign": sum(p["real_pct"] * p["paced_pct"] > 0 for p in certain),
    }


if __name__ == "__main__":
    main()
