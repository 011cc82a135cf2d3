"""What does an operation cost the CPU beyond its kernels, copies and events?

    PYTHONPATH=src python benchmarks/ops/overhead.py --out FILE      # needs torch, no GPU; ten seconds

Uses the real operations, prepared calls and GPU runner, for 8 ranks, but replaces kernels, copies and events
by no-ops. What remains is weft's own time: finding the prepared call, the result tensor, the views, issuing.
Each time is the least of 25 batches, since other load on the machine only adds. `new memory`: x, w and the
result are at addresses new to the call. With a GPU (--device cuda) the real calls are made, and the time of
the same calls without weft is subtracted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from weft.comm import dma
from weft.comm.dma import Copies, HostPeers
from weft.ops import all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter, run_streams
from weft.ops.call import Call
from weft.ops.links import HostLink
from weft.ops.operands import Operands
from weft.ops.prepare import prepared_call
from weft.ops.program import Program
from weft.ops.run_streams import StreamRunner
from weft.ops.schedule import OPERATIONS
from weft.ops.teams import team_of
from weft.policy import SCHEDULES

RANKS, M, N, K = 8, 2048, 8, 64  # so small that malloc, like a GPU allocator, reuses the same memory
BATCHES = 25
FUNCTIONS = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "all_to_all_matmul": all_to_all_matmul,
}


class Nothing:
    """A driver that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


class Stream:
    cuda_stream = 1


class Peers(HostPeers):
    """Host peers without pinned memory."""

    def outbox(self, key: Any, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self.sent.setdefault(key, torch.empty(rows, cols, dtype=dtype))


def peers_of(operation: str, device: str, kind: type[HostPeers]) -> tuple[HostPeers, torch.Tensor]:
    rows = M // RANKS
    shape = {"all_gather_matmul": (rows, K), "matmul_reduce_scatter": (rows, N)}.get(operation, (M, K))
    x = torch.ones(rows if operation == "all_gather_matmul" else M, K, device=device, dtype=torch.bfloat16)
    return kind([torch.ones(shape, dtype=torch.bfloat16) for _ in range(RANKS)]), x


def measure(operation: str, name: str, needs_grad: bool, device: str) -> dict[str, float]:
    """The time to issue an operation, minus that to issue the same kernels, copies and events directly."""
    peers, x = peers_of(operation, device, Peers if device == "cpu" else HostPeers)
    w = torch.ones(K, N, device=device, dtype=torch.bfloat16, requires_grad=needs_grad)
    function = FUNCTIONS[operation]
    if device == "cpu":
        replace_runner(operation, name, x, w, peers)

    def call() -> None:
        function(x, w, peers, schedule=name, engine="dma")

    call()
    (prepared,) = team_of(peers).prepared.values()
    runner: Any = prepared.runner
    slots = runner.program.bind((x, w.detach(), x.new_empty(prepared.out_shapes[0])))
    calls = [(function, given) for function, given, _ in runner.calls(slots, runner._current())]

    def bare() -> None:
        for function, arguments in calls:
            function(*arguments)

    sync, repeats = (torch.cuda.synchronize, 4) if device == "cuda" else (None, 40)

    def fresh() -> None:
        runner.program.forget_views()
        call()

    times: dict[Any, list[float]] = {call: [], fresh: [], bare: []}
    for _ in range(BATCHES):
        for one in times:
            with torch.set_grad_enabled(one is not bare):
                times[one].append(microseconds(one, repeats))
            if sync:
                sync()
    whole, new, alone = (min(times[one]) for one in (call, fresh, bare))
    return {
        "calls": len(calls),
        "op_us": whole,
        "bare_us": alone,
        "weft_us": whole - alone,
        "weft_fresh_us": new - alone,
    }


def microseconds(call: Any, repeats: int) -> float:
    """CPU time of one call on this thread."""
    begun = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - begun) / repeats * 1e6


def replace_runner(operation: str, name: str, x: Any, w: Any, peers: HostPeers) -> None:
    """Give the prepared call the runner that it would have on a GPU, with a driver that does nothing."""
    team = team_of(peers)
    call = Call(operation, None, None, name, "dma", None)
    prepared = prepared_call(call, (x,), (w.detach(),), peers)
    driver = Copies(Nothing())
    program = Program(prepared.schedule, Operands.of(call, (x,), (w.detach(),), ()))
    link = HostLink(prepared.schedule, peers, "dma", driver, [Stream(), Stream()])
    runner = StreamRunner(prepared.schedule, program, link, driver, lambda: 1)
    (key,) = team.prepared
    team.prepared[key] = dataclasses.replace(prepared, runner=runner)


def nothing(*_: Any) -> int:
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        dma._pinned = lambda tensor: tensor
        run_streams.perform = nothing
    torch.set_num_threads(1)
    rows = []
    for operation in OPERATIONS:
        for name in SCHEDULES:
            for needs_grad in (False, True):
                if needs_grad and operation == "all_to_all_matmul":
                    continue  # keeps received data for its backward: more kernels, not more weft
                found = measure(operation, name, needs_grad, arguments.device)
                rows.append({"operation": operation, "schedule": name, "gradient": needs_grad, **found})
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    document = {
        "command": f"PYTHONPATH=src python benchmarks/ops/overhead.py --device {arguments.device}",
        "machine": f"{machine}, torch {torch.__version__}, Python {platform.python_version()}",
        "ranks": RANKS,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        if not row["gradient"]:
            print(
                f"{row['operation']:22s} {row['schedule']:18s} {row['calls']:4d} calls, "
                f"weft {row['weft_us']:6.1f} µs of {row['op_us']:6.1f}, new memory {row['weft_fresh_us']:.1f}"
            )
    for gradient in (False, True):
        some = [row for row in rows if row["gradient"] == gradient]
        worst = max(some, key=lambda row: row["weft_us"])
        what = f"{worst['operation']} {worst['schedule']}"
        print(f"gradient {gradient}: at most {worst['weft_us']:.1f} µs ({what})")


if __name__ == "__main__":
    main()
