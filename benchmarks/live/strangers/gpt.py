"""A small GPT in one file: DDP, two micro-batches a step, fused AdamW, clipping.

gpt.py wide      a few wide layers
gpt.py small     many narrow layers: launch-bound
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from stopwatch import STEPS, pick, stamp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, HEADS, LENGTH, BATCH = {
    "wide": (pick(8, 2), pick(2048, 32), pick(16, 2), pick(1024, 16), pick(4, 2)),
    "small": (pick(36, 4), pick(256, 32), pick(4, 2), pick(128, 16), pick(4, 2)),
}[sys.argv[1]]
VOCABULARY = pick(50304, 128)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


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
    raw = GPT().to(device)
    model = DistributedDataParallel(raw, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=cuda)
    autocast = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    accumulation = 2
    for step in range(STEPS):
        for micro in range(accumulation):
            model.require_backward_grad_sync = micro == accumulation - 1
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
            with autocast:
                loss = model(tokens) / accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(step, loss.item(), flush=True)
        stamp()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
