"""Shared by all examples: flags, the process group, the loop over steps and its output."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

AHEAD = 2  # steps that the host may run ahead of the GPU


def arguments(about: str | None) -> argparse.ArgumentParser:
    """The flags of every example. The defaults are tiny, for a CPU."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    sizes = {
        "layers": 2,
        "width": 64,
        "heads": 4,
        "length": 32,
        "batch": 2,
        "vocab": 256,
        "steps": 8,
        "seed": 0,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--losses", type=Path, help="file for the loss of every step, as exact hex")
    parser.add_argument("--times", type=Path, help="file for the milliseconds of every step")
    parser.add_argument(
        "--any-order", action="store_true", help="do not ask for the same order of sums in every run"
    )
    return parser


def start(args: argparse.Namespace) -> torch.device:
    """Join the process group (NCCL on GPUs, else gloo); work is repeatable unless --any-order is given."""
    cuda = torch.cuda.is_available()
    if not args.any_order:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(args.seed)
    if not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def tokens(args: argparse.Namespace, device: torch.device, *, shared: bool = False) -> list[torch.Tensor]:
    """Eight batches of random tokens, to be used in turn: different on each rank, or shared by all ranks."""
    seed = args.seed + 1000 + (0 if shared else dist.get_rank())
    generator = torch.Generator().manual_seed(seed)
    shape = (args.batch, args.length + 1)
    return [torch.randint(args.vocab, shape, generator=generator).to(device) for _ in range(8)]


def loop(step: Callable[[int], torch.Tensor], args: argparse.Namespace) -> None:
    """Call `step` for every step, time the steps without stalling the GPU, and print and write the results.

    The host stays at most AHEAD steps ahead, as in programs that print their losses. Otherwise memory that
    several streams use would pile up.
    """
    losses, marks = [], [mark()]
    for number in range(args.steps):
        losses.append(step(number).detach().float().clone())
        marks.append(mark())
        if number >= AHEAD and torch.cuda.is_available():
            marks[-1 - AHEAD].synchronize()
    finish(losses, milliseconds(marks), args)


def finish(found: list[Any], times_ms: list[float], args: argparse.Namespace) -> None:
    """Print and write the losses and times on rank 0, and leave the process group."""
    values = [float(loss) for loss in found]
    if not dist.is_initialized() or dist.get_rank() == 0:
        if args.losses:
            args.losses.write_text("".join(f"{value.hex()}\n" for value in values))
        if args.times:
            args.times.write_text("".join(f"{ms:.4f}\n" for ms in times_ms))
        middle = statistics.median(times_ms[len(times_ms) // 3 :])
        print(
            f"loss {values[0]:.4f} -> {values[-1]:.4f} in {len(values)} steps of {middle:.2f} ms", flush=True
        )
    if dist.is_initialized():
        if dist.get_backend() == "gloo":
            # When gloo's group is destroyed, it waits for its threads while it holds the GIL, which their
            # last work may still need (torch 2.13). Let them finish first.
            dist.barrier()
            time.sleep(0.2)
        dist.destroy_process_group()


def mark() -> Any:
    """The current time: an event on this rank's GPU, or seconds of the host's clock if there is no GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: list[Any]) -> list[float]:
    """The milliseconds between each mark and the next."""
    if not torch.cuda.is_available():
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
