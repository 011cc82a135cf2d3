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


def test_checkpoints_and_pipelines_work_with_ghosts(tmp_path):
    script = tmp_path / "train.py"
    start = 'import sys, torch, torch.distributed as dist\ndist.init_process_group("nccl")'
    script.write_text(textwrap.dedent(start + CHECKPOINT + PIPELINES + "print('done')"))
    command = [sys.executable, "-m", "weft.comm.ghost", "--ranks", "4", str(script), str(tmp_path / "dcp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.strip() == "done", done.stderr
    assert "the checkpoint has rank 0's shards only" in done.stderr
