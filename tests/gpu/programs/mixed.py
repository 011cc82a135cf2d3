"""cuBLAS, cuDNN attention and convolution, Triton, ATen, NCCL and a captured graph in one ordinary program.

Prints JSON: a digest of every output, the kernels that the profiler saw and, under weft, the shim's counts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from nccl_ranks import Ranks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile


@triton.jit
def scaled_sum(x, y, out, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, 2.0 * tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    return {
        "a": make(2048, 2048),
        "b": make(2048, 2048),
        "q": make(2, 16, 1024, 128),
        "k": make(2, 16, 1024, 128),
        "v": make(2, 16, 1024, 128),
        "image": make(16, 64, 56, 56),
        "filter": make(64, 64, 3, 3),
        "f32": torch.randn(1024, 1024, device="cuda"),
        "flat": torch.randn(1 << 22, device="cuda"),
    }


def eager(t: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    out = {"bf16 matmul": t["a"] @ t["b"], "fp32 matmul": t["f32"] @ t["f32"]}
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        out["attention"] = F.scaled_dot_product_attention(t["q"], t["k"], t["v"], is_causal=True)
    out["convolution"] = F.conv2d(t["image"], t["filter"], padding=1)
    out["layer norm"] = F.layer_norm(t["a"].float(), (2048,))
    out["gelu"] = F.gelu(t["a"])
    out["softmax"] = torch.softmax(t["f32"], -1)
    out["triton"] = torch.empty_like(t["flat"])
    scaled_sum[(triton.cdiv(t["flat"].numel(), 256),)](
        t["flat"], t["flat"], out["triton"], t["flat"].numel(), 256
    )
    parts = [t["flat"].clone() for _ in ranks.streams]
    ready = torch.cuda.Event()
    ready.record()
    ranks.wait_for(ready)
    ranks.all_reduce(parts)
    out["beside the collective"] = t["b"] @ t["a"]
    ranks.joined_by(torch.cuda.current_stream())
    out["all-reduce"] = parts[0]
    return out


def captured(t: dict[str, torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = F.gelu(t["a"] @ t["b"])
        y = F.layer_norm(y, (2048,)) @ t["a"]
    return graph, y


def counted() -> dict[str, int]:
    try:
        from weft.shim.stats import snapshot
    except ImportError:
        return {}
    return _by_name(snapshot()["kernels"])


def _by_name(kernels: list[dict]) -> Counter[str]:
    total: Counter[str] = Counter()
    for kernel in kernels:
        total[kernel["name"]] += kernel["launches"]
    return total


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def main() -> None:
    profiled = "--profile" in sys.argv
    t, ranks = inputs(), Ranks()
    eager(t, ranks)
    torch.cuda.synchronize()
    graph, y = captured(t)
    graph.replay()
    torch.cuda.synchronize()
    seen: Counter[str] = Counter()
    before = counted() if profiled else Counter()
    if profiled:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
            out = eager(t, ranks)
            for _ in range(7):
                graph.replay()
            torch.cuda.synchronize()
        for event in record.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(
                ("Memcpy", "Memset")
            ):
                seen[event.name] += 1
        after = counted()
        launched = {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}
    else:
        out, launched = eager(t, ranks), {}
        graph.replay()
        torch.cuda.synchronize()
    out["graph"] = y
    print(json.dumps({"digests": {k: digest(v) for k, v in out.items()}, "profiler": seen, "shim": launched}))


if __name__ == "__main__":
    main()
