"""ResNet-50 (on a CPU, a small convolution) under PyTorch Lightning, data parallel."""

import os

import pytorch_lightning as pl
import torch
from stopwatch import STEPS, pick, stamp
from torch.utils.data import DataLoader, TensorDataset


def network():
    if os.environ.get("STRANGER_TINY"):
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)
        )
    import torchvision

    return torchvision.models.resnet50(weights=None, num_classes=10)


class Classifier(pl.LightningModule):
    def __init__(self, example):
        super().__init__()
        self.net = network()
        self.net(example)

    def training_step(self, batch, index):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        stamp()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    pl.seed_everything(0, verbose=False)
    size, batch = pick(224, 16), pick(64, 4)
    images, labels = torch.randn(4 * batch, 3, size, size), torch.randint(10, (4 * batch,))
    cuda, world = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
    devices = min(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count() if cuda else world)
    trainer = pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=devices,
        num_nodes=world // devices,
        strategy="ddp",
        precision="bf16-mixed" if cuda else "32-true",
        max_steps=STEPS,
        max_epochs=-1,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(images[:2]), DataLoader(TensorDataset(images, labels), batch_size=batch))


if __name__ == "__main__":
    main()
