"""Model families of transformers under `weft.ops.parallelize` over gloo, against the plain model.

    python benchmarks/ops/families.py --ranks 2 4 --out benchmarks/results/ops/families.json

For each family: the relative difference of the loss and of the gradients of a tiny model (fp32), or the error
that refused it, with the model unchanged (`tests/jobs/programs/ops_families.py`). Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from provenance import ROOT, provenance

PROGRAM = ROOT / "tests" / "jobs" / "programs" / "ops_families.py"


def run(ranks: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(ranks), folder],
            env={**os.environ, "OMP_NUM_THREADS": "1", "WEFT_STORE": "/nonexistent/store"},
            capture_output=True,
            text=True,
            check=False,
        )
    families = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    equal = [each for each in families if "loss_apart" in each]
    row = {
        "ranks": ranks,
        "passed": done.returncode == 0 and f"families are equal on {ranks} ranks" in done.stdout,
        "equal": len(equal),
        "refused": len(families) - len(equal),
        "worst_loss": max((each["loss_apart"] for each in equal), default=None),
        "worst_gradient": max((each["gradients_apart"] for each in equal), default=None),
        "families": families,
    }
    if not row["passed"]:
        row["error"] = done.stderr[-2000:]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    measured_with = {**provenance(), "transformers": transformers.__version__}
    rows = []
    for ranks in given.ranks:
        rows.append(run(ranks))
        print({key: value for key, value in rows[-1].items() if key != "families"}, flush=True)
    document = {
        "command": f"python benchmarks/ops/families.py --ranks {' '.join(map(str, given.ranks))}",
        **measured_with,
        "rows": rows,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
