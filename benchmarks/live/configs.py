"""The training jobs that live tuning is measured on: examples of this repository at sizes for an H200.

Two ranks, one of them a ghost; 12 CTAs for each rank's collectives unless a policy says otherwise. A width of
8192 is 805 million weights per layer, 1.6 GB of bf16 gradients: at 12 CTAs about 7.5 ms of communication. The
tokens of a step set how much compute overlaps with it. Kernels are few and large: at a width of 4096 the H200
waited for launches (25 ms a step with and without communication), so no effect was visible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RANKS = 2
BASELINE_CTAS = 12


@dataclass(frozen=True)
class Config:
    """One training job."""

    name: str
    script: str
    layers: int
    length: int
    batch: int
    width: int = 8192
    heads: int = 64
    more: tuple[str, ...] = ()
    about: str = ""

    def arguments(self, steps: int) -> list[str]:
        """The command line of the example."""
        sizes = ("layers", "width", "heads", "length", "batch")
        flags = [text for name in sizes for text in (f"--{name}", str(getattr(self, name)))]
        return [str(EXAMPLES / self.script), *flags, "--steps", str(steps), "--lr", "0.001", *self.more]

    def tiny(self) -> Config:
        """The same job for a CPU, in seconds."""
        more = tuple("aot_eager" if text == "inductor" else text for text in self.more)
        return replace(self, layers=2, length=16, batch=2, width=64, heads=8, more=more)


_COMPILE = ("--compiler", "inductor")

# The most telling first: a run that ends early has these.
_ALL = (
    Config("triton-ddp-1024", "triton_ddp.py", 2, 1024, 1, about="Triton 64x64x64, DDP"),
    Config("ddp-2048", "ddp.py", 2, 1024, 2, about="cuBLAS, DDP"),
    Config("tp", "tensor_parallel.py", 4, 2048, 16, 2048, 16, about="DTensor, 32768 tokens"),
    Config("fsdp2-3072", "fsdp2.py", 2, 1024, 3, about="cuBLAS, FSDP2"),
    Config("compiled-ddp-1536", "compiled.py", 2, 512, 3, more=_COMPILE, about="torch.compile, DDP"),
    Config("triton-fsdp2-1536", "fsdp2.py", 2, 512, 3, more=("--triton",), about="Triton, FSDP2"),
    Config("ddp-bf16-hook-2048", "ddp_bf16_hook.py", 2, 1024, 2, about="float32 weights, bf16 hook"),
    Config("inference-tp", "inference.py", 8, 2048, 16, 2048, 16, about="DTensor, forward only"),
    Config("triton-ddp-768", "triton_ddp.py", 2, 768, 1, about="Triton, DDP, much communication"),
    Config("ddp-4096", "ddp.py", 2, 1024, 4, about="cuBLAS, DDP, little communication"),
    Config("ddp-1536", "ddp.py", 2, 512, 3, about="cuBLAS, DDP, much communication"),
    Config("compiled-fsdp2", "fsdp2.py", 2, 1024, 2, more=("--compile", *_COMPILE), about="blocks compiled"),
)
CONFIGS = {config.name: config for config in _ALL}
