"""Run every GPU code path of the lab once, about a second each; one line per path, failures do not stop it.

    WEFT_NCCL=/path/to/libnccl.so.2 PYTHONPATH=src python3 benchmarks/lab/smoke.py [--only GLOB] [--log FILE]

Ends with a JSON object; the exit code is the number of paths that failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.errors import UsageError, WeftError
from weft.execute.base import HungError, References
from weft.execute.worker import RemoteExecutor, worker_environment
from weft.policy import Policy
from weft.rules import Rule
from weft.workload import Compute, Workload

MiB = 1 << 20
GEMM = Compute(kind="gemm", shape=(4096, 4096, 4096))
TRITON = Compute(kind="triton_gemm", shape=(4096, 4096, 4096), tile=(64, 64, 64))

COMPUTES = {
    "gemm-bf16": GEMM,
    "gemm-fp16": Compute(kind="gemm", shape=(2048, 2048, 2048), dtype="fp16"),
    "gemm-fp32": Compute(kind="gemm", shape=(2048, 2048, 2048), dtype="fp32"),
    "gemm-fp64": Compute(kind="gemm", shape=(2048, 2048, 2048), dtype="fp64"),
    "triton-opt2": TRITON,
    "triton-opt1": Compute(kind="triton_gemm", shape=(4096, 4096, 4096), tile=(64, 64, 32)),
    "triton-grid8": Compute(kind="triton_gemm", shape=(2048, 2048, 2048), tile=(64, 64, 64), grid=(8, 8)),
    "triton-128x256": Compute(kind="triton_gemm", shape=(4096, 4096, 4096), tile=(128, 256, 64), warps=8),
    "triton-mlp": Compute(kind="triton_mlp", shape=(2048, 2048, 8192), tile=(128, 128, 64), warps=8),
    "layer-norm": Compute(kind="layer_norm", shape=(8192, 8192), repeat=4),
    "softmax": Compute(kind="softmax", shape=(8192, 8192), repeat=4),
    "gelu": Compute(kind="gelu", shape=(8192, 8192), repeat=4),
    "attention": Compute(kind="attention", shape=(4, 32, 2048, 128)),
    "conv": Compute(kind="conv", shape=(32, 256, 56, 56, 256, 3)),
}
POLICIES = {
    "plain": Policy(),
    "priority": Policy(priority="high"),
    "ctas4": Policy(max_ctas=4),
    "ctas16": Policy(max_ctas=16),
    "head5": Policy(head_start_us=5),
    "rule3": Policy(rules=(Rule("weft_gemm", 3),)),
    "rule2-when-overlap": Policy(rules=(Rule("weft_gemm", 2),), when="overlap"),
    "residency3": Policy(residency=3),
    "all": Policy(priority="high", head_start_us=5, max_ctas=12, rules=(Rule("weft_gemm", 3),)),
}


class Smoke:
    """GPU time is expensive: after two hangs, or when time is up, the remaining paths are only listed."""

    def __init__(self, only: str, limit_s: float) -> None:
        self.only, self.results = only, []
        self.until, self.hangs = time.monotonic() + limit_s, 0
        self.executor: RemoteExecutor | None = None

    def path(self, name: str, body: Callable[[], Any]) -> None:
        """Run one path and print its result."""
        if not fnmatch.fnmatch(name, self.only):
            return
        start = time.monotonic()
        if self.hangs >= 2 or start > self.until:
            self.results.append({"path": name, "ok": False, "seconds": 0.0, "detail": "skipped"})
            return
        try:
            detail, ok = body(), True
        except Exception as error:
            self.hangs += isinstance(error, (HungError, subprocess.TimeoutExpired))
            words = str(error) if isinstance(error, WeftError) else traceback.format_exc()[-1500:]
            detail, ok = f"{type(error).__name__}: {words}", False
            log = self.executor.log if self.executor is not None else ""
            if log and not isinstance(error, UsageError):
                detail += f"\n--- worker ---\n{log[-2500:]}"
        took = time.monotonic() - start
        print(f"{'ok   ' if ok else 'ERROR'} {name:28} {took:6.2f} s  {detail}", flush=True)
        self.results.append({"path": name, "ok": ok, "seconds": round(took, 2), "detail": str(detail)})

    def measure(self, compute: Compute, policy: Policy, mode: str = "overlap", **changes: Any) -> str:
        assert self.executor is not None, "the worker did not start"
        workload = Workload(compute=compute, bytes=64 * MiB, iterations=4).but(**changes)
        sample = self.executor.measure(workload, policy, mode)
        again = self.executor.measure(workload, policy, mode)
        hidden = "" if again.facts.get("launches_hidden", True) else "  LAUNCHES NOT HIDDEN"
        return f"{sample.ms:.3f} {again.ms:.3f} ms{hidden}"


def expect(kind: type[Exception], body: Callable[[], Any]) -> str:
    try:
        body()
    except kind as error:
        return f"refused as it should be: {error}"
    raise AssertionError(f"{kind.__name__} was expected")


def timeline(executor: RemoteExecutor) -> str:
    workload = Workload(compute=TRITON, bytes=256 * MiB, iterations=4)
    found = executor.timeline(workload, Policy(priority="high"))
    figures, names = found.figures(), ", ".join(name[:40] for name in found.names)
    rate = figures.overlap_pct
    return f"{len(found)} spans, {figures.span_ns / 1e6:.2f} ms, overlap {rate:.0f}%, kernels: {names}"


def one_run(executor: RemoteExecutor) -> str:
    workload = Workload(compute=GEMM, bytes=128 * MiB, iterations=6)
    alone = (executor.measure(workload, Policy(), mode).ms for mode in ("sequential", "compute", "comm"))
    refs, policy = References(*alone, workload.iterations), Policy(head_start_us=5)
    sample = executor.measure(workload, policy)
    overlap_pct = executor.timeline(workload, policy).figures().overlap_pct
    return (
        f"compute {refs.compute_ms:.2f} comm {refs.comm_ms:.2f} seq {refs.sequential_ms:.2f} "
        f"ideal {refs.ideal_ms:.2f} measured {sample.ms:.2f} "
        f"fraction {refs.fraction_of_ideal(sample.ms)} overlap {overlap_pct:.0f}% {dict(sample.facts)}"
    )


def stats(executor: RemoteExecutor) -> str:
    found = executor.shim_stats()
    kernels = [
        f"{k['name'][:30]}: {k['launches']} launches, {k['shaped']} shaped, {k['blocks_per_sm']} per SM"
        for k in found.get("kernels", [])
        if "weft" in k["name"] or "nccl" in k["name"]
    ]
    names = ("launches", "comm_launches", "shaped", "prioritised", "head_starts", "shape_failures")
    return f"{ {name: found.get(name) for name in names} } {kernels[:8]}"


def restart(executor: RemoteExecutor) -> str:
    """A run past its deadline costs one measurement."""
    kept, executor._deadline_s = executor._deadline_s, 0.0005
    try:
        said = expect(HungError, lambda: executor.measure(Workload(compute=GEMM, iterations=64), Policy()))
    finally:
        executor._deadline_s = kept
    sample = executor.measure(Workload(compute=GEMM, bytes=MiB, iterations=2), Policy())
    return f"{said[:60]}…; then {sample.ms:.3f} ms in a new worker"


def inside(name: str) -> str:
    """Run one of the programs below in its own process."""
    env = {**worker_environment(os.environ), "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    command = [sys.executable, __file__, "--inside", name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout.strip()


def numerics() -> None:
    """The Triton kernels against float64 on the GPU, including odd sizes and small grids."""
    import torch

    from weft.execute.kernels import launch_gemm

    torch.manual_seed(0)
    worst = 0.0
    for shape, tile, grid, warps in (
        ((512, 768, 256), (64, 64, 64), None, 4),
        ((512, 768, 256), (64, 64, 32), (3, 2), 4),
        ((500, 700, 200), (64, 64, 64), (2, 2), 4),
        ((512, 512, 512), (128, 256, 64), None, 8),
        ((512, 512, 512), (128, 128, 64), (1, 1), 8),
        ((256, 256, 256), (64, 64, 64), (64, 64), 4),
    ):
        for gelu in (False, True):
            m, n, k = shape
            a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
            c = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            natural = (-(-n // tile[1]), -(-m // tile[0]))
            launch_gemm(a, b, c, tile=tile, grid=grid or natural, warps=warps, stages=3, gelu=gelu)
            wanted = a.double() @ b.double()
            wanted = torch.nn.functional.gelu(wanted, approximate="tanh") if gelu else wanted
            error = float((c.double() - wanted).norm() / wanted.norm())
            assert error < 1e-2, (shape, tile, grid, gelu, error)
            worst = max(worst, error)
    print(f"largest relative error {worst:.1e}")


def leave() -> None:
    """Exit without tearing down communicators, which is not under test."""
    sys.stdout.flush()
    os._exit(0)


def _net(torch: Any, width: int = 2048, depth: int = 4) -> Any:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    return torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)


def _train(torch: Any, model: Any, steps: int = 6) -> tuple[list[float], float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.03), []
    x = torch.randn(
        512, 2048, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1)
    )
    for step in range(steps):
        if step == 2:
            torch.cuda.synchronize()
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).float().square().sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.cuda.synchronize()
    return losses, 1e3 * (time.perf_counter() - start) / (steps - 2)


def ghost_ddp() -> None:
    import torch

    from weft.comm import ghost

    alone, _ = _train(torch, _net(torch))
    ghost.init(2)
    model = torch.nn.parallel.DistributedDataParallel(_net(torch), bucket_cap_mb=8)
    losses, ms = _train(torch, model)
    assert all(abs(a - b) <= 2e-2 * abs(a) + 1e-6 for a, b in zip(alone, losses, strict=True)), (
        alone,
        losses,
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        _train(torch, model, 3)
    names = {event.key for event in profiler.key_averages() if "nccl" in event.key.lower()}
    print(f"losses {losses[0]:.4f} → {losses[-1]:.4f} as alone, {ms:.2f} ms a step; {sorted(names)}")
    assert names, "no NCCL kernel ran"
    leave()


def ghost_fsdp2() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from weft.comm import ghost

    ghost.init(2)
    model, mesh = _net(torch), init_device_mesh("cuda", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses, ms = _train(torch, model)
    assert losses[-1] < losses[0], losses
    print(f"losses {losses[0]:.4f} → {losses[-1]:.4f}, {ms:.2f} ms a step")
    leave()


def nccl_bandwidth() -> None:
    """All-reduce alone by number of CTAs: the effect of a communicator's maxCTAs."""
    import torch

    from weft.comm import nccl

    library = nccl.load_nccl()
    torch.cuda.set_device(0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    buffers = [torch.ones(128 * MiB // 2, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found = {}
    for ctas in (4, 8, 12, 16):
        start = time.perf_counter()
        ranks = nccl.NcclRanks(library, 2, ctas)
        made = time.perf_counter() - start
        for number in range(6):
            if number == 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
            ranks.all_reduce(buffers[:2], buffers[2:], streams)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 4
        found[ctas] = f"{128 * MiB / seconds / 1e9:.0f} GB/s (made in {made:.2f} s)"
    print(f"NCCL {library.version_text} {library.path}: {found}")
    leave()


PROGRAMS = {"numerics": numerics, "nccl": nccl_bandwidth, "ddp": ghost_ddp, "fsdp2": ghost_fsdp2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no new path starts")
    parser.add_argument("--log", type=Path, help="also write the results to this file")
    parser.add_argument("--inside", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--factory", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        PROGRAMS[args.inside]()
        return
    smoke, shared = Smoke(args.only, args.limit), {} if args.factory is None else {"factory": args.factory}

    def start(**options: Any) -> str:
        smoke.executor = RemoteExecutor(deadline_s=25, start_deadline_s=60, **shared, **options)
        return json.dumps(smoke.executor.info())

    smoke.path("start under the shim", start)
    if smoke.executor is None:
        smoke.path("start without the shim", lambda: start(under_shim=False))
    executor = smoke.executor
    if executor is not None:
        for name, compute in COMPUTES.items():
            smoke.path(f"compute {name}", lambda c=compute: smoke.measure(c, Policy()))
        for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for ranks in (2, 4):
                smoke.path(
                    f"{collective} of {ranks}",
                    lambda c=collective, r=ranks: smoke.measure(
                        GEMM, Policy(), collective=c, ranks=r, bytes=33 * MiB + 1
                    ),
                )
        for mode in ("sequential", "compute", "comm"):
            smoke.path(f"mode {mode}", lambda m=mode: smoke.measure(GEMM, Policy(), m))
        for name, policy in POLICIES.items():
            smoke.path(f"policy {name}", lambda p=policy: smoke.measure(TRITON, p))
        smoke.path(
            "four compute streams", lambda: smoke.measure(TRITON, Policy(), compute_streams=4, grid=(8, 8))
        )
        smoke.path("timeline", lambda: timeline(executor))
        smoke.path("run with references", lambda: one_run(executor))
        smoke.path("shim statistics", lambda: stats(executor))
        smoke.path(
            "too many CTAs",
            lambda: expect(UsageError, lambda: smoke.measure(GEMM, Policy(max_ctas=64), ranks=4)),
        )
        smoke.path(
            "too much memory",
            lambda: expect(WeftError, lambda: smoke.measure(GEMM, Policy(), bytes=160 << 30)),
        )
        smoke.path("deadline", lambda: restart(executor))
        executor.close()
    for name in PROGRAMS:
        smoke.path(f"program {name}", lambda n=name: inside(n))
    failed = [result for result in smoke.results if not result["ok"]]
    if args.log is not None:
        args.log.write_text(json.dumps(smoke.results, indent=1))
    total = sum(result["seconds"] for result in smoke.results)
    print(
        json.dumps(
            {"paths": len(smoke.results), "failed": [f["path"] for f in failed], "seconds": round(total, 1)}
        )
    )
    sys.exit(min(len(failed), 100))


if __name__ == "__main__":
    main()
