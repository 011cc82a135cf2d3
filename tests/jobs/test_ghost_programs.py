"""What programs do besides collectives, as rank 0 of ghost ranks: checkpoints and pipelines, unmodified."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

CHECKPOINT = """
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
shards = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])
dcp.save({"w": shards}, checkpoint_id=sys.argv[1])
shards.to_local().zero_()
dcp.load({"w": shards}, checkpoint_id=sys.argv[1])
assert shards.to_local().tolist() == [0.0, 1.0]
dcp.async_save({"w": shards}, checkpoint_id=sys.argv[1] + ".async").result()
"""
PIPELINES = """
from torch.distributed import pipelining

def stage(layer, number, stages):
    return pipelining.PipelineStage(layer, number, stages, torch.device("cpu"))

for name, each in (("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2)):
    layers = [torch.nn.Linear(4, 4) for _ in range(each)]
    stages = [stage(layer, 4 * i, 4 * each) for i, layer in enumerate(layers)]
    schedule = getattr(pipelining, name)(stages if each > 1 else stages[0], 4, loss_fn=torch.nn.MSELoss())
    for _ in range(2):
        schedule.step(torch.ones(8, 4))
    assert all(layer.weight.grad is not None for layer in layers), name
"""
OTHER_RANKS = """
import torch.distributed._shard.sharded_tensor as shards
import torch.multiprocessing
from datetime import timedelta
from torch.distributed.optim import ZeroRedundancyOptimizer

layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
optimizer = ZeroRedundancyOptimizer(layers.parameters(), torch.optim.Adam, lr=0.1)
layers(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.consolidate_state_dict()
state = optimizer.state_dict()["state"]
assert [value["exp_avg"].shape for value in state.values()] == [p.shape for p in layers.parameters()]
optimizer.load_state_dict(optimizer.state_dict())

part = shards.Shard.from_tensor_and_offsets(torch.zeros(3, 2), [0, 0], 0)
whole = shards.init_from_local_shards([part], 10, 2).metadata().shards_metadata
assert [one.shard_sizes[0] for one in whole] == [3, 3, 3, 1]

assert dist.get_process_group_ranks(dist.split_group(None, [[0, 2], [1, 3]])) == [0, 2]
dist.TCPStore("127.0.0.1", 0, 4, True, timedelta(seconds=60)).set("key", "value")
ran = []
torch.multiprocessing.spawn(lambda rank, word: ran.append((rank, word)), ("here",), nprocs=4)
assert ran == [(0, "here")]
try:
    torch.distributed.rpc.init_rpc("worker", rank=0, world_size=4)
except Exception as error:
    assert "ghost ranks have none" in str(error), error
else:
    raise SystemExit("RPC started")
"""


def test_checkpoints_and_pipelines_work_with_ghosts(tmp_path):
    script = tmp_path / "train.py"
    start = 'import sys, torch, torch.distributed as dist\ndist.init_process_group("nccl")'
    script.write_text(textwrap.dedent(start + CHECKPOINT + PIPELINES + OTHER_RANKS + "print('done')"))
    command = [sys.executable, "-m", "weft.comm.ghost", "--ranks", "4", str(script), str(tmp_path / "dcp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.strip() == "done", done.stderr
    assert "the checkpoint has rank 0's shards only" in done.stderr
    assert "the optimizer's state has rank 0's shard only" in done.stderr
