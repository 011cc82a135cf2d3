"""A plain training loop with Accelerate, as in its examples.

accelerated.py llama        a few wide layers, bf16
accelerated.py classify     BERT on sentences of different lengths, padded per batch; periodic evaluation
"""

import sys

import torch
from accelerate import Accelerator
from stopwatch import STEPS, pick, stamp
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    get_linear_schedule_with_warmup,
    set_seed,
)


def llama():
    config = LlamaConfig(
        num_hidden_layers=pick(4, 2),
        hidden_size=pick(4096, 32),
        intermediate_size=pick(11008, 64),
        num_attention_heads=pick(32, 2),
        num_key_value_heads=pick(32, 2),
        vocab_size=pick(32000, 128),
    )
    length, batch = pick(1024, 16), 2
    rows = torch.randint(config.vocab_size, (64, length))
    data = [{"input_ids": row, "labels": row} for row in rows] * 200
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    return model, DataLoader(data, batch_size=batch), 0


def classify():
    config = BertConfig(
        num_hidden_layers=pick(12, 2),
        hidden_size=pick(768, 32),
        num_attention_heads=pick(12, 2),
        intermediate_size=pick(3072, 64),
        vocab_size=pick(30522, 128),
    )
    longest = pick(256, 24)
    lengths = torch.randint(longest // 2, longest, (2048,)).tolist()
    data = [
        {"input_ids": torch.randint(1, config.vocab_size, (n,)), "labels": torch.tensor(n % 2)}
        for n in lengths
    ] * 400

    def collate(rows):
        ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        labels = torch.stack([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    loader = DataLoader(data, batch_size=pick(32, 4), shuffle=True, collate_fn=collate)
    return BertForSequenceClassification(config), loader, 50


def main():
    accelerator = Accelerator(
        mixed_precision="bf16" if torch.cuda.is_available() else "no", cpu=not torch.cuda.is_available()
    )
    set_seed(0)
    model, loader, evaluate = {"llama": llama, "classify": classify}[sys.argv[1]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for step, batch in enumerate(loader):
        if step == STEPS:
            break
        model.train()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if evaluate and step % evaluate == evaluate - 1:
            model.eval()
            with torch.no_grad():
                accelerator.gather(model(**batch).loss.reshape(1))
        stamp()
    accelerator.end_training()


if __name__ == "__main__":
    main()
