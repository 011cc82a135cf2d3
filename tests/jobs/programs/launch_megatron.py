"""Three steps of a tensor-parallel MLP of Megatron-Core."""

import warnings

warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
from launched import report
from leaving import end
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
torch.manual_seed(0)
how = {
    "config": ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True),
    "init_method": torch.nn.init.xavier_uniform_,
}
up = tensor_parallel.ColumnParallelLinear(16, 32, gather_output=False, **how)
down = tensor_parallel.RowParallelLinear(
    32, 16, input_is_parallel=True, bias=True, skip_bias_add=False, **how
)
optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], 0.1)
losses = []
for _ in range(3):
    loss = down(up(torch.ones(4, 16))[0])[0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report("megatron", dist.get_world_size(), losses)
end()
