"""Names of kernels that communicate: the table shared by the shim and the trace reader.

A pattern is a case-insensitive glob over the whole kernel name (`*`: any run of characters, `?`: one).
Every pattern must match both the demangled name in a trace and the mangled name in the driver.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

TRITON_GEMM = "weft_gemm"
"""Name of weft's Triton GEMM, on a GPU and in the simulator."""

COMM_KERNELS: dict[str, tuple[str, ...]] = {
    "nccl": ("nccl*", "void nccl*", "*ncclDevKernel*", "*ncclKernel*", "*ncclSym*Kernel*"),
    "rccl": ("rccl*", "*mscclKernel*", "*mscclpp*"),
    "nvshmem": ("*nvshmem*", "*rocshmem*"),
    # DeepEP: `deep_ep::intranode::dispatch<…>`, mangled `…7deep_ep9intranode8dispatch…`. A bare
    # "dispatch" would also match cub::DispatchReduce and the like, so the namespace is required.
    "deep_ep": ("*deep_ep::*", "*N7deep_ep*", "*ep::internode*::*", "*ep::intranode::*"),
    "symmetric memory": ("*multimem_*", "*one_shot_all*", "*two_shot_all*"),
    "custom all-reduce": (
        "*oneShotAllReduce*",
        "*twoShotAllReduce*",
        "*allreduce_fusion_kernel*",
        "*cross_device_reduce*",
        "*quickreduce*allreduce*",
    ),
}


MATRIX_KERNEL = re.compile(
    r"gemm|matmul|nvjet|cutlass|conv|attention|flash|fmha|mfma|_mm_|\bmm\b", re.IGNORECASE
)
"""Names of kernels that multiply matrices: GEMM, convolution, attention."""


def glob_regex(globs: Iterable[str]) -> re.Pattern[str]:
    """A regular expression that matches a whole name against any of the globs.

    Matching time is bounded for any policy file: before the last two stars, each piece of text is matched
    only at its first occurrence, which is enough for a glob. (There is no backtracking into a lookahead.)
    """
    number, parts = itertools.count(), []
    for glob in globs:
        first, *rest = ("".join("." if c == "?" else re.escape(c) for c in text) for text in glob.split("*"))
        inner = [text for text in rest[:-1] if text]
        once = (rf"(?=(?P<g{n}>.*?{text}))(?P=g{n})" for text, n in zip(inner[:-1], number, strict=False))
        last = (f".*{text}" for text in (*inner[-1:], *rest[-1:]))
        parts.append(f"(?:{first}{''.join(once)}{''.join(last)})")
    return re.compile("|".join(parts) or r"(?!)", re.IGNORECASE | re.DOTALL)


def comm_globs() -> tuple[str, ...]:
    """All patterns of COMM_KERNELS, in order."""
    return tuple(glob for globs in COMM_KERNELS.values() for glob in globs)


_COMM = glob_regex(comm_globs())


def is_comm(name: str) -> bool:
    """Whether the kernel with this name moves data between GPUs."""
    return _COMM.fullmatch(name) is not None
