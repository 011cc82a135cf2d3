"""A Llama of transformers, its layers sharded by FSDP2 (fully_shard)."""

import os

import torch
import torch.distributed as dist
from stopwatch import STEPS, pick, stamp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
        if cuda
        else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=pick(6, 2),
        hidden_size=pick(3072, 32),
        intermediate_size=pick(8192, 64),
        num_attention_heads=pick(24, 2),
        num_key_value_heads=pick(24, 2),
        vocab_size=pick(32000, 128),
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM(config)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if cuda else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch, length = 2, pick(1024, 16)
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (batch, length), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(step, loss.item(), flush=True)
        stamp()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
