"""A language model under the Hugging Face Trainer, from a configuration, with random weights and tokens.

trainer.py gpt2|bert|llama
"""

import sys
import tempfile

import torch
from stopwatch import STEPS, pick, stamp
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, vocabulary, length):
        self.rows = torch.randint(vocabulary, (512, length))

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row, "labels": row}


class Stamp(TrainerCallback):
    def on_step_end(self, *_, **__):
        stamp()


def gpt2():
    config = GPT2Config(
        n_layer=pick(12, 2), n_embd=pick(1024, 32), n_head=pick(16, 2), vocab_size=pick(50257, 128)
    )
    return GPT2LMHeadModel(config), pick(8, 2), pick(512, 16), 1


def bert():
    config = BertConfig(
        num_hidden_layers=pick(12, 2),
        hidden_size=pick(768, 32),
        num_attention_heads=pick(12, 2),
        intermediate_size=pick(3072, 64),
        vocab_size=pick(30522, 128),
    )
    return BertForMaskedLM(config), pick(32, 2), pick(256, 16), 2


def llama():
    config = LlamaConfig(
        num_hidden_layers=pick(6, 2),
        hidden_size=pick(2048, 32),
        intermediate_size=pick(5632, 64),
        num_attention_heads=pick(16, 2),
        num_key_value_heads=pick(16, 2),
        vocab_size=pick(32000, 128),
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    return model, pick(2, 2), pick(1024, 16), 4


def main():
    set_seed(0)
    model, batch, length, accumulation = {"gpt2": gpt2, "bert": bert, "llama": llama}[sys.argv[1]]()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-4,
            bf16=cuda,
            use_cpu=not cuda,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=pick(2, 0),
        )
        data = Tokens(model.config.vocab_size, length)
        Trainer(model, settings, train_dataset=data, callbacks=[Stamp()]).train()


if __name__ == "__main__":
    main()
