"""Memory of DDP buckets from trials goes back to the driver."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from weft.tuning.live.cached_memory import CachedMemory  # noqa: E402
from weft.tuning.live.ddp import Buckets  # noqa: E402

WIDTH, LAYERS = 4096, 4
GRADIENTS = LAYERS * WIDTH * WIDTH * 4


@pytest.fixture
def replica(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    )
    dist.destroy_process_group()


def step(model):
    model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
    torch.cuda.synchronize()


def test_memory_of_tried_buckets_goes_back_to_the_driver(replica):
    for _ in range(3):
        step(replica)
    buckets, cached = Buckets([replica]), CachedMemory()
    assert not buckets.why_not
    buckets.watch()
    step(replica)
    before, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    cached.before()
    for size in (100.0, 1.0):
        buckets.prepare(size, None)
        buckets.use(size, None)
        for _ in range(3):
            step(replica)
    assert torch.cuda.memory_reserved() - before >= 2 * GRADIENTS
    buckets.use(None, None)
    step(replica)
    buckets.release()
    cached.give_back()
    assert torch.cuda.memory_reserved() <= before
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20
    for _ in range(3):
        step(replica)
    assert torch.cuda.memory_reserved() <= 1.02 * before
