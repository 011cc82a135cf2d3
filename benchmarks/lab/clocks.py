"""Which rows of the lab stay above the bound of the SMs because the GPU lowers its clock?

    WEFT_NCCL=libnccl.so.2 PYTHONPATH=src python3 benchmarks/lab/clocks.py --rows modern.jsonl --out DIR

The bound (docs/lab.md) uses the time of compute alone as its SM-time, which holds only at equal clocks. A GPU
at its power limit lowers its clock, and compute and a collective together may draw more than compute alone.
So each chosen policy in a result file of `weft bench` runs again for longer: compute alone, its collectives
alone, and both together, in random order, while NVML is read every few milliseconds. DIR/clocks.jsonl has a
line for each row: times, clocks, watts, time over bound, and time over the bound at the clock of the
overlapped run. Prints the table at the end.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.bench.results import append
from weft.errors import WeftError
from weft.execute.base import References
from weft.execute.clocks import Clocks
from weft.execute.worker import CUDA_FACTORY, RemoteExecutor
from weft.policy import Policy
from weft.workload import Workload

RANKS = 2
LONG_MS = 250.0  # length of a run: many times NVML's averaging window
READ_S = 0.004
ROUNDS = 5
Row = dict[str, Any]


class Sampled:
    """Clock and power from NVML, read by a thread during a run; empty without NVML."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks, self._stop = clocks, threading.Event()
        self._read: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(READ_S):
            self._read.append(self._clocks.read())

    def busy(self, name: str) -> float:
        """The mean of the later half of the samples taken at more than 85% of the highest power."""
        found = [one for one in self._read if name in one and "watts" in one]
        if not found:
            return 0.0
        most = max(one["watts"] for one in found)
        values = [one[name] for one in found if one["watts"] > 0.85 * most]
        return statistics.fmean(values[len(values) // 2 :])


def chosen(path: Path, only: str) -> list[dict[str, Any]]:
    """The rows of chosen policies that have a bound."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [r for r in rows if r.get("chosen") and r.get("bound_ms") and fnmatch.fnmatch(r["cell"], only)]


def measure(
    executor: RemoteExecutor, row: dict[str, Any], rounds: int, long_ms: float, sms: int
) -> dict[str, Any]:
    """A chosen policy, its compute and its collectives, each for about `long_ms`."""
    workload, policy = Workload.from_dict(row["workload"]), Policy.from_dict(row["policy"])
    iterations = max(workload.iterations, round(long_ms * workload.iterations / row["ms"]))
    workload = workload.but(iterations=iterations)
    ctas = policy.ctas_for(workload.collective, workload.whole_bytes) or row["baseline_ctas"]
    alone = Policy(max_ctas=ctas)
    runs = {"compute": (alone, "compute"), "comm": (alone, "comm"), "together": (policy, "overlap")}
    taken: dict[str, dict[str, list[float]]] = {
        label: {"ms": [], "sm_mhz": [], "watts": []} for label in runs
    }
    clocks = Clocks()
    for _ in range(rounds):
        for label in random.sample(list(runs), len(runs)):
            with Sampled(clocks) as sampled:
                taken[label]["ms"].append(executor.measure(workload, *runs[label]).ms)
            for name in ("sm_mhz", "watts"):
                taken[label][name].append(sampled.busy(name))
    found = {
        label: {name: statistics.median(v) for name, v in values.items()} for label, values in taken.items()
    }
    compute, together = found["compute"], found["together"]
    held = ctas * RANKS
    slower = compute["sm_mhz"] / together["sm_mhz"] if together["sm_mhz"] else 1.0
    times = {"at_own_clocks": compute["ms"], "at_its_clock": compute["ms"] * slower}
    over = {}
    for name, compute_ms in times.items():
        refs = References(compute_ms + found["comm"]["ms"], compute_ms, found["comm"]["ms"], iterations)
        over[name] = together["ms"] / refs.bound_ms(held, sms)
    return {
        "cell": row["cell"],
        "candidate": row["candidate"],
        "workload": workload.to_dict(),
        "policy": policy.to_dict(),
        "held_sms": held,
        "found": found,
        "samples": taken,
        "over_bound": over,
        "over_bound_of_the_row": row["over_bound"],
    }


def measured(rows: list[Row], measure: Callable[[Row], Row], path: Path, seconds: float) -> list[Row]:
    """Measure rows one by one until the time is over; a line in the file at `path` for each as it ends."""
    until, found = time.monotonic() + seconds, []
    for row in rows:
        if time.monotonic() > until:
            print("out of time", flush=True)
            break
        try:
            found.append(measure(row))
        except WeftError as error:
            print(f"{row['cell']}: {type(error).__name__}: {error}", flush=True)
            continue
        append(path, [found[-1]])
        print(f"{row['cell']} {found[-1]['over_bound']}", flush=True)
    return found


def mean_and_worst(name: str, values: list[float]) -> str:
    """A line below a table; empty if there are no values."""
    if not values:
        return ""
    mean = statistics.geometric_mean(values)
    return f"\n{name}: geometric mean {mean:.3f}, worst {max(values):.3f}, {len(values)} rows"


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row, and the means."""
    lines = [
        "| workload | policy | compute alone, MHz | together, MHz | together, W | over the bound "
        "| at its clock |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, over = row["found"], row["over_bound"]
        lines.append(
            f"| {row['cell']} | {row['candidate']} | {found['compute']['sm_mhz']:.0f} "
            f"| {found['together']['sm_mhz']:.0f} | {found['together']['watts']:.0f} "
            f"| {over['at_own_clocks']:.3f} | {over['at_its_clock']:.3f} |"
        )
    for name in ("at_own_clocks", "at_its_clock"):
        lines.append(mean_and_worst(name, [row["over_bound"][name] for row in rows]))
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", type=Path, required=True, help="a result file of `weft bench`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*", help="glob of workloads")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--long-ms", type=float, default=LONG_MS, help="milliseconds of a run")
    parser.add_argument("--sms", type=int, default=132)
    parser.add_argument("--factory", default=CUDA_FACTORY, help="another executor, such as a simulation")
    args = parser.parse_args()
    options = {} if args.factory == CUDA_FACTORY else {"name": "h200-ghost"}
    with RemoteExecutor(args.factory, options=options, under_shim=args.factory == CUDA_FACTORY) as executor:
        found = measured(
            chosen(args.rows, args.only),
            lambda row: measure(executor, row, args.rounds, args.long_ms, args.sms),
            args.out / "clocks.jsonl",
            args.seconds,
        )
    print(table(found))


if __name__ == "__main__":
    main()
