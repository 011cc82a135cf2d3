"""Data parallelism with Lightning: an ordinary LightningModule and Trainer.

torchrun --nproc-per-node 2 examples/lightning_gpt.py
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as lightning
import torch
from common import arguments, finish, mark, milliseconds
from model import GPT, loss_of
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.net, self.lr = GPT(args), args.lr
        self.losses: list[torch.Tensor] = []
        self.marks: list[Any] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (tokens,) = batch
        loss = loss_of(self.net(tokens[:, :-1]), tokens[:, 1:])
        self.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.marks.append(mark())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def main() -> None:
    args = arguments(__doc__).parse_args()
    lightning.seed_everything(args.seed, verbose=False)
    cuda, world = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
    devices = min(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count() if cuda else world)
    tokens = torch.randint(args.vocab, (64 * args.batch, args.length + 1))
    module = Module(args)
    trainer = lightning.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=devices,
        num_nodes=world // devices,
        strategy="ddp",
        precision="bf16-mixed" if cuda else "32-true",
        max_steps=args.steps,
        max_epochs=-1,
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=args.batch))
    finish(module.losses, milliseconds(module.marks), args)


if __name__ == "__main__":
    main()
