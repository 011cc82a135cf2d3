"""Three steps of a small model with DeepSpeed's engine."""

import deepspeed
import deepspeed.ops
import torch
from launched import report
from leaving import end

# DeepSpeed would first compile its shared-memory all-reduce, for a minute; gloo's is good enough here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
settings = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
losses = []
for _ in range(3):
    loss = engine(torch.ones(1, 16)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report("deepspeed", torch.distributed.get_world_size(), losses)
end()
