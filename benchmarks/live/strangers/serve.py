"""Inference of a Llama of transformers, tensor parallel by torch's own plan; no optimizer.

serve.py prefill     long prompts, one forward each
serve.py generate    model.generate, a token at a time: launch-bound
"""

import os
import sys

import torch
import torch.distributed as dist
from stopwatch import STEPS, pick, stamp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


@torch.inference_mode()
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
        num_hidden_layers=pick(8, 2),
        hidden_size=pick(4096, 32),
        intermediate_size=pick(11008, 64),
        num_attention_heads=pick(32, 2),
        num_key_value_heads=pick(32, 2),
        vocab_size=pick(32000, 128),
    )
    with device:
        model = LlamaForCausalLM(config)
    model = model.to(device, torch.bfloat16 if cuda else torch.float32).eval()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)
    prompt = torch.randint(config.vocab_size, (pick(4, 1), pick(2048, 16)), device=device)
    if sys.argv[1] == "prefill":
        for _ in range(STEPS):
            model(input_ids=prompt, use_cache=False, logits_to_keep=1)
            stamp()
    else:
        for _ in range(STEPS):
            new = pick(8, 4)
            options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            model.generate(input_ids=prompt[:, :64], **options).cpu()
            stamp()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
