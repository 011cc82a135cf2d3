"""The exact head start and SMs kept free, against plain overlap and the timed head start, on one GPU.

    WEFT_NCCL=/path/to/libnccl.so.2 PYTHONPATH=src python3 benchmarks/lab/placed.py --out DIR [--seconds 190]

Three parts, each with a share of the time; samples are interleaved:

    grid      cuBLAS 8192³ with an all-reduce of 0.5 to 1.5 times its length; 4, 8, 12 and 16 CTAs per rank
    modern    the lab's `modern` suite, with 4, 8, 12 and 16 CTAs per rank
    clusters  the grid's middle with NCCL_CGA_CLUSTER_SIZE=1, so that collectives fit on SMs kept free

Every finished cell is appended to DIR/placed.jsonl: the times alone; for each policy the time, the fraction
of ideal, the fraction of own ideal, and the time over the SM bound. A table is printed at the end; `--table`
prints it from an existing file.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import statistics
import sys
import time
import unittest.mock
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.bench.results import append
from weft.bench.runner import HANGS_ALLOWED
from weft.bench.suites import MODERN_COMPUTE, suite
from weft.errors import UnavailableError, UsageError, WeftError
from weft.execute.base import HungError, References
from weft.execute.worker import CUDA_FACTORY, RemoteExecutor
from weft.policy import Policy
from weft.workload import DTYPE_BYTES, Workload

RANKS, ITERATIONS = 2, 6
RATIOS, CTAS = (0.5, 0.8, 1.0, 1.2, 1.5), (4, 8, 12, 16)
GUESS_BYTES = 64 << 20
DEADLINE_S = 15.0
SHARES = {"grid": 0.55, "modern": 0.33, "clusters": 0.12}


def policies(ctas: int) -> dict[str, Policy]:
    held = RANKS * ctas
    return {
        "plain": Policy(max_ctas=ctas),
        "timed": Policy(max_ctas=ctas, head_start_us=5),
        "placed": Policy(max_ctas=ctas, head_start="placed"),
        "reserve": Policy(max_ctas=ctas, sm_reserve=held),
        "placed+reserve": Policy(max_ctas=ctas, head_start="placed", sm_reserve=held),
    }


class Lab:
    """A worker and the collective sizes that it has found."""

    def __init__(self, out: Path, until: float, sms: int, environment: dict[str, str], factory: str) -> None:
        self.out, self.until, self.sms = out, until, sms
        options = {} if factory == CUDA_FACTORY else {"name": "h200-ghost"}
        with unittest.mock.patch.dict(os.environ, environment):  # the worker inherits it
            self.executor = RemoteExecutor(
                factory, options=options, deadline_s=DEADLINE_S, under_shim=factory == CUDA_FACTORY
            )
        self.rates: dict[tuple[Any, ...], float] = {}
        self.refused: dict[str, str] = {}
        self.hangs: Counter[str] = Counter()

    def over(self) -> bool:
        return time.monotonic() > self.until

    def ms(self, workload: Workload, policy: Policy, mode: str = "overlap") -> float:
        return self.executor.measure(workload, policy, mode).ms

    def sized(self, workload: Workload, share: float, ctas: int) -> Workload:
        """The workload with a collective that, alone, takes `share` of the time of compute alone."""
        compute = statistics.median(self.ms(workload, Policy(), "compute") for _ in range(3))
        policy = Policy(max_ctas=ctas)
        part = workload.ranks * DTYPE_BYTES[workload.compute.dtype] * 512
        key = (workload.collective, ctas)
        sized = workload
        for _ in range(3):  # the bandwidth depends on the size
            rate = self.rates.get(key)
            size = GUESS_BYTES if rate is None else share * compute * rate
            sized = workload.but(bytes=max(part, round(size / part) * part))
            took = statistics.median(self.ms(sized, policy, "comm") for _ in range(2))
            self.rates[key] = sized.bytes / took
            if abs(took / (share * compute) - 1) < 0.03:
                break
        return sized

    def cell(self, part: str, name: str, workload: Workload, share: float, ctas: int, rounds: int) -> None:
        workload = self.sized(workload, share, ctas)
        wanted = {label: p for label, p in policies(ctas).items() if label not in self.refused}
        alone = Policy(max_ctas=ctas)
        tries: list[tuple[str, Policy, str]] = [(label, p, "overlap") for label, p in wanted.items()]
        tries += [(mode, alone, mode) for mode in ("sequential", "compute", "comm")]
        samples: dict[str, list[float]] = {label: [] for label, _, _ in tries}
        problems: dict[str, str] = {}
        for done in range(rounds):
            if done >= 3 and self.over():
                break
            for label, policy, mode in random.sample(tries, len(tries)):
                if label in problems:
                    continue
                try:
                    samples[label].append(self.ms(workload, policy, mode))
                except WeftError as error:
                    problems[label] = f"{type(error).__name__}: {error}"
                    self.hangs[label] += isinstance(error, HungError)
                    refused = type(error) in (UsageError, UnavailableError)  # rather than out of memory
                    if refused or self.hangs[label] >= HANGS_ALLOWED:
                        self.refused[label] = str(error)
        row = self.row(samples, workload, ctas)
        row |= {"part": part, "cell": name, "ratio": share, "ctas": ctas, "problems": problems}
        append(self.out / "placed.jsonl", [row])
        print(line(row), flush=True)

    def row(self, samples: dict[str, list[float]], workload: Workload, ctas: int) -> dict[str, Any]:
        ms = {label: statistics.median(values) for label, values in samples.items() if values}
        held = RANKS * ctas
        row: dict[str, Any] = {"workload": workload.to_dict(), "ms": ms, "samples_ms": samples}
        if not {"sequential", "compute", "comm"} <= set(ms):
            return row
        refs = References(ms["sequential"], ms["compute"], ms["comm"], workload.iterations)
        own = References(refs.compute_ms + refs.comm_ms, refs.compute_ms, refs.comm_ms, workload.iterations)
        bound = refs.bound_ms(held, self.sms)
        row |= {"ideal_ms": refs.ideal_ms, "bound_ms": bound, "held_sms": held}
        over = [label for label in ms if label not in ("sequential", "compute", "comm")]
        row["fraction_of_ideal"] = {label: refs.fraction_of_ideal(ms[label]) for label in over}
        row["fraction_of_own_ideal"] = {label: own.fraction_of_ideal(ms[label]) for label in over}
        row["over_bound"] = {label: ms[label] / bound for label in over}
        return row

    def stats(self) -> dict[str, Any]:
        found = self.executor.shim_stats()
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['part']:8} {row['cell']:22} {row['ratio']:4g} {row['ctas']:3}"]
    fractions, over = row.get("fraction_of_ideal", {}), row.get("over_bound", {})
    for label, factor in over.items():
        fraction = fractions[label]
        cells.append(f"{label} {'—' if fraction is None else f'{100 * fraction:.0f}%'} {factor:.3f}")
    cells += [f"{label}: {problem[:80]}" for label, problem in row["problems"].items()]
    return "  ".join(cells)


def grid() -> Iterator[tuple[str, Workload, float, int]]:
    """The bar first: ratio 1.2 with 8 CTAs; then the rest in an order that covers the corners early."""
    base = Workload(compute=MODERN_COMPUTE["cublas-8192"], collective="all_reduce", ranks=RANKS)
    base = base.but(iterations=ITERATIONS)
    for ratio in (1.2, 0.5, 1.0, 0.8, 1.5):
        for ctas in (8, 4, 16, 12):
            yield "cublas-8192", base, ratio, ctas


def modern() -> Iterator[tuple[str, Workload, float, int]]:
    for ctas in (8, 16, 4, 12):
        for cell in suite("modern").cells:
            assert cell.comm_share is not None
            yield cell.name, cell.workload, cell.comm_share, ctas


def clusters() -> Iterator[tuple[str, Workload, float, int]]:
    for name, workload, ratio, ctas in grid():
        if ratio in (0.8, 1.2) and ctas in (4, 8):
            yield name, workload, ratio, ctas


def table(rows: list[dict[str, Any]]) -> str:
    """Placed against timed head start over all cells, and time over the SM bound by part and policy."""
    lines = []
    whole = [row for row in rows if {"placed", "timed"} <= set(row.get("over_bound", {}))]
    slower = sorted((r["ms"]["placed"] / r["ms"]["timed"], r["cell"], r["ratio"], r["ctas"]) for r in whole)
    if slower:
        factor, cell, ratio, ctas = slower[-1]
        middle = statistics.median(s[0] for s in slower)
        worst = f"worst {factor:.4f} ({cell} at {ratio:g} with {ctas} CTAs)"
        lines.append(f"placed over timed: median {middle:.4f}, {worst} of {len(slower)} cells")
    for part in SHARES:
        for label in policies(1):
            found = [
                r["over_bound"][label] for r in rows if r["part"] == part and label in r.get("over_bound", {})
            ]
            if found:
                mean = statistics.geometric_mean(found)
                lines.append(
                    f"{part:9} {label:15} over bound {mean:.3f}, worst {max(found):.3f}, {len(found)} cells"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--only", default="*", help="glob of cells, such as 'llama70b-up-ar-1-ctas*'")
    parser.add_argument("--factory", default=CUDA_FACTORY, help="another executor, such as a simulation")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    args = parser.parse_args()
    path = args.out / "placed.jsonl"
    if not args.table:
        measure(args)
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    print(table([row for row in rows if "part" in row]))


def measure(args: argparse.Namespace) -> None:
    start = time.monotonic()
    cells = {"grid": grid, "modern": modern, "clusters": clusters}
    total = sum(SHARES[part] for part in args.parts)
    spent = 0.0
    for part in args.parts:
        spent += SHARES[part] / total
        environment = {"NCCL_CGA_CLUSTER_SIZE": "1"} if part == "clusters" else {}
        lab = Lab(args.out, start + spent * args.seconds, args.sms, environment, args.factory)
        try:
            for name, workload, ratio, ctas in cells[part]():
                if lab.over():
                    break
                if not fnmatch.fnmatch(f"{name}-ctas{ctas}", args.only):
                    continue
                try:
                    lab.cell(part, name, workload, ratio, ctas, args.rounds)
                except WeftError as error:
                    print(f"{part} {name} {ratio:g} {ctas}: {type(error).__name__}: {error}", flush=True)
            found = {"stats": lab.stats(), "of": part, "info": lab.executor.info(), "refused": lab.refused}
            append(args.out / "placed.jsonl", [found])
            print(found["stats"], lab.refused, flush=True)
        finally:
            lab.executor.close()


if __name__ == "__main__":
    main()
