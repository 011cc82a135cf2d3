"""What other ranks see when one leaves, differs or fails: all operations, forward and backward, over gloo.

    python benchmarks/ops/failures.py --ranks 3 --timeout 4 --out benchmarks/results/ops/failures.json

| kind | what the last rank does |
| --- | --- |
| leaves | its process ends before the call, or between forward and backward |
| absent | it raises an exception of its own and does not make the call |
| differs | its sizes differ, in the first call of a kind or in a later one |
| fails | its GEMM fails in the middle of the schedule |

Each other rank must get an error that names that rank within the group's timeout; afterwards the group must
work (differs, first call) or be torn down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "jobs" / "programs"))

from forked_ranks import run_ranks

import weft.ops.functions  # noqa: F401  (before the fork)
from weft.errors import WeftError
from weft.ops import all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter, run_messages

OPERATIONS = {
    "all_gather_matmul": lambda x, w: all_gather_matmul(x, [w, w], schedule="hetero-fused-1d")[0],
    "matmul_reduce_scatter": lambda x, w: matmul_reduce_scatter(x, w, schedule="hetero-fused-1d"),
    "all_to_all_matmul": lambda x, w: all_to_all_matmul(x, w, schedule="hetero-fused-1d"),
}
KINDS = ("leaves", "leaves in backward", "absent", "absent in backward", "differs", "differs later", "fails")


class OutOfMemoryForTestError(MemoryError):
    pass


def scenario(kind: str, operation: str, rank: int, ranks: int) -> tuple[str, float]:
    """The error that this rank got, and after how many seconds."""
    culprit = rank == ranks - 1
    call = OPERATIONS[operation]
    x, w = torch.ones(2 * ranks, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    if kind != "differs":
        call(x, w).sum().backward()
    made = call(x, w) if "backward" in kind else None
    dist.barrier()
    begun = time.monotonic()
    if culprit and kind.startswith("leaves"):
        os._exit(0)
    if culprit and kind.startswith("absent"):
        return "its own", 0.0
    try:
        if made is not None:
            made.sum().backward()
        elif kind.startswith("differs"):
            size = 5 if culprit else 4
            call(torch.ones(2 * ranks, size), torch.ones(size, size))
        else:
            if culprit:
                run_messages.perform = fail
            call(x, w)
            call(x, w)  # in a scatter or all-to-all a rank may already have all it needs from the failed one
    except (WeftError, OutOfMemoryForTestError) as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


def fail(*_: Any) -> None:
    raise OutOfMemoryForTestError("no memory for this matmul")


def check(kind: str, operation: str, ranks: int, timeout_s: float) -> dict[str, Any]:
    def of_rank(rank: int, ranks: int) -> None:
        error, seconds = scenario(kind, operation, rank, ranks)
        usable = None
        if kind == "differs":
            call = OPERATIONS[operation]
            usable = bool(torch.isfinite(call(torch.ones(2 * ranks, 3), torch.ones(3, 3))).all())
        begun = time.monotonic()
        if rank == ranks - 1 and kind.startswith("absent"):
            time.sleep(2 * timeout_s)  # it stays alive, but never calls
        dist.destroy_process_group()
        down = time.monotonic() - begun
        said = {"rank": rank, "error": error, "seconds": seconds, "usable": usable, "down_s": down}
        Path(folder, f"{rank}.json").write_text(json.dumps(said))

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, folder, timeout_s, of_rank)
        said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("?.json"))]
    others = [each for each in said if each["rank"] != ranks - 1]
    named = len(others) == ranks - 1 and all(f"rank {ranks - 1}" in each["error"] for each in others)
    slowest = max((each["seconds"] for each in others), default=-1.0)
    return {
        "operation": operation,
        "kind": kind,
        "ranks": ranks,
        "others_with_an_error_that_names_it": sum(f"rank {ranks - 1}" in each["error"] for each in others),
        "slowest_s": round(slowest, 2),
        "usable": all(each["usable"] for each in said) if kind == "differs" else None,
        "torn_down": len(others) == ranks - 1,
        "fine": bool(named and slowest <= timeout_s and all(each["usable"] is not False for each in said)),
        "example": others[0]["error"] if others else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for operation in OPERATIONS:
        for kind in KINDS:
            rows.append(check(kind, operation, given.ranks, given.timeout))
            print(rows[-1], flush=True)
    document = {
        "command": f"python benchmarks/ops/failures.py --ranks {given.ranks} --timeout {given.timeout:g}",
        "torch": torch.__version__,
        "timeout_s": given.timeout,
        "all_fine": all(row["fine"] for row in rows),
        "rows": rows,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if document["all_fine"] else 1)


if __name__ == "__main__":
    main()
