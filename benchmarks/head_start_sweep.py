"""For which lengths of a collective does a head start help a persistent cuBLAS GEMM?

    WEFT_NCCL=libnccl.so.2 PYTHONPATH=src python benchmarks/head_start_sweep.py --out FILE    # 45 s
    PYTHONPATH=src python benchmarks/head_start_sweep.py --show FILE                         # the table again

GEMMs of 8192³ in bf16, each followed by an all-reduce of 0.85 to 1.1 times its length, with 4 to 12 CTAs for
each of two ranks on one GPU; all policies interleaved, in random order.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

from weft.execute.base import References
from weft.execute.worker import RemoteExecutor
from weft.policy import Policy
from weft.workload import Compute, Workload

GEMM = Compute(kind="gemm", shape=(8192, 8192, 8192))
RATIOS, CTAS, WAITS_US, ITERATIONS, ROUNDS = (0.85, 0.93, 1.0, 1.1), (4, 8, 12), (3, 5, 8, 12, 20), 6, 9
MODES = ("compute", "comm", "sequential")


def policies(ctas: int) -> dict[str, Policy]:
    found = {"plain": Policy(max_ctas=ctas), "prio": Policy(max_ctas=ctas, priority="high")}
    for us in WAITS_US:
        found[f"hs{us}"] = Policy(max_ctas=ctas, head_start_us=us)
        found[f"prio+hs{us}"] = Policy(max_ctas=ctas, priority="high", head_start_us=us)
    return found


def sweep(executor: RemoteExecutor) -> list[dict[str, Any]]:
    rows = []
    for ctas in CTAS:
        tried = policies(ctas)
        base = Workload(compute=GEMM, bytes=128 << 20, iterations=ITERATIONS)

        def alone(mode: str, workload: Workload = base, plain: Policy = tried["plain"]) -> float:
            return median(executor.measure(workload, plain, mode).ms for _ in range(7))

        scale = alone("compute") / alone("comm")
        for ratio in RATIOS:
            workload = base.but(bytes=int(base.bytes * scale * ratio) // 4096 * 4096)
            for policy in tried.values():
                executor.measure(workload, policy)
            samples: dict[str, list[float]] = {name: [] for name in tried}
            references: dict[str, list[float]] = {mode: [] for mode in MODES}
            for _ in range(ROUNDS):
                for name in random.sample(list(tried), len(tried)):
                    samples[name].append(executor.measure(workload, tried[name]).ms)
                for mode in MODES:
                    references[mode].append(executor.measure(workload, tried["plain"], mode).ms)
            rows.append({"ctas": ctas, "ratio": ratio, "refs": references, "samples": samples})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    shown = ("plain", "prio", "hs5", "prio+hs5", "hs20")
    print(f"{'CTAs':>5}{'length':>8}" + "".join(f"{name:>10}" for name in shown) + "   % of ideal")
    for row in rows:
        compute, comm, sequential = (median(row["refs"][mode]) for mode in MODES)
        references = References(sequential, compute, comm, ITERATIONS)
        fractions = [references.fraction_of_ideal(median(row["samples"][name])) or 0.0 for name in shown]
        print(f"{row['ctas']:>5}{comm / compute:>8.2f}" + "".join(f"{100 * f:>10.0f}" for f in fractions))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show:
        return show(json.loads(args.show.read_text())["rows"])
    with RemoteExecutor() as executor:
        machine, rows = executor.info(), sweep(executor)
    show(rows)
    if args.out:
        document = {"command": "python benchmarks/head_start_sweep.py", "machine": machine, "rows": rows}
        args.out.write_text(json.dumps(document) + "\n")
    return None


if __name__ == "__main__":
    main()
