"""Cost of a sibling communicator, and whether its CTA limit takes effect.

    WEFT_NCCL=libnccl.so.2 python benchmarks/nccl_split.py --out FILE

Two ranks on one GPU with 12 CTAs, split by `ncclCommSplit` to other limits: seconds for the split and for the
first collective, GPU memory, and milliseconds of a 64 MiB all-reduce.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import torch

from weft.comm import nccl

RANKS, OWN_CTAS, LIMITS, REPEATS = 2, 12, (4, 8, 16, 24, 32), 20


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of sibling communicators")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    library = nccl.load_nccl()
    split = library._handle.ncclCommSplit
    split.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
    split.argtypes += (ctypes.POINTER(nccl.Config),)
    torch.zeros(1, device="cuda")
    ranks = nccl.NcclRanks(library, RANKS, OWN_CTAS)
    own = ranks._comms
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    send = [torch.randn(32 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(RANKS)]
    recv = [torch.empty_like(part) for part in send]

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            ranks.all_reduce(send, recv, streams)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    seconds(5)
    rows: list[dict[str, Any]] = [{"ctas": OWN_CTAS, "own": True, "ms": 1e3 * seconds(REPEATS)}]
    want = recv[0].clone()
    for ctas in LIMITS:
        free = torch.cuda.mem_get_info()[0]
        config = nccl.make_config(ctas)
        config.splitShare, config.minCTAs = 0, 1
        siblings = [ctypes.c_void_p() for _ in range(RANKS)]
        begin = time.perf_counter()
        with library.group():
            for rank, (old, new) in enumerate(zip(own, siblings, strict=True)):
                library.call("ncclCommSplit", old, 0, rank, ctypes.byref(new), ctypes.byref(config))
        row: dict[str, Any] = {"ctas": ctas, "split_s": time.perf_counter() - begin}
        ranks._comms = siblings
        row |= {"first_s": seconds(1), "ms": 1e3 * seconds(REPEATS), "equal": torch.equal(want, recv[0])}
        rows.append(row | {"mib": (free - torch.cuda.mem_get_info()[0]) >> 20})
    out.write_text(json.dumps({"nccl": library.version_text, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
