"""Two ghost ranks whose collectives follow rules that change while the program runs. Prints JSON about each phase.

With an argument, it only writes the policy that it must be started with to that file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import statistics
import sys
import time

import torch
from route_ghosts import launches

from weft.comm import nccl
from weft.policy import CommRule, Policy
from weft.shim import apply, communicators
from weft.shim.stats import snapshot

WITH_CONFIG = communicators.expected_path(nccl.load_nccl().version, os.environ)[0] == "config"
SIZES = (1 << 16, 1 << 22, 1 << 26)
REPEATS = 8
CTAS = Policy(
    comm_rules=(
        CommRule(collective="all_reduce", max_bytes=1 << 18, ctas=2),
        CommRule(collective="all_reduce", max_bytes=1 << 24, ctas=4),
        CommRule(collective="all_reduce", ctas=8, cluster=0 if WITH_CONFIG else None),
        CommRule(collective="all_gather", ctas=3),
        CommRule(collective="all_to_all", ctas=1),
    )
)
TREE = Policy(comm_rules=(CommRule(collective="all_reduce", algorithm="tree", ctas=4),))
RING_LL = Policy(comm_rules=(CommRule(algorithm="ring", protocol="ll", ctas=4),))
SIMPLE = Policy(comm_rules=(CommRule(algorithm="ring", protocol="simple", ctas=4, chunk=32768),))
START = Policy(comm_rules=(CommRule(collective="send_recv", ctas=2),))
"""The policy at the start: it fixes the channels of sends and receives for good."""
PHASES = {
    "plain": START,
    "ctas": CTAS,
    "tree": TREE,
    "ring ll": RING_LL,
    "simple": SIMPLE,
    "end": START,
}


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def measured(issue, *arguments, streams) -> dict[str, object]:
    """CTAs of the kernels that `issue` launches, and the milliseconds of one call."""
    before, times = launches(), []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(streams[0])
        issue(*arguments)
        last.record(streams[0])
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    changed = {
        name: ctas for name, (count, ctas) in launches().items() if count > before.get(name, (0, 0))[0]
    }
    return {
        "ctas": sorted(set(changed.values())),
        "kernels": sorted(changed),
        "ms": statistics.median(times[2:]),
    }


def all_to_all(ranks, send, recv, streams) -> None:
    function = ranks.library._handle.ncclAlltoAll
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    with ranks.library.group():
        for rank in range(2):
            count = send[rank].numel() // 2
            done = function(
                send[rank].data_ptr(),
                recv[rank].data_ptr(),
                count,
                7,
                ranks._comms[rank],
                streams[rank].cuda_stream,
            )
            assert done == 0, done


def phase(name, ranks, streams, data) -> dict[str, object]:
    print(f"phase {name}", flush=True)
    apply.apply(PHASES[name], START)
    calls, digests = {}, []
    for size in SIZES:
        send, recv = data[size]
        calls[f"all_reduce {size}"] = measured(ranks.all_reduce, send, recv, streams, streams=streams)
        digests += [hashlib.sha256(part.cpu().numpy().tobytes()).hexdigest() for part in recv]
    send, recv = data[SIZES[1]]
    half = [part[: part.numel() // 2] for part in send]
    calls["all_gather"] = measured(ranks.all_gather, half, recv, streams, streams=streams)
    digests += [hashlib.sha256(part.cpu().numpy().tobytes()).hexdigest() for part in recv]
    if hasattr(ranks.library._handle, "ncclAlltoAll"):
        calls["all_to_all"] = measured(all_to_all, ranks, send, recv, streams, streams=streams)
        digests += [hashlib.sha256(part.cpu().numpy().tobytes()).hexdigest() for part in recv]
    return {"name": name, "calls": calls, "digests": digests, "free": free_bytes()}


def main() -> None:
    torch.cuda.set_device(0)
    started = time.monotonic()
    ranks = nccl.NcclRanks(nccl.load_nccl(), 2, 12)
    streams = [torch.cuda.Stream() for _ in range(2)]
    generator = torch.Generator("cuda").manual_seed(0)
    # Whole numbers: their sum does not depend on the order, so results can be compared bit by bit.
    data = {
        size: (
            [
                torch.randint(-99, 99, (size // 4,), device="cuda", generator=generator).float()
                for _ in range(2)
            ],
            [torch.empty(size // 4, device="cuda") for _ in range(2)],
        )
        for size in SIZES
    }
    # One limit for all collectives needs no sibling and no memory. This runs before any all-to-all, which the
    # tuner plugin does not see.
    send, recv = data[SIZES[2]]
    measured(ranks.all_reduce, send, recv, streams, streams=streams)
    before = free_bytes()
    communicators.prepare(6, 30)
    communicators.route(6)
    limited = measured(ranks.all_reduce, send, recv, streams, streams=streams)
    added = before - free_bytes()
    communicators.route(None)
    phases = [phase(name, ranks, streams, data) for name in PHASES]
    send, recv = data[SIZES[2]]
    exchanged = measured(ranks.all_to_all, send, recv, streams, streams=streams)
    # A captured call keeps the job's policy, whatever a trial sets.
    apply.apply(CTAS, START)
    captured = capture(ranks, streams, data[SIZES[2]])
    apply.apply(START, START)
    (found, *_) = communicators.communicators()
    counted = snapshot()
    result = {
        "nccl": ranks.library.version_text,
        "path": found.path,
        "tuner": found.tuner,
        "why": communicators.path_reason(found.path, found.nccl, found.tuner),
        "phases": phases,
        "limited": limited,
        "limit_bytes": added,
        "captured": captured,
        "exchanged": exchanged,
        "counters": {
            name: counted[name]
            for name in ("per_call", "tuned", "config_refused", "tuner_failures", "rules_unapplied", "routed")
        },
        "seconds": time.monotonic() - started,
    }
    with contextlib.suppress(Exception):
        ranks.close()
    print(json.dumps(result), flush=True)
    os._exit(0)


def capture(ranks, streams, pair) -> dict[str, object]:
    """CTAs of an all-reduce captured while a trial's rules were in force, and if its result is correct."""
    send, recv = pair
    recv[0].zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="relaxed"):
        streams[1].wait_stream(streams[0])
        ranks.all_reduce(send, recv, streams)
        streams[0].wait_stream(streams[1])
    before = launches()
    graph.replay()
    torch.cuda.synchronize()
    changed = [ctas for name, (count, ctas) in launches().items() if count > before.get(name, (0, 0))[0]]
    return {"ctas": sorted(set(changed)), "equal": bool(torch.equal(recv[0], send[0] + send[1]))}


if __name__ == "__main__":
    if sys.argv[1:]:
        START.save(sys.argv[1])
    else:
        main()
