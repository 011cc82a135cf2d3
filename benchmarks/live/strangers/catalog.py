"""The programs that live tuning is tried on, and the data that they read.

JOBS are examples of this repository, at the sizes of configs.py. OURS are written in the style of the
libraries' own examples. PUBLIC are unmodified scripts of public repositories; their checkouts are in a folder
that is not part of this repository:

    nanogpt/    karpathy/nanoGPT                   simsiam/   facebookresearch/simsiam
    examples/   pytorch/examples                   timm/      huggingface/pytorch-image-models
    vision/     pytorch/vision                     gptfast/   meta-pytorch/gpt-fast
    llmc/       karpathy/llm.c                     stubs/     a tiktoken and a sentencepiece without tokenizers
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs import CONFIGS, Config

HERE = Path(__file__).resolve().parent
TEXT = ("torch", "transformers", "accelerate")
VISION = ("torch", "torchvision")
PAUSE = 8.0


@dataclass(frozen=True)
class Program:
    """A command line, relative to its folder."""

    name: str
    command: tuple[str, ...]
    about: str
    step: str = "self"
    """What ends a step: see watched.py."""
    imports: tuple[str, ...] = TEXT
    folder: str | None = None
    """Folder of a public checkout; None: this folder."""
    tiny: tuple[str, ...] = ()
    """The command line for a CPU; empty if it is the same and the script reads STRANGER_TINY."""
    pauses: bool = False
    """Whether it evaluates and restarts workers after each epoch; steps over PAUSE medians are left out."""

    def root(self, public: Path) -> Path:
        """The folder that the program runs in."""
        return HERE if self.folder is None else public / self.folder

    def arguments(self, public: Path, tiny: bool) -> list[str]:
        """Script and arguments."""
        data, command = str(public / "data"), (tiny and self.tiny) or self.command
        return [str(self.root(public) / command[0])] + [text.replace("DATA", data) for text in command[1:]]


OURS = (
    Program("llama-accelerate", ("accelerated.py", "llama"), "Llama, width 4096, accelerate"),
    Program("gpt-small", ("gpt.py", "small"), "36 narrow layers, DDP: bound by launches", imports=("torch",)),
    Program("generate", ("serve.py", "generate"), "Llama, TP, model.generate: inference"),
    Program("gpt2-trainer", ("trainer.py", "gpt2"), "GPT-2, Trainer"),
    Program("vit", ("vision.py", "vit_b_16"), "torchvision ViT-B/16, DDP", imports=VISION),
    Program("resnet50", ("vision.py", "resnet50"), "torchvision ResNet-50, DDP", imports=VISION),
    Program("gpt-wide", ("gpt.py", "wide"), "GPT, width 2048, DDP, 2 micro-batches", imports=("torch",)),
    Program("prefill", ("serve.py", "prefill"), "Llama, TP, long prompts: inference"),
    Program("llama-fsdp2", ("sharded.py",), "Llama, width 3072, FSDP2"),
    Program("bert-trainer", ("trainer.py", "bert"), "BERT, Trainer, 2 micro-batches"),
    Program("vgg16", ("vision.py", "vgg16"), "torchvision VGG-16, DDP", imports=VISION),
    Program("llama-trainer", ("trainer.py", "llama"), "Llama, Trainer, 4 micro-batches"),
    Program("bert-classify", ("accelerated.py", "classify"), "BERT, lengths vary, evaluation, accelerate"),
    Program("lightning", ("lit.py",), "ResNet-50, Lightning", imports=(*VISION, "pytorch_lightning")),
)

_NANOGPT = ("train.py", "--dataset=random", "--out_dir=DATA/out", "--eval_interval=100000", "--eval_iters=1")
_IMAGENET = ("imagenet/main.py", "--dummy", "--dist-url", "env://", "--world-size", "2", "--rank", "0")
_LLMC = (
    "train_gpt2.py",
    "--input_bin",
    "DATA/tokens.bin",
    "--write_tensors",
    "0",
    "--num_iterations",
    "100000",
)
_FAST = ("generate.py", "--checkpoint_path", "DATA/stories110M/model.pth", "--num_samples", "100000")
_BF16 = ("--dtype", "bfloat16", "--sequence_length", "1024", "--tensorcores", "1", "--flash", "1")

PUBLIC = (
    Program(
        "nanogpt",
        (*_NANOGPT, "--compile=False", "--batch_size=8", "--gradient_accumulation_steps=2"),
        "nanoGPT train.py, GPT-2 124M, eager, DDP",
        step="optimizer",
        imports=("torch",),
        folder="nanogpt",
    ),
    Program(
        "nanogpt-wide",
        (
            *_NANOGPT,
            *("--n_embd=2048", "--n_head=16", "--n_layer=8", "--batch_size=8"),
            *("--gradient_accumulation_steps=2", "--compile=True"),
        ),
        "nanoGPT train.py, width 2048, compiled, DDP",
        step="optimizer",
        imports=("torch", "torch._inductor.compile_fx"),
        folder="nanogpt",
    ),
    Program(
        "nanogpt-medium",
        (
            *_NANOGPT,
            *("--n_embd=1024", "--n_head=16", "--n_layer=24", "--batch_size=8"),
            *("--gradient_accumulation_steps=2", "--compile=False"),
        ),
        "nanoGPT train.py, GPT-2 350M, eager, DDP",
        step="optimizer",
        imports=("torch",),
        folder="nanogpt",
    ),
    Program(
        "imagenet-resnet50",
        (*_IMAGENET, "--gpu", "0", "-a", "resnet50", "-b", "64", "-j", "10"),
        "pytorch/examples imagenet, ResNet-50, DDP, fake images by a data loader",
        step="optimizer",
        imports=VISION,
        folder="examples",
    ),
    Program(
        "imagenet-vgg16",
        (*_IMAGENET, "--gpu", "0", "-a", "vgg16", "-b", "64", "-j", "10"),
        "pytorch/examples imagenet, VGG-16, DDP, fake images by a data loader",
        step="optimizer",
        imports=VISION,
        folder="examples",
    ),
    Program(
        "imagenet-vit",
        (*_IMAGENET, "--gpu", "0", "-a", "vit_b_16", "-b", "64", "-j", "10"),
        "pytorch/examples imagenet, ViT-B/16, DDP, fake images by a data loader",
        step="optimizer",
        imports=VISION,
        folder="examples",
    ),
    Program(
        "ddp-tutorial",
        ("distributed/ddp-tutorial-series/multigpu_torchrun.py", "100000", "100000"),
        "pytorch/examples DDP tutorial: one linear layer, nothing but launches",
        step="optimizer",
        imports=("torch",),
        folder="examples",
    ),
    Program(
        "torchvision-train",
        (
            *("references/classification/train.py", "--data-path", "DATA/images", "--model", "resnet50"),
            *(
                "--batch-size",
                "64",
                "--workers",
                "10",
                "--amp",
                "--epochs",
                "1000",
                "--output-dir",
                "DATA/out",
            ),
        ),
        "torchvision references/classification, ResNet-50, AMP, JPEG images, evaluation after each epoch",
        step="optimizer",
        imports=VISION,
        folder="vision",
        pauses=True,
    ),
    Program(
        "llmc-d24",
        (*_LLMC, *_BF16, "--model", "d24", "--batch_size", "8", "--total_batch_size", "16384"),
        "llm.c train_gpt2.py, 350M, bf16, DDP",
        step="optimizer",
        imports=("torch", "torch._inductor.config"),
        folder="llmc",
    ),
    Program(
        "llmc-zero1",
        (
            *(*_LLMC, *_BF16, "--model", "d12", "--batch_size", "16", "--total_batch_size", "32768"),
            *("--zero_stage", "1"),
        ),
        "llm.c train_gpt2.py, 124M, ZeRO-1",
        step="optimizer",
        imports=("torch", "torch._inductor.config"),
        folder="llmc",
    ),
    Program(
        "simsiam",
        (
            *("main_simsiam.py", "--dist-url", "env://", "--world-size", "2", "--rank", "0", "--gpu", "0"),
            *("-b", "64", "-j", "10", "--fix-pred-lr", "DATA/images"),
        ),
        "facebookresearch/simsiam, ResNet-50, JPEG images by a data loader",
        step="optimizer",
        imports=VISION,
        folder="simsiam",
    ),
    Program(
        "timm-convnext",
        (
            *("train.py", "--data-dir", "DATA/images", "--model", "convnext_tiny", "-b", "64", "-j", "10"),
            *("--amp", "--num-classes", "8", "--output", "DATA/out", "--epochs", "1000"),
        ),
        "timm train.py, ConvNeXt-T, AMP, DDP, JPEG images, evaluation after each epoch",
        step="optimizer",
        imports=VISION,
        folder="timm",
        pauses=True,
    ),
    Program(
        "gpt-fast-decode",
        (*_FAST, "--prompt", "32", "--max_new_tokens", "200"),
        "gpt-fast generate.py, TP, 110M, one token at a time: inference bound by launches",
        step="forward",
        imports=("torch", "torch._inductor.config"),
        folder="gptfast",
    ),
    Program(
        "gpt-fast-prefill",
        (*_FAST, "--prompt", "1900", "--max_new_tokens", "2", "--batch_size", "16"),
        "gpt-fast generate.py, TP, 110M, 16 long prompts, 2 tokens each: inference",
        step="forward",
        imports=("torch", "torch._inductor.config"),
        folder="gptfast",
    ),
)


def _job(config: Config) -> Program:
    command, tiny = ((*size.arguments(10**6), "--any-order") for size in (config, config.tiny()))
    imports = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
    return Program(config.name, command, config.about, "optimizer", imports, tiny=tiny)


JOBS = tuple(map(_job, list(CONFIGS.values())[:6]))
CATALOG = {program.name: program for program in (*PUBLIC, *OURS, *JOBS)}


def prepare(public: Path) -> None:
    """Random tokens, images and weights for the public programs."""
    import numpy
    import torch
    from PIL import Image

    data, random = public / "data", numpy.random.default_rng(0)
    if (data / "done").exists():
        return
    (data / "stories110M").mkdir(parents=True, exist_ok=True)
    nanogpt = public / "nanogpt" / "data" / "random"
    nanogpt.mkdir(parents=True, exist_ok=True)
    tokens = random.integers(0, 50257, 4_000_000, dtype=numpy.uint16)
    for name in ("train.bin", "val.bin"):
        tokens.tofile(nanogpt / name)
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, len(tokens)  # llm.c's magic number, version, count
    (data / "tokens.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for split, count in (("train", 51_200), ("val", 64)):
        for number in range(count):
            folder = data / "images" / split / f"class{number % 8}"
            folder.mkdir(parents=True, exist_ok=True)
            path, first = folder / f"{number}.jpg", folder / f"{number % 64}.jpg"
            if number >= 64:
                path.symlink_to(first)
                continue
            small = random.integers(0, 256, (32, 32, 3), dtype=numpy.uint8)
            Image.fromarray(small).resize((256, 256)).save(path)
    _checkpoint(public / "gptfast", data / "stories110M", torch)
    (data / "done").touch()


def _checkpoint(checkout: Path, folder: Path, torch: object) -> None:
    """Random weights of the size that the folder's name gives, in gpt-fast's own format."""
    import runpy
    import sys

    sys.path.insert(0, str(checkout))
    transformer = runpy.run_path(str(checkout / "model.py"))["Transformer"]
    sys.path.pop(0)
    model = transformer.from_name(folder.name).to(torch.bfloat16)  # type: ignore[attr-defined]
    torch.save(model.state_dict(), folder / "model.pth")  # type: ignore[attr-defined]
    (folder / "tokenizer.model").touch()
