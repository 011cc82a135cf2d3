"""Three steps of a small model with accelerate."""

import torch
from accelerate import Accelerator
from launched import report
from leaving import end

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
losses = []
for _ in range(3):
    loss = model(torch.ones(4, 16)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
report("accelerate", accelerator.num_processes, losses)
accelerator.end_training()
end()
