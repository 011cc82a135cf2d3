"""Copies inputs from the host in the ways training loops do, and prints what the shim counted for each."""

import json

import torch

from weft.shim import binding

copied = binding.copied_bytes()
torch.ones(8, device="cuda").sum().item()  # copies are counted from the first launch on
counts = {}


def count(name, make):
    before = copied()
    made = make()
    torch.cuda.synchronize()
    counts[name] = [copied() - before, made.numel() * made.element_size()]


tokens = torch.randint(0, 50_000, (16, 1024))
count("pageable", lambda: tokens.to("cuda"))
count("pinned", lambda: tokens.pin_memory().to("cuda", non_blocking=True))
count("copy_", lambda: torch.empty_like(tokens, device="cuda").copy_(tokens))
count("strided", lambda: tokens.t().to("cuda"))
count("small", lambda: tokens[0, :7].contiguous().to("cuda"))
count("none", lambda: torch.empty(0, device="cuda"))
print(json.dumps(counts))
