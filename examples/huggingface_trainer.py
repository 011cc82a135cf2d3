"""Data parallelism with the Hugging Face Trainer, which takes any module that returns its loss.

torchrun --nproc-per-node 2 examples/huggingface_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from common import arguments, finish, mark, milliseconds
from model import GPT, loss_of
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Model(torch.nn.Module):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.net = GPT(args)
        self.losses: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = loss_of(self.net(tokens[:, :-1]), tokens[:, 1:])
        self.losses.append(loss.detach().clone())
        return {"loss": loss}


class Marks(TrainerCallback):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.marks.append(mark())


def main() -> None:
    args = arguments(__doc__).parse_args()
    set_seed(args.seed)
    rows = torch.randint(args.vocab, (64 * args.batch, args.length + 1))
    cuda = torch.cuda.is_available()
    model, marks = Model(args), Marks()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            optim="sgd",
            seed=args.seed,
            bf16=cuda,
            use_cpu=not cuda,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        dataset = [{"tokens": row} for row in rows]
        Trainer(model=model, args=settings, train_dataset=dataset, callbacks=[marks]).train()
    finish(model.losses, milliseconds(marks.marks), args)


if __name__ == "__main__":
    main()
