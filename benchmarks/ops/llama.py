"""A 4-layer Llama of transformers over gloo: torch's styles, weft.ops.parallelize and `weft run --ops`.

    python benchmarks/ops/llama.py --steps 50 --out benchmarks/results/ops/llama.json

Compares losses and gradient norms of each with torch's own styles, on 2 and 4 ranks, in fp32 and bf16;
resumes checkpoints on the same and on another number of ranks, and under the other implementation. Does not
measure speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

JOB = Path(__file__).with_name("llama_job.py")
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative tolerance of losses, over all steps."""
MOST_NORM = 3.0
"""Gradient norms may differ from the plain model's by this many times as much as torch's own styles do."""


class Jobs:
    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.count = folder, steps, 0

    def run(self, *arguments: object, ops: bool = False) -> dict[str, Any]:
        """The losses of one job, unmodified or under `weft run --ops`."""
        self.count += 1
        out = self.folder / f"{self.count}.json"
        stats = self.folder / f"{self.count}.stats.json"
        weft = [sys.executable, "-m", "weft", "run", "--ops", "--quiet", "--stats", str(stats), "--"]
        command = [sys.executable, str(JOB), "--steps", str(self.steps), "--out", str(out)]
        done = subprocess.run(
            [*(weft if ops else []), *command, *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "WEFT_OPS": "all", "WEFT_STORE": "/nonexistent/store"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{arguments}: {done.stderr[-3000:]}")
        made: dict[str, Any] = json.loads(out.read_text())
        if ops:
            made["ops"] = json.loads(stats.read_text())["ops"]["text"]
        return made


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def compare(
    jobs: Jobs, ranks: int, dtype: str, by: str, wanted: dict[str, Any], plain: dict[str, Any], **how: Any
) -> dict[str, Any]:
    given = ["--ranks", ranks, "--dtype", dtype, "--by", "weft" if by == "weft.ops.parallelize" else "torch"]
    compiled = ["--compiled"] if how.pop("compiled", False) else []
    got = jobs.run(*given, *compiled, **how)
    loss, norm = apart(got["losses"], wanted["losses"]), apart(got["norms"], wanted["norms"])
    of_torch, of_weft = (apart(each["norms"], plain["norms"]) for each in (wanted, got))
    row = {
        "ranks": ranks,
        "dtype": dtype,
        "way": by,
        "loss_apart": loss,
        "norm_apart": norm,
        "first_norm_apart": apart(got["norms"][:1], wanted["norms"][:1]),
        "norm_from_plain": of_weft,
        "norm_of_torch_from_plain": of_torch,
        "equal": loss <= TOLERANCE[dtype] and of_weft <= max(1e-4, MOST_NORM * of_torch),
    }
    return row | ({"ops": got["ops"]} if "ops" in got else {})


def resume(jobs: Jobs, ranks: int, then: int, by: tuple[str, str]) -> dict[str, Any]:
    """Save after half of the steps, and resume in another process."""
    folder, half = jobs.folder / f"checkpoint{jobs.count}", jobs.steps // 2
    first = jobs.run("--ranks", ranks, "--by", by[0], "--save", folder, "--at", half)
    second = jobs.run("--ranks", then, "--by", by[1], "--load", folder, "--at", half)
    rest = first["losses"][half:], first["norms"][half:]
    return {
        "ranks": ranks,
        "then": then,
        "by": by[0],
        "then_by": by[1],
        "state_bit_identical": first["saved"] == second["loaded"],
        "losses_bit_identical": (second["losses"], second["norms"]) == rest,
        "loss_apart": apart(second["losses"], rest[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compiled", action="store_true", help="also through torch.compile (minutes)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows, resumed = [], []
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(Path(folder), given.steps)
        for dtype in TOLERANCE:
            plain = jobs.run("--ranks", 1, "--dtype", dtype, "--by", "plain")
            for ranks in (2, 4):
                wanted = jobs.run("--ranks", ranks, "--dtype", dtype, "--by", "torch")
                rows.append(compare(jobs, ranks, dtype, "weft.ops.parallelize", wanted, plain))
                rows.append(compare(jobs, ranks, dtype, "weft run --ops", wanted, plain, ops=True))
                if given.compiled and dtype == "float32" and ranks == 2:
                    way = "weft run --ops, torch.compile"
                    rows.append(compare(jobs, ranks, dtype, way, wanted, plain, ops=True, compiled=True))
                print(*rows[-2:], sep="\n", flush=True)
        ours, torchs = ("weft", "weft"), ("weft", "torch")
        for ranks, then, by in ((2, 2, ours), (4, 4, ours), (4, 2, ours), (2, 4, ours), (4, 2, torchs)):
            resumed.append(resume(jobs, ranks, then, by))
            print(resumed[-1], flush=True)
    fine = all(row["equal"] for row in rows) and all(row["state_bit_identical"] for row in resumed)
    same = [row for row in resumed if row["ranks"] == row["then"] and row["by"] == row["then_by"]]
    document = {
        "command": f"python benchmarks/ops/llama.py --steps {given.steps}"
        + (" --compiled" if given.compiled else ""),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": "Llama, 4 layers, 64 wide, 8 heads, 4 key and value heads; batch 4, 32 tokens; AdamW",
        "all_equal": fine and all(row["losses_bit_identical"] for row in same),
        "rows": rows,
        "resumed": resumed,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if document["all_equal"] else 1)


if __name__ == "__main__":
    main()
