"""Speed of the simulator: block events per second, and growth with the number of blocks.

python benchmarks/sim/speed.py [--out benchmarks/results/sim/speed.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.execute.sim import SimExecutor
from weft.policy import Policy
from weft.sim.core import simulate_launches
from weft.workload import named


def timed(device: str, times: int = 1, repeats: int = 3) -> dict[str, Any]:
    """cb-ar with `times` as many blocks in each GEMM, each simulated on its own, not in batches."""
    run = SimExecutor(device)
    launches = run.launches(named("cb-ar"), Policy())
    launches = [
        one if one.comm else replace(one, runs=tuple((times * n, work) for n, work in one.runs))
        for one in launches
    ]
    seconds, events = float("inf"), 0
    for _ in range(repeats):
        start = time.perf_counter()
        events = simulate_launches(run.profile.machine(), launches).block_events
        seconds = min(seconds, time.perf_counter() - start)
    return {
        "device": run.device,
        "blocks_per_gemm": launches[0].blocks,
        "block_events": events,
        "seconds": round(seconds, 5),
        "million_events_per_s": round(events / seconds / 1e6, 2),
        "ns_per_event": round(seconds / events * 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sim/speed.json"))
    options = parser.parse_args()
    rows = [timed("a100", n) for n in (1, 2, 4, 8, 16, 32, 64)]
    rows += [timed(device) for device in ("a40", "h100", "h200-ghost", "mi300x")]
    for row in rows:
        print(row)
    document = {"command": "python " + " ".join(sys.argv), "machine": platform.machine(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
