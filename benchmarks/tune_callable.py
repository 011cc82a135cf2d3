"""Compare `weft.tune(fn)` with `weft tune` on a real GPU.

    python benchmarks/tune_callable.py [--out FILE] [--budget 60]

One GPU, two ghost ranks: a pipeline of our Triton GEMM and an all-reduce, as a plain Python callable. The
script starts itself again under the shim. It ends by itself after `--deadline` seconds, come what may.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from pathlib import Path

import weft
from weft.files import write_whole


def main() -> None:
    parser = argparse.ArgumentParser(description="weft.tune(fn) on this machine's GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--deadline", type=int, default=300)
    given = parser.parse_args()
    weft.restart()
    signal.alarm(given.deadline)

    from weft.execute.cuda import CudaExecutor
    from weft.workload import named

    executor = CudaExecutor()
    workload = named("cb-ar").but(ranks=2, iterations=4)
    _, pipeline = executor._ready(workload, weft.Policy(), "overlap")

    def step() -> None:
        pipeline.issue(workload.iterations, 0.0)

    begun = time.monotonic()
    tuned = weft.tune(step, budget_s=given.budget)
    took_s = time.monotonic() - begun
    print(tuned.text)
    for one in sorted(tuned.candidates, key=lambda one: one.ms or math.inf):
        print(f"{one.candidate:40} {one.ms or math.nan:8.3f} ms  {one.problem}")
    again = []
    for policy in (weft.Policy(), tuned.policy) * 5:  # its effect when applied
        with weft.overlap(policy):
            step()
            executor._gpu.synchronize()
            start = time.perf_counter()
            step()
            executor._gpu.synchronize()
            again.append((policy.is_neutral, 1e3 * (time.perf_counter() - start)))
    document = {**tuned.to_dict(), "took_s": took_s, "applied_ms": again, "info": executor.info()}
    document["candidates"] = [one.to_dict() for one in tuned.candidates]
    if given.out is not None:
        write_whole(given.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
