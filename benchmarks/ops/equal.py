"""Random calls of weft.ops next to plain torch, on 1, 2, 3, 4 and 8 ranks over gloo.

    python benchmarks/ops/equal.py --calls 6000 --seed 7 --out benchmarks/results/ops/equal.json

Every option is drawn: operation, dtype (fp8 with scales included), schedule, engine, pieces, policy,
dimension, several weights, bias, return_A, gradients, out, strides, uneven rows and blocks, group, inference
mode. The reference is computed in fp64 from all ranks' tensors (`tests/jobs/programs/ops_fuzz.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from provenance import ROOT, provenance

PROGRAM = ROOT / "tests" / "jobs" / "programs" / "ops_fuzz.py"
SHARES = {1: 0.2, 2: 0.28, 3: 0.22, 4: 0.2, 8: 0.1}
"""Share of all calls, by number of ranks."""


def run(ranks: int, calls: int, seed: int) -> dict[str, object]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(ranks), str(calls), str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "WEFT_STORE": "/nonexistent/store"},
        capture_output=True,
        text=True,
        check=False,
    )
    row = {
        "ranks": ranks,
        "calls": calls,
        "equal": done.returncode == 0 and f"{calls} calls on {ranks} ranks" in done.stdout,
        "seconds": round(time.monotonic() - started, 1),
    }
    if not row["equal"]:
        row["error"] = done.stderr[-2000:]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    measured_with = provenance()
    rows = []
    for ranks, share in SHARES.items():
        rows.append(run(ranks, round(given.calls * share), given.seed))
        print(rows[-1], flush=True)
    document = {
        "command": f"python benchmarks/ops/equal.py --calls {given.calls} --seed {given.seed}",
        **measured_with,
        "calls": sum(int(row["calls"]) for row in rows),
        "all_equal": all(row["equal"] for row in rows),
        "rows": rows,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if document["all_equal"] else 1)


if __name__ == "__main__":
    main()
