"""Three steps of a small model with Lightning, which starts its second rank itself."""

import warnings

import lightning.pytorch as pl
import torch
from launched import report
from leaving import end


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.losses = []

    def training_step(self, batch, _):
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


warnings.simplefilter("ignore")
torch.manual_seed(0)
model = Model()
settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=3, **settings)
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 16), batch_size=1))
report("lightning", trainer.world_size, model.losses)
end()
