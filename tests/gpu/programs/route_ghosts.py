"""Two ghost ranks; their all-reduce's CTAs change as the program runs. Prints JSON about each phase."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time

import torch

from weft.comm import nccl
from weft.shim import binding, communicators
from weft.shim.stats import snapshot

LIMITS = (None, 4, 16, None, 16, 4, None)
BYTES = 64 << 20
REPEATS = 12


def main() -> None:
    torch.cuda.set_device(0)
    ranks = nccl.NcclRanks(nccl.load_nccl(), 2, 12)
    streams = [torch.cuda.Stream() for _ in range(2)]
    generator = torch.Generator("cuda").manual_seed(0)
    send = [torch.randn(BYTES // 4, device="cuda", generator=generator) for _ in range(2)]
    recv = [torch.empty_like(part) for part in send]
    heard: list[int] = []
    communicators.on_call(lambda key, count: heard.append(count), every=5)
    ranks.all_reduce(send, recv, streams)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    started = time.monotonic()
    communicators.prepare(4, 60)
    communicators.prepare(16, 60)
    prepare_s = time.monotonic() - started
    used = free - torch.cuda.mem_get_info()[0]
    phases = [phase(limit, ranks, send, recv, streams) for limit in LIMITS]
    communicators.route(None)
    fresh_ms = {}
    for limit in (4, 16):
        made = nccl.NcclRanks(ranks.library, 2, limit)
        fresh_ms[limit] = phase(None, made, send, recv, streams)["ms"]
        made.close()
    # Which kernels overlap with a collective is tracked even without a policy.
    binding.set_policy(None, track=True)
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a)  # the library's start-up takes longer than a collective
    torch.cuda.synchronize()
    for _ in range(8):
        ranks.all_reduce(send, recv, streams)
        torch.mm(a, a)
    torch.cuda.synchronize()
    beside = sum(kernel["beside"] for kernel in snapshot()["kernels"])
    binding.set_policy(None)
    communicators.route(16)
    communicators.release()
    ranks.all_reduce(send, recv, streams)
    torch.cuda.synchronize()
    found = communicators.communicators()
    result = {
        "prepare_s": prepare_s,
        "sibling_bytes": used,
        "phases": phases,
        "fresh_ms": fresh_ms,
        "beside": beside,
        "heard": heard[:4],
        "prepared_after_release": found[0].prepared,
        "keys": len({c.key for c in found}),
        "collectives": [c.collectives for c in found],
        "max_ctas": [c.max_ctas for c in found],
        "routed": snapshot()["routed"],
        "nccl": ranks.library.version_text,
    }
    with contextlib.suppress(Exception):
        ranks.close()
    result["left"] = len(communicators.communicators())
    print(json.dumps(result), flush=True)


def launches() -> dict[str, tuple[int, int]]:
    """For each communication kernel, its launches so far and the CTAs of the latest one."""
    found = (kernel for kernel in snapshot()["kernels"] if kernel["kind"] == "comm")
    return {f"{k['name']} {k['threads']} {k['shared_bytes']}": (k["launches"], k["ctas"]) for k in found}


def phase(limit, ranks, send, recv, streams) -> dict[str, object]:
    communicators.route(limit)
    before, times = launches(), []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(streams[0])
        ranks.all_reduce(send, recv, streams)
        last.record(streams[0])
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    digests = [hashlib.sha256(part.cpu().numpy().tobytes()).hexdigest() for part in recv]
    return {
        "limit": limit,
        "ctas": [ctas for name, (count, ctas) in launches().items() if count > before.get(name, (0, 0))[0]],
        "first_ms": times[0],
        "ms": statistics.median(times[2:]),
        "digests": digests,
    }


if __name__ == "__main__":
    main()
