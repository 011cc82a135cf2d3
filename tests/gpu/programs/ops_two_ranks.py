"""Every schedule of every operation between GPU ranks: `ops_two_ranks.py RANKS FOLDER ENGINE`.

If there are fewer GPUs than ranks, ranks share one: the group is then gloo, and copies use symmetric memory.
"""

from __future__ import annotations

import datetime
import multiprocessing
import sys

import torch
import torch.distributed as dist

from weft.ops import all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter
from weft.ops.schedule import split
from weft.policy import SCHEDULES


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    torch.cuda.synchronize()
    error = ((got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1)).item()
    assert got.shape == want.shape, what
    assert error < 1e-4, f"{what}: off by {error:.2g}"


def main(rank: int, ranks: int, folder: str, engine: str) -> None:
    shared = torch.cuda.device_count() < ranks
    torch.cuda.set_device(0 if shared else rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(
        "gloo" if shared else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    made = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=made)

    m, n, k = 66, 24, 20
    rows = split(m, ranks)
    for turn, name in enumerate([*SCHEDULES, *SCHEDULES]):
        gathered = [random(count, k) for count in rows]
        ws, xs = [random(k, n) for _ in range(ranks)], [random(m, k) for _ in range(ranks)]
        options = {"schedule": name, "engine": engine}
        got = all_gather_matmul(gathered[rank], ws[rank], rows=rows, **options)
        close(got, torch.cat(gathered) @ ws[rank], f"all-gather {name} {turn}")
        got = matmul_reduce_scatter(xs[rank], ws[rank], rows=rows, **options)
        total = sum(x @ w for x, w in zip(xs, ws, strict=True))
        close(got, total.split(rows)[rank], f"reduce-scatter {name} {turn}")
        got = all_to_all_matmul(xs[rank], ws[rank], **options)
        blocks = torch.cat([x.split(rows)[rank] for x in xs])
        close(got, blocks @ ws[rank], f"all-to-all {name} {turn}")
        repeated = [all_gather_matmul(gathered[rank], ws[rank], rows=rows, **options) for _ in range(4)]
        for one in repeated:
            close(one, torch.cat(gathered) @ ws[rank], f"all-gather again {name} {turn}")
    dist.barrier()
    print("all well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=main, args=(rank, count, sys.argv[2], sys.argv[3])) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
