"""Triton kernels of the lab. Policy rules match their names. Import fails without Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[misc,unused-ignore,untyped-decorator]
def weft_gemm(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    size_m: tl.tensor,
    size_n: tl.tensor,
    size_k: tl.tensor,
    TILE_M: tl.constexpr,  # noqa: N803
    TILE_N: tl.constexpr,  # noqa: N803
    TILE_K: tl.constexpr,  # noqa: N803
    EVEN_K: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
) -> None:
    """C = A·B (row-major, contiguous), optionally with GELU, on the matrix or the vector units.

    Each block loops over tiles with the grid as stride, so any grid works: the blocks of a small grid are
    persistent, and surplus blocks of a large grid exit immediately."""
    # Hoisting out of these loops costs up to 45 registers per thread (171 instead of 126 at 128x128x64).
    for tile_m in tl.range(
        tl.program_id(1), tl.cdiv(size_m, TILE_M), tl.num_programs(1), num_stages=1, disable_licm=True
    ):
        for tile_n in tl.range(
            tl.program_id(0), tl.cdiv(size_n, TILE_N), tl.num_programs(0), num_stages=1, disable_licm=True
        ):
            # 64-bit scalars with 32-bit offsets in a tile need fewer registers: more blocks fit on an SM.
            first_m, first_n = tile_m * TILE_M, tile_n * TILE_N
            # Rows and columns wrap around so that the loads need no masks; the store is masked.
            rows = (first_m + tl.arange(0, TILE_M)) % size_m - first_m
            cols = (first_n + tl.arange(0, TILE_N)) % size_n
            inner = tl.arange(0, TILE_K)
            a_base = a_ptr + tl.cast(first_m, tl.int64) * size_k
            b_base = b_ptr
            a_offs = rows[:, None] * size_k + inner[None, :]
            b_offs = inner[:, None] * size_n + cols[None, :]
            total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
            for k in range(0, tl.cdiv(size_k, TILE_K)):
                if EVEN_K:
                    a = tl.load(a_base + a_offs)
                    b = tl.load(b_base + b_offs)
                else:
                    left = size_k - k * TILE_K
                    a = tl.load(a_base + a_offs, mask=inner[None, :] < left, other=0.0)
                    b = tl.load(b_base + b_offs, mask=inner[:, None] < left, other=0.0)
                if VECTOR:  # no GPU has a matrix unit for exact fp32
                    total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
                else:
                    total = tl.dot(a, b, total)
                a_base += TILE_K
                b_base += TILE_K * size_n
            if GELU:
                # tanh via exp, which every Triton back end has
                x = 0.7978845608 * (total + 0.044715 * total * total * total)
                total = total * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * x)))
            rows = tl.arange(0, TILE_M)
            cols = tl.arange(0, TILE_N)
            c_base = c_ptr + tl.cast(first_m, tl.int64) * size_n + first_n
            inside = (rows[:, None] < size_m - first_m) & (cols[None, :] < size_n - first_n)
            c_ptrs = c_base + rows[:, None] * size_n + cols[None, :]
            tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=inside)


def launch_gemm(
    a: Any,
    b: Any,
    c: Any,
    *,
    tile: tuple[int, int, int],
    grid: tuple[int, int],
    warps: int,
    stages: int,
    gelu: bool = False,
    vector: bool = False,
) -> None:
    """C = A·B on the current stream. `vector`: on the vector units instead of the matrix units."""
    (size_m, size_k), size_n = a.shape, b.shape[1]
    weft_gemm[grid](
        a,
        b,
        c,
        size_m,
        size_n,
        size_k,
        *tile,
        size_k % tile[2] == 0,
        gelu,
        vector,
        num_warps=warps,
        num_stages=stages,
    )
