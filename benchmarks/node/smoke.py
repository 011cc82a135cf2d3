"""Paced collectives on a GPU, in about 30 s: do they load, last as long as asked, and give right results?

    python3 -m weft run --stats stats.json -- python3 benchmarks/node/smoke.py [--node dgx-h100]

Prints one JSON object; every part has its own entry, and a part that fails has its error there.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.comm import ghost, nccl, paced, paced_launch
from weft.comm.node import load_node
from weft.gpu.driver import FunctionAttribute, load_driver

DEADLINE_S = 100
MiB = 1 << 20


def event_us(issue: Callable[[], None], stream: Any, times: int = 12) -> float:
    """Median microseconds of one call between two events on its stream, launched while the GPU waits."""
    found = []
    for _ in range(times):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_500_000)
        first.record(stream)
        issue()
        last.record(stream)
        torch.cuda.synchronize()
        found.append(1e3 * first.elapsed_time(last))
    return statistics.median(found[2:])


def durations(name: str) -> dict[str, Any]:
    """Requested and measured microseconds of collectives alone on the GPU."""
    node, library = load_node(name), paced.load_paced(load_node(name))
    ranks = nccl.NcclRanks(library, node.ranks, own=0)
    stream = torch.cuda.Stream()
    rows = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for size in (4096, MiB, 32 * MiB, 512 * MiB):
            whole = torch.ones(size // 2, device="cuda", dtype=torch.bfloat16)
            part = torch.ones(size // 2 // node.ranks, device="cuda", dtype=torch.bfloat16)
            other = torch.ones_like(whole)
            send, recv = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(
                kind, (whole, other)
            )
            for ctas in (None, 4):
                limited = ranks if ctas is None else nccl.NcclRanks(library, node.ranks, ctas, own=0)
                asked = node.collective(kind, size, ctas)
                call = getattr(limited, kind)
                took = event_us(lambda: call([send], [recv], [stream]), stream)  # noqa: B023
                rows.append([kind, size, ctas, asked.ctas, round(asked.us, 2), round(took, 2)])
    started = time.perf_counter()
    for _ in range(200):
        ranks.all_reduce([part], [part], [stream])
    host_us = 1e6 * (time.perf_counter() - started) / 200
    torch.cuda.synchronize()
    return {"columns": "kind bytes limit ctas asked_us took_us", "rows": rows, "host_us": round(host_us, 1)}


def saturation(name: str) -> dict[str, Any]:
    """Bus bandwidth of a large all-gather by CTAs, and the fewest that reach 95% of the largest."""
    node, library = load_node(name), paced.load_paced(load_node(name))
    whole = torch.ones(256 * MiB, device="cuda", dtype=torch.bfloat16)
    part, stream = whole[: whole.numel() // node.ranks].clone(), torch.cuda.Stream()
    rows = []
    for ctas in (1, 2, 4, 8, 16, 24):
        ranks = nccl.NcclRanks(library, node.ranks, ctas, own=0)
        took = event_us(lambda: ranks.all_gather([part], [whole], [stream]), stream, 6)  # noqa: B023
        rows.append([ctas, round(512 * MiB * (node.ranks - 1) / node.ranks / took / 1e3, 1)])
    most = max(rate for _, rate in rows)
    return {"gb_s": rows, "saturates_at": next(ctas for ctas, rate in rows if rate >= 0.95 * most)}


def timer() -> dict[str, Any]:
    """Steps of %globaltimer, and the registers and resident blocks of the kernel."""
    driver = load_driver()
    launcher = paced_launch.PacedLauncher(driver)
    text = """.version 7.0
.target sm_80
.address_size 64
.visible .entry weft_timer(.param .u64 out)
{
  .reg .b64 %o, %t; .reg .b32 %i; .reg .pred %p;
  ld.param.u64 %o, [out];
  mov.u32 %i, 0;
L:
  mov.u64 %t, %globaltimer;
  st.global.u64 [%o], %t;
  add.u64 %o, %o, 8;
  add.u32 %i, %i, 1;
  setp.lt.u32 %p, %i, 4000;
  @%p bra L;
  ret;
}
"""
    import ctypes

    out = torch.zeros(4000, dtype=torch.int64, device="cuda")
    function = driver.function(driver.load(text), "weft_timer")
    driver.launch(function, 1, 1, ctypes.c_void_p(0), ctypes.c_uint64(out.data_ptr()))
    torch.cuda.synchronize()
    steps = out.diff()
    from weft.comm.paced_plan import RankCall, plan_calls

    (planned,) = plan_calls([RankCall("all_reduce", 0, 0, 4096, "bfloat16", 0, 0, 0, 8, 0, 0)])
    device = launcher._device()
    kernel = launcher._function(device, planned, 544)
    return {
        "globaltimer_steps_ns": sorted(set(steps[steps > 0].tolist()))[:4],
        "registers": driver.function_attribute(kernel, FunctionAttribute.NUM_REGS),
        "blocks_per_sm": driver.blocks_per_sm(kernel, 544, 82 << 10),
        "capability": device.capability,
    }


def rates() -> list[list[Any]]:
    """GB/s, reads plus writes, that unpaced CTAs can move: the limit of the pacing."""
    from dataclasses import replace

    from weft.comm.paced_plan import RankCall, plan_calls

    launcher, stream = paced_launch.PacedLauncher(load_driver()), torch.cuda.Stream()
    part = load_node("dgx-h100").collective("all_reduce", 256 * MiB)
    x = torch.ones(128 * MiB, device="cuda", dtype=torch.bfloat16)
    rows = []
    for times in (1, 3):
        for ctas in (1, 4, 8, 16, 24, 32):
            address, size = x.data_ptr(), (256 if ctas > 1 else 32) * MiB
            call = RankCall(
                "all_reduce", address, address, size, "bfloat16", 0, 0, 0, 8, stream.cuda_stream, 0
            )
            free = replace(part, us=0.0, ctas=ctas, read_bytes=times * size, write_bytes=times * size)
            took = event_us(lambda: launcher.launch(plan_calls([call])[0], free), stream, 6)  # noqa: B023
            total = 2 * times * size / took / 1e3
            rows.append([times, ctas, round(total, 1), round(total / ctas, 1)])
    return rows


def results() -> dict[str, Any]:
    """torch.distributed on this GPU as rank 0 of the node: values of every collective."""
    ghost.init(8, ghost.GhostOptions(max_ctas=None, node=os.environ["WEFT_NODE"]))
    wrong: list[str] = []

    def check(name: str, got: Any, wanted: Any) -> None:
        torch.cuda.synchronize()
        if not torch.equal(got, wanted):
            wrong.append(f"{name}: {got.flatten()[:4].tolist()} not {wanted.flatten()[:4].tolist()}")

    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
    ):
        for count in (1, 1001, 65537, 3_000_000):
            x = (torch.arange(count, device="cuda") % 13).to(dtype)
            for op, factor in (("SUM", 8), ("MAX", 1)):
                y = x.clone()
                dist.all_reduce(y, op=getattr(dist.ReduceOp, op))
                check(f"all_reduce {op} {dtype} {count}", y, x * factor)
            y = torch.zeros(count + 1, dtype=dtype, device="cuda")[1:]  # misaligned
            y.copy_(x)
            dist.all_reduce(y)
            check(f"misaligned all_reduce {dtype} {count}", y, x * 8)
            out = torch.zeros(8 * count, dtype=dtype, device="cuda")
            dist.all_gather_into_tensor(out, x)
            check(f"all_gather {dtype} {count}", out, x.repeat(8))
            part = torch.zeros(count, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(part, out)
            check(f"reduce_scatter {dtype} {count}", part, x * 8)
            dist.all_to_all_single(out, x.repeat(8))
            check(f"all_to_all {dtype} {count}", out, x.repeat(8))
    x = torch.arange(24.0, device="cuda")
    out = torch.full((45,), -1.0, device="cuda")
    dist.all_to_all_single(
        out, torch.arange(36.0, device="cuda"), [1, 2, 3, 4, 5, 6, 7, 17], list(range(1, 9))
    )
    check("uneven all_to_all", out, torch.zeros_like(out))
    y = torch.ones(5, device="cuda")
    dist.recv(y, src=3)
    check("recv", y, torch.zeros_like(y))
    y = x.clone()
    dist.broadcast(y, src=5)
    check("broadcast", y, x)
    pairs = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, torch.empty_like(x), 1)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    return {"wrong": wrong, "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)}


def copies(name: str) -> dict[str, Any]:
    """Copy-engine collectives as delays: requested and measured times, kernels, slowdown of a GEMM."""
    from weft.policy import Policy
    from weft.shim import apply
    from weft.shim.stats import snapshot

    node, library = load_node(name), paced.load_paced(load_node(name))
    ranks, stream = nccl.NcclRanks(library, node.ranks, own=0), torch.cuda.Stream()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows, slowed, right = [], {}, True
    for kind in ("all_gather", "all_to_all"):
        for size in (MiB, 32 * MiB, 512 * MiB):
            whole = torch.zeros(size // 2, device="cuda", dtype=torch.bfloat16)
            part = torch.randn(size // 2 // node.ranks, device="cuda").to(torch.bfloat16)
            send = part if kind == "all_gather" else part.repeat(node.ranks)
            ranks.register([whole])
            call = getattr(ranks, kind)
            for engine in ("sm", "dma"):
                apply.apply(Policy(engine=engine), Policy())
                for _ in range(3):  # new data each time, in the same buffers
                    send.mul_(-1.5)
                    torch.cuda.synchronize()
                    call([send], [whole], [stream])
                    torch.cuda.synchronize()
                    right = right and torch.equal(whole, send[: part.numel()].repeat(node.ranks))
                before = snapshot()
                took = event_us(lambda: call([send], [whole], [stream]), stream)  # noqa: B023
                after = snapshot()
                asked = node.copied(kind, size) if engine == "dma" else node.collective(kind, size)
                counts = [after[key] - before[key] for key in ("comm_launches", "engine_copied")]
                rows.append([kind, size, engine, round(asked.us, 2), round(took, 2), *counts])
                if size == 512 * MiB:
                    slowed[f"{kind} {engine}"] = gemm_slowdown(
                        lambda: torch.mm(a, b),
                        lambda: call([send], [whole], [stream]),  # noqa: B023
                    )
            apply.apply(Policy(), Policy())
    columns = "kind bytes engine asked_us took_us kernels copied"
    return {"columns": columns, "rows": rows, "right": right, "gemm_slowed_pct": slowed}


def gemm_slowdown(gemm: Callable[[], object], collective: Callable[[], object]) -> float:
    """Percent by which a GEMM is slower while a collective runs on another stream."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(24):
        with_it = turn % 2 == 1
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if with_it:
            collective()
        first.record()
        gemm()
        last.record()
        torch.cuda.synchronize()
        times[with_it].append(first.elapsed_time(last))
    alone, overlapped = (statistics.median(times[key][2:]) for key in (False, True))
    return round(100 * (overlapped / alone - 1), 2)


def peers(name: str) -> dict[str, Any]:
    """weft.ops with peers of the node: right results in every schedule, and the time of a serial transfer."""
    from weft.ops import PacedPeers, all_gather_matmul, matmul_reduce_scatter
    from weft.policy import SCHEDULES

    node, wrong, times = load_node(name), [], {}
    size, rows = 8 * 1024, 1024
    whole = torch.randn(size, size, device="cuda").to(torch.bfloat16)
    w = (torch.randn(size, size, device="cuda") / size**0.5).to(torch.bfloat16)
    held = list(whole.split(rows))
    expected = {"all_gather_matmul": whole @ w}
    sums = [torch.randn(rows, size, device="cuda").to(torch.bfloat16) for _ in range(8)]
    own = (whole @ w)[:rows].float()
    expected["matmul_reduce_scatter"] = own + sum(part.float() for part in sums[1:])
    for engine in ("dma", "sm"):
        for schedule in SCHEDULES:
            for operation, x, group in (
                (all_gather_matmul, held[0], PacedPeers(held, name)),
                (matmul_reduce_scatter, whole, PacedPeers(sums, name)),
            ):
                key = f"{operation.__name__} {schedule} {engine}"
                run = lambda: operation(x, w, group, schedule=schedule, engine=engine)  # noqa: B023, E731
                for _ in range(2):
                    got, want = run(), expected[operation.__name__]
                    if (got.float() - want.float()).abs().max() > 0.02 * want.float().abs().max():
                        wrong.append(key)
                times[key] = round(event_us(run, torch.cuda.current_stream(), 6), 1)
    moved = 7 * rows * size * 2
    gemm_us = event_us(lambda: torch.mm(whole, w), torch.cuda.current_stream(), 6)
    asked = {"copies": moved / node.copy_engines.gb_s / 1e3 if node.copy_engines else None}
    asked["kernel"] = node.collective("all_to_all", moved * 8 // 7).us
    return {"wrong": wrong, "us": times, "gemm_us": round(gemm_us, 1), "transfer_us": asked}


def seen() -> list[dict[str, Any]]:
    """The communicators that the shim has seen."""
    from weft.shim import communicators

    return [
        {
            "size": c.size,
            "collectives": c.collectives,
            "sends": c.point_to_point,
            "path": c.path,
            "nccl": c.nccl,
        }
        for c in communicators.communicators()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", default="dgx-h100")
    os.environ["WEFT_NODE"] = parser.parse_args().node
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "node": os.environ["WEFT_NODE"]}
    parts = {
        "timer": timer,
        "rates": rates,
        "results": results,
        "durations": lambda: durations(os.environ["WEFT_NODE"]),
        "saturation": lambda: saturation(os.environ["WEFT_NODE"]),
        "copies": lambda: copies(os.environ["WEFT_NODE"]),
        "peers": lambda: peers(os.environ["WEFT_NODE"]),
        "seen": seen,
    }
    for name, part in parts.items():
        started = time.monotonic()
        try:
            found[name] = part()
        except Exception:
            found[name] = {"error": traceback.format_exc()[-1500:]}
        found[f"{name}_s"] = round(time.monotonic() - started, 1)
        print(json.dumps({name: found[name]}), flush=True)  # a later part may end the process
    print(json.dumps(found))


if __name__ == "__main__":
    main()
