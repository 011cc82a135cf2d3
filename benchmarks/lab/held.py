"""What keeps the lab's chosen policies above the bound of the SMs: whole SMs, or contention?

    WEFT_NCCL=libnccl.so.2 PYTHONPATH=src python3 -m weft run -- \
        python3 benchmarks/lab/held.py --rows modern.jsonl --out DIR

The bound (docs/lab.md) divides SM-time as if it were a liquid. So each chosen policy in a result file of
`weft bench` runs again next to two pipelines that are the same but for the collective, which is replaced by
a kernel with NCCL's shape that holds its SMs and moves no data.

    held       each kernel holds its SMs for as long as the collective takes alone
    stretched  each kernel holds its SMs for as long as the collective takes next to compute, from its stream
               being ready to its end: that includes a wait for SMs

`held` over the bound is what whole SMs, waves of blocks and placement cost. `stretched` over `held` is what
the longer collective costs. The measured time over `stretched` is what compute loses to a collective that
moves data. Samples are interleaved. DIR/held.jsonl has a line for each row. Prints the table at the end.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from clocks import RANKS, chosen, mean_and_worst, measured

from weft.comm.node import load_node
from weft.comm.paced_kernel import KernelArguments, kernel_text
from weft.comm.paced_launch import ReadyLaunch, launch_config
from weft.comm.paced_plan import CYCLES_PER_NS
from weft.execute import spans
from weft.execute.base import References
from weft.execute.cuda import CudaExecutor
from weft.execute.payload import Buffers
from weft.execute.rank_makers import NcclMaker
from weft.gpu.driver import Attribute, load_driver
from weft.policy import Policy
from weft.timeline import Kind
from weft.workload import COLLECTIVES, Workload

NAME = "ncclDevKernel_Held"  # policies act on NCCL's kernels, which they recognize by their names
SHAPE_OF = "dgx-h100"
MOST_NS = 10**9  # a kernel that holds SMs ends after that by its clock, whatever its timer says


class Holder:
    """Launches kernels that hold SMs for `hold_ns`."""

    def __init__(self) -> None:
        self._driver = load_driver()
        self._shape = load_node(SHAPE_OF).kernel
        self._threads = self._shape.threads_of("ring")
        self._function: Any = None
        self._launches: dict[tuple[int, int], ReadyLaunch] = {}
        self._arguments = KernelArguments(most_cycles=CYCLES_PER_NS * MOST_NS)
        self.hold_ns = 0

    def hold(self, ns: int) -> None:
        """Hold SMs for this long from now on; 0: run the collectives."""
        self.hold_ns, self._arguments.move_ns = ns, ns

    def launch(self, ctas: int, stream: Any) -> None:
        """Launch one rank's kernel."""
        key = ctas, stream.cuda_stream
        if key not in self._launches:
            shape, function = self._shape, self._loaded()
            config = launch_config(
                ctas, self._threads, shape.shared_bytes, shape.cluster_of(ctas), stream.cuda_stream
            )
            self._launches[key] = ReadyLaunch(self._driver, function, config, self._arguments, leads=True)
        self._launches[key].launch(0.0)

    def _loaded(self) -> Any:
        if self._function is None:
            known = self._driver.attribute
            capability = 10 * known(0, Attribute.COMPUTE_CAPABILITY_MAJOR)
            module = self._driver.load(kernel_text(NAME, "copy1", self._threads, capability))
            self._function = self._driver.function(module, NAME)
            most = known(0, Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            self._driver.allow_dynamic_shared(self._function, most)
        return self._function


class HeldMaker(NcclMaker):
    """Makes communicators whose collectives only hold SMs while the holder has a time to hold them."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self._holder = holder

    def __call__(self, size: int, ctas: int | None) -> Any:
        return _Ranks(super().__call__(size, ctas), self._holder, ctas or 0)


class _Ranks:
    def __init__(self, real: Any, holder: Holder, ctas: int) -> None:
        self._real, self._holder, self._ctas = real, holder, ctas

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name not in COLLECTIVES:
            return real

        def issue(send: Any, recv: Any, streams: list[Any]) -> None:
            if not self._holder.hold_ns:
                real(send, recv, streams)
                return
            for stream in streams:
                self._holder.launch(self._ctas, stream)

        return issue


@contextmanager
def holding(holder: Holder, ns: int) -> Iterator[None]:
    """Hold SMs instead of running collectives; nothing is received that could be checked."""
    holder.hold(ns)
    try:
        with mock.patch.object(Buffers, "check"):
            yield
    finally:
        holder.hold(0)


def stretched_ns(executor: CudaExecutor, workload: Workload, policy: Policy) -> int:
    """How long a collective takes next to compute. From events: a profiler would slow what follows."""
    with mock.patch.object(spans, "record_timeline", return_value=None):
        timeline = executor.timeline(workload, policy)
    took = (timeline.end_ns - timeline.start_ns)[timeline.kind == Kind.COMM]
    return int(statistics.median(took[:-1].tolist()))  # nothing runs next to the last one


def measure(
    executor: CudaExecutor, holder: Holder, row: dict[str, Any], rounds: int, sms: int
) -> dict[str, Any]:
    """A chosen policy, its parts alone, and the two pipelines that hold SMs."""
    workload, policy = Workload.from_dict(row["workload"]), Policy.from_dict(row["policy"])
    ctas = policy.ctas_for(workload.collective, workload.whole_bytes) or row["baseline_ctas"]
    alone = Policy(max_ctas=ctas)

    def sample(policy: Policy, mode: str, ns: int = 0) -> float:
        if not ns:
            return executor.measure(workload, policy, mode).ms
        with holding(holder, ns):
            return executor.measure(workload, policy, mode).ms

    first = statistics.median(sample(alone, "comm") for _ in range(3))
    sample(policy, "overlap")
    stretched = statistics.median(stretched_ns(executor, workload, policy) for _ in range(3))
    held_ns, stretched_held_ns = round(1e6 * first / workload.iterations), round(stretched)
    runs: dict[str, Callable[[], float]] = {
        "compute": lambda: sample(alone, "compute"),
        "comm": lambda: sample(alone, "comm"),
        "together": lambda: sample(policy, "overlap"),
        "held": lambda: sample(policy, "overlap", held_ns),
        "stretched": lambda: sample(policy, "overlap", stretched_held_ns),
    }
    for run in runs.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            samples[name].append(runs[name]())
    ms = {name: statistics.median(values) for name, values in samples.items()}
    refs = References(ms["compute"] + ms["comm"], ms["compute"], ms["comm"], workload.iterations)
    bound = refs.bound_ms(ctas * RANKS, sms)
    return {
        "cell": row["cell"],
        "candidate": row["candidate"],
        "workload": workload.to_dict(),
        "policy": policy.to_dict(),
        "held_sms": ctas * RANKS,
        "held_us": held_ns / 1e3,
        "stretched_us": stretched_held_ns / 1e3,
        "ms": ms,
        "samples_ms": samples,
        "bound_ms": bound,
        "over_bound": {name: ms[name] / bound for name in ("held", "stretched", "together")},
        "over_stretched": ms["together"] / ms["stretched"],
        "over_bound_of_the_row": row["over_bound"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row, and the means."""
    lines = [
        "| workload | policy | collective next to compute, times its time alone | held, over the bound "
        "| stretched, over the bound | measured, over the bound | measured, over stretched |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        over = row["over_bound"]
        lines.append(
            f"| {row['cell']} | {row['candidate']} | {row['stretched_us'] / row['held_us']:.2f} "
            f"| {over['held']:.3f} | {over['stretched']:.3f} | {over['together']:.3f} "
            f"| {row['over_stretched']:.3f} |"
        )
    for name in ("held", "stretched", "together"):
        lines.append(mean_and_worst(f"{name}, over the bound", [row["over_bound"][name] for row in rows]))
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", type=Path, required=True, help="a result file of `weft bench`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*", help="glob of workloads")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    holder = Holder()
    executor = CudaExecutor(ranks=HeldMaker(holder))
    sms = executor.info()["sm_count"]
    found = measured(
        sorted(chosen(args.rows, args.only), key=lambda row: -float(row["over_bound"])),
        lambda row: measure(executor, holder, row, args.rounds, sms),
        args.out / "held.jsonl",
        args.seconds,
    )
    print(table(found))


if __name__ == "__main__":
    main()
