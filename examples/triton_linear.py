"""A linear layer on a Triton kernel with small tiles: several of its blocks are resident on each SM."""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch have no Triton; torch.matmul is used there
    triton = None

TILE = 64

if triton is not None:

    @triton.jit
    def tile_gemm(
        a_ptr: tl.tensor,
        b_ptr: tl.tensor,
        c_ptr: tl.tensor,
        m: tl.tensor,
        n: tl.tensor,
        k: tl.tensor,
        a_row: tl.tensor,
        a_col: tl.tensor,
        b_row: tl.tensor,
        b_col: tl.tensor,
        TILE: tl.constexpr,  # noqa: N803
        EVEN: tl.constexpr,  # noqa: N803
    ) -> None:
        """C = A·B for any strides of A and B; C is contiguous; one tile per block."""
        first_m, first_n = tl.program_id(1) * TILE, tl.program_id(0) * TILE
        rows = (first_m + tl.arange(0, TILE)) % m  # wrapped, so loads need no mask; the store is masked
        cols = (first_n + tl.arange(0, TILE)) % n
        inner = tl.arange(0, TILE)
        a = a_ptr + rows[:, None] * a_row + inner[None, :] * a_col
        b = b_ptr + inner[:, None] * b_row + cols[None, :] * b_col
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for done in range(0, k, TILE):
            if EVEN:
                total = tl.dot(tl.load(a), tl.load(b), total)
            else:
                x = tl.load(a, mask=inner[None, :] < k - done, other=0.0)
                y = tl.load(b, mask=inner[:, None] < k - done, other=0.0)
                total = tl.dot(x, y, total)
            a += TILE * a_col
            b += TILE * b_row
        rows, cols = first_m + tl.arange(0, TILE), first_n + tl.arange(0, TILE)
        c = c_ptr + rows[:, None] * n + cols[None, :]
        tl.store(c, total.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A·B of two matrices with any strides, each with fewer than 2³¹ elements."""
    if not a.is_cuda:
        return a @ b
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(n, TILE), triton.cdiv(m, TILE))
    tile_gemm[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), TILE, k % TILE == 0, num_warps=4, num_stages=3
    )
    return c


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return matmul(flat, weight).view_as(x), matmul(flat.t(), x.flatten(0, -2))


class TritonLinear(torch.nn.Linear):
    """torch.nn.Linear without bias, with the kernel above on a GPU and torch's own otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return torch.nn.functional.linear(x, self.weight)
        return _Linear.apply(x, self.weight)
