"""Programs without weft, for tests of framework controls: python framework_job.py KIND STEPS.

Rank and world come from the environment, as torchrun sets them. Writes the losses to $RECORD/losses.RANK.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from leaving import end
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 48


class Blocks(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Any, skip: int = -1) -> Any:
        for number, block in enumerate(self.blocks):
            x = x if number == skip else block(x)
        return self.head(x)


def replicated(net: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(net, **{"bucket_cap_mb": 0.02, **options})


def sharded(net: Blocks, **options: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net)


def vectors(step: int) -> Any:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def square(model: nn.Module, step: int) -> Any:
    return model(vectors(step)).pow(2).mean()


def plain(model: nn.Module, optimizer: Any, steps: int, loss_of: Any = square) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accumulated(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(2):
                square(model, 7 * step + part).backward()
        loss = square(model, 7 * step + 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def irregular(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Evaluates a part of the model with other weights, and skips a block now and then."""
    losses = []
    for step in range(steps):
        if step > 20 and step % 7 == 5:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                model(vectors(step), skip=3)
                for parameter in model.parameters():
                    parameter.mul_(2)
        loss = model(vectors(step), skip=2 if step > 30 and step % 5 == 0 else -1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def run(kind: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    if kind == "ddp":
        return plain(model := replicated(Blocks()), adam(model), steps)
    if kind == "ddp views":
        return plain(model := replicated(Blocks(), gradient_as_bucket_view=True), adam(model), steps)
    if kind == "ddp accumulated":
        return accumulated(model := replicated(Blocks()), adam(model), steps)
    if kind == "ddp unused":
        return plain(model := replicated(Blocks(), find_unused_parameters=True), adam(model), steps)
    if kind == "ddp static":
        return plain(model := replicated(Blocks(), static_graph=True), adam(model), steps)
    if kind == "ddp hook":
        model = replicated(Blocks())
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
        return plain(model, adam(model), steps)
    if kind == "ddp compiled":
        model = replicated(Blocks(2), bucket_cap_mb=25)
        return plain(torch.compile(model, backend="eager"), adam(model), steps)
    if kind == "ddp join":
        model = replicated(Blocks())
        with model.join():
            return plain(model, adam(model), steps)
    if kind == "fsdp2":
        return plain(model := sharded(Blocks()), adam(model), steps)
    if kind == "fsdp2 irregular":
        return irregular(model := sharded(Blocks()), adam(model), steps)
    if kind == "fsdp2 checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        net = Blocks()
        net.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in net.blocks)
        return plain(model := sharded(net), adam(model), steps)
    if kind == "fsdp2 compiled blocks":
        net = Blocks()
        for block in net.blocks:
            block.compile(backend="eager")
        return plain(model := sharded(net), adam(model), steps)
    return globals()["of_" + kind.replace(" ", "_")](steps)


def of_resnet(steps: int) -> list[float]:
    import torchvision

    model = replicated(torchvision.models.resnet18(num_classes=4), bucket_cap_mb=8)

    def loss_of(model: nn.Module, step: int) -> Any:
        images = torch.randn(
            2, 3, 32, 32, generator=torch.Generator().manual_seed(step + 100 * dist.get_rank())
        )
        return nn.functional.cross_entropy(model(images), torch.tensor([0, 1]))

    return plain(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), steps, loss_of)


def _llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )

    def loss_of(model: nn.Module, step: int) -> Any:
        tokens = torch.randint(
            0, 64, (2, 8), generator=torch.Generator().manual_seed(step + 100 * dist.get_rank())
        )
        return model(input_ids=tokens, labels=tokens).loss

    return LlamaForCausalLM(config), loss_of


def of_llama_ddp(steps: int) -> list[float]:
    net, loss_of = _llama()
    return plain(model := replicated(net), adam(model), steps, loss_of)


def of_llama_fsdp2(steps: int) -> list[float]:
    net, loss_of = _llama()
    for layer in net.model.layers:
        fully_shard(layer)
    return plain(model := fully_shard(net), adam(model), steps, loss_of)


def of_accelerate(steps: int) -> list[float]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(bucket_cap_mb=0.02)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[options])
    net, loss_of = _llama()
    model, optimizer = accelerator.prepare(net, adam(net))
    losses = []
    for step in range(2 * steps):
        with accelerator.accumulate(model):
            loss = loss_of(model, step)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of_lightning(steps: int) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Blocks(), list[float]()

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(batch).pow(2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return adam(self)

    rank = int(os.environ["RANK"])
    batches = torch.randn(steps * 4 * 2, WIDTH, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(batches[rank * steps * 4 : (rank + 1) * steps * 4], batch_size=4)
    model = Lit()
    lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        num_nodes=1,
        strategy=DDPStrategy(bucket_cap_mb=0.02, process_group_backend="gloo"),
        max_steps=steps,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, loader)
    return model.losses


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    if kind not in ("accelerate", "lightning"):
        dist.init_process_group("gloo")
    losses = run(kind, steps)
    rank = os.environ["RANK"]
    Path(os.environ["RECORD"], f"losses.{rank}").write_text("\n".join(map(repr, losses)))
    end()


if __name__ == "__main__":
    main()
