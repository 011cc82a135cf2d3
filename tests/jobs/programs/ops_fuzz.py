"""Random calls of weft.ops on P ranks over gloo, each compared with plain torch: `ops_fuzz.py P CALLS SEED`.

Every rank draws the same cases from the seed and makes all ranks' tensors, so the reference needs no
communication: it is computed in fp64 from those tensors.
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from weft.ops import all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter
from weft.ops.operands import scales_rows_on_cpus
from weft.policy import SCHEDULES, Policy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
GROUPS: dict[str, object] = {}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Case:
    """One call: its options and all ranks' tensors."""

    def __init__(self, draw: random.Random, ranks: int) -> None:
        self.ranks = ranks
        self.operation = draw.choice(["all_gather", "reduce_scatter", "all_to_all"])
        self.gathers = self.operation != "reduce_scatter"
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16, FP8[0]])
        self.fp8 = self.dtype in FP8
        self.schedule = draw.choice([None, *SCHEDULES])
        if self.fp8 and self.gathers and self.schedule == "uniform-fused-2d":
            self.schedule = None
        self.pieces = draw.choice([None, None, 1, 3, ranks + 1])
        self.by_policy = self.schedule is not None and draw.random() < 0.2
        self.lead = [draw.randint(1, 3) for _ in range(draw.choice([0, 0, 1, 2]))]
        self.dim = 0 if self.operation == "all_to_all" else draw.randint(0, len(self.lead))
        self.negative = draw.random() < 0.3
        self.weights = draw.choice([1, 1, 2, 3]) if self.gathers else 1
        self.as_list = self.weights > 1 or (self.gathers and draw.random() < 0.3)
        self.bias = draw.random() < 0.4
        self.return_a = self.gathers and draw.random() < 0.4
        self.grad = not self.fp8 and draw.random() < 0.6
        self.needs = (
            draw.choice([(True, True), (True, False), (False, True)]) if self.grad else (False, False)
        )
        self.out = not self.grad and draw.random() < 0.3
        self.strided, self.transposed = draw.random() < 0.3, draw.random() < 0.5
        self.rows_scaled = self.fp8 and draw.random() < 0.5 and scales_rows_on_cpus()
        self.seed = draw.randrange(1 << 30)
        self.engine = draw.choice([None, None, "dma", "sm"])
        self.fast_accum = self.fp8 and draw.random() < 0.5
        self.out_dtype = draw.choice([None, torch.bfloat16, torch.float32]) if self.fp8 else None
        self.group = draw.choice(["left out", "world", "own", "by name", "mesh"])
        self.no_grad = "inference" if not self.grad and draw.random() < 0.5 else ""
        step = 16 if self.fp8 else 1
        self.k = step * draw.randint(1, 3 if self.fp8 else 9)
        differ = self.schedule is not None and draw.random() < 0.4
        extra = [step * draw.randint(0, 2) if differ else 0 for _ in range(ranks)]
        self.ks = [self.k + (0 if self.gathers else e) for e in extra]
        n = [step * draw.randint(1, 3 if self.fp8 else 9) for _ in range(self.weights)]
        self.ns = [[each + (e if self.gathers else 0) for each in n] for e in extra]
        self._draw_rows(draw)

    @property
    def made_dtype(self) -> torch.dtype:
        """The dtype of the results."""
        return self.out_dtype or torch.bfloat16 if self.fp8 else self.dtype

    def _draw_rows(self, draw: random.Random) -> None:
        ranks = self.ranks
        uneven = draw.random() < 0.5
        self.rows = self.splits = None
        if self.operation == "all_to_all":
            if uneven:
                self.splits = [[draw.randint(0, 4) for _ in range(ranks)] for _ in range(ranks)]
                self.splits[0][0] += 1
                self.counts = [sum(each) for each in self.splits]
            else:
                self.counts = [ranks * draw.randint(1, 4)] * ranks
        elif uneven:
            self.rows = [draw.randint(0, 5) for _ in range(ranks)]
            self.rows[draw.randrange(ranks)] += 1
            self.counts = self.rows if self.gathers else [sum(self.rows)] * ranks
        else:
            size = draw.randint(1, 6)
            self.counts = [size if self.gathers else size * draw.randint(1, ranks + 2)] * ranks

    def tensors(self) -> None:
        made = torch.Generator().manual_seed(self.seed)

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made)

        def shape(rank: int) -> list[int]:
            sizes = list(self.lead)
            sizes.insert(self.dim, self.counts[rank])
            return [*sizes, self.ks[rank]]

        every = range(self.ranks)
        self.xs = [new(*shape(q)).to(self.dtype) for q in every]
        self.ws = [[new(self.ks[q], n).to(self.dtype) for n in self.ns[q]] for q in every]
        kept = self.made_dtype
        self.biases = [[new(n).to(kept) for n in self.ns[q]] for q in every]
        self.x_scales = [torch.rand(*x.shape[:-1], 1, generator=made) + 0.5 for x in self.xs]
        self.w_scales = [[torch.rand(1, n, generator=made) + 0.5 for n in self.ns[q]] for q in every]
        if not self.rows_scaled:
            shared = torch.rand((), generator=made) + 0.5  # all ranks of a gather have the same scale
            self.x_scales = [shared if self.gathers else shared + q for q in every]
            self.w_scales = [[scale.flatten()[0] for scale in scales] for scales in self.w_scales]

    def expected(self, rank: int, seed: int) -> tuple[list[torch.Tensor], ...]:
        """This rank's results, the gathered x, and the gradients of this rank's x, w and bias."""
        xs = [x.double() for x in self.xs]
        ws = [[w.double() for w in each] for each in self.ws]
        if self.fp8:
            xs = [x * scale.double() for x, scale in zip(xs, self.x_scales, strict=True)]
            ws = [
                [w * s.double() for w, s in zip(each, scales, strict=True)]
                for each, scales in zip(ws, self.w_scales, strict=True)
            ]
        leaves = [x.requires_grad_() for x in xs], [[w.requires_grad_() for w in each] for each in ws]
        biases = [[b.double().requires_grad_() for b in each] for each in self.biases]
        gathered: list[torch.Tensor] = []
        if self.operation == "all_gather":
            gathered = [torch.cat(xs, self.dim)] * self.ranks
        elif self.operation == "all_to_all":
            sizes = self.splits or [[c // self.ranks] * self.ranks for c in self.counts]
            parts = [x.split(s, 0) for x, s in zip(xs, sizes, strict=True)]
            gathered = [torch.cat([part[q] for part in parts]) for q in range(self.ranks)]
        if self.gathers:
            results = [[g @ w for w in each] for g, each in zip(gathered, ws, strict=True)]
        else:
            total = sum(x @ each[0] for x, each in zip(xs, ws, strict=True))
            rows = self.rows or even(total.shape[self.dim], self.ranks)
            results = [[part] for part in total.split(rows, self.dim)]
        if self.bias:
            results = [
                [y + b for y, b in zip(ys, each, strict=True)]
                for ys, each in zip(results, biases, strict=True)
            ]
        if self.grad:
            made = torch.Generator().manual_seed(seed)
            loss = 0.0
            for q in range(self.ranks):
                given = [torch.randn(y.shape, generator=made) for y in results[q]]
                loss = loss + sum(
                    (y * g.to(self.dtype).double()).sum() for y, g in zip(results[q], given, strict=True)
                )
                if self.return_a:
                    g = torch.randn(gathered[q].shape, generator=made)
                    loss = loss + (gathered[q] * g.to(self.dtype).double()).sum()
            loss.backward()
        grads = [leaves[0][rank].grad], [w.grad for w in leaves[1][rank]], [b.grad for b in biases[rank]]
        return ([y.detach() for y in results[rank]], [g.detach() for g in gathered[rank : rank + 1]], *grads)

    def call(self, rank: int, x: torch.Tensor, ws: list[torch.Tensor], biases: list[torch.Tensor], outs):
        options = {"pieces": self.pieces, "engine": self.engine}
        if self.group != "left out":
            options["group"] = GROUPS[self.group]
        if self.by_policy:
            options["policy"] = Policy(schedule=self.schedule)
        else:
            options["schedule"] = self.schedule
        if self.fp8:
            options |= {"A_scale": self.x_scales[rank], "B_scale": self.w_scales[rank]}
            options |= {"use_fast_accum": self.fast_accum, "out_dtype": self.out_dtype}
            if not self.as_list:
                options["B_scale"] = self.w_scales[rank][0]
        if self.bias:
            options["bias"] = biases if self.as_list else biases[0]
        if outs is not None:
            options["out"] = outs if self.as_list else outs[0]
        dim = self.dim - x.dim() if self.negative else self.dim
        if self.operation == "reduce_scatter":
            return matmul_reduce_scatter(x, ws[0], scatter_dim=dim, rows=self.rows, **options)
        options["return_A"] = self.return_a
        given = ws if self.as_list else ws[0]
        if self.operation == "all_gather":
            return all_gather_matmul(x, given, gather_dim=dim, rows=self.rows, **options)
        if self.splits is not None:
            options["input_splits"] = self.splits[rank]
            options["output_splits"] = [each[rank] for each in self.splits]
        return all_to_all_matmul(x, given, **options)

    def check(self, rank: int) -> None:
        self.tensors()
        seed = self.seed + 1
        wanted, gathered, dx, dws, dbs = self.expected(rank, seed)
        x = self.xs[rank].clone()
        if self.strided:
            x = torch.cat([x, x], -1)[..., : x.shape[-1]]
        ws = [w.clone() for w in self.ws[rank]]
        if self.transposed or self.fp8:
            ws = [w.t().contiguous().t() for w in ws]
        biases = [b.clone().requires_grad_(self.grad) for b in self.biases[rank]]
        x, ws = x.requires_grad_(self.needs[0]), [w.requires_grad_(self.needs[1]) for w in ws]
        dtype = self.made_dtype
        outs = [torch.full(y.shape, float("nan"), dtype=dtype) for y in wanted] if self.out else None
        with torch.inference_mode() if self.no_grad else nullcontext():
            got = self.call(rank, x, ws, biases, outs)
        if self.return_a:
            a, got = got
            if self.fp8:
                assert a.dtype == self.dtype
                assert a.shape == gathered[0].shape
            else:
                close(a, gathered[0], dtype, "gathered A")
        assert isinstance(got, list) == self.as_list
        ys = got if self.as_list else [got]
        if outs is not None:
            assert all(y is out for y, out in zip(ys, outs, strict=True))
        for y, want in zip(ys, wanted, strict=True):
            close(y, want, dtype, "result")
        if not self.grad:
            return
        made = torch.Generator().manual_seed(seed)
        loss = 0.0
        for q in range(self.ranks):
            shapes = [self._out_shape(q, i) for i in range(self.weights)]
            given = [torch.randn(shape, generator=made).to(dtype) for shape in shapes]
            of_a = torch.randn(self._a_shape(q), generator=made).to(dtype) if self.return_a else None
            if q == rank:
                loss = sum((y * g).sum() for y, g in zip(ys, given, strict=True))
                if of_a is not None:
                    loss = loss + (a * of_a).sum()
        loss.backward()
        if self.needs[0]:
            close(x.grad, dx[0], dtype, "gradient of A")
        if self.needs[1]:
            for w, want in zip(ws, dws, strict=True):
                close(w.grad, want, dtype, "gradient of B")
        if self.bias:
            for b, want in zip(biases, dbs, strict=True):
                close(b.grad, want, dtype, "gradient of bias")

    def _rows_of(self, q: int) -> int:
        if self.operation == "all_gather":
            return sum(self.counts)
        if self.operation == "all_to_all":
            sizes = self.splits or [[c // self.ranks] * self.ranks for c in self.counts]
            return sum(each[q] for each in sizes)
        return (self.rows or even(self.counts[0], self.ranks))[q]

    def _out_shape(self, q: int, i: int) -> list[int]:
        sizes = list(self.lead)
        sizes.insert(self.dim, self._rows_of(q))
        return [*sizes, self.ns[q][i]]

    def _a_shape(self, q: int) -> list[int]:
        return [*self._out_shape(q, 0)[:-1], self.k]


def even(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    if want.numel():
        error = ((got.double() - want).abs().max() / want.abs().max().clamp(min=1)).item()
        assert error < TOLERANCE[dtype], f"{what}: off by {error:.2g} of the largest value"


def check_calls(rank: int, ranks: int, calls: int, seed: int) -> None:
    GROUPS["world"], GROUPS["own"] = dist.group.WORLD, dist.new_group(list(range(ranks)))
    GROUPS["by name"] = GROUPS["own"].group_name
    GROUPS["mesh"] = init_device_mesh("cpu", (ranks,))
    draw = random.Random(seed * 1000 + ranks)
    for number in range(calls):
        case = Case(draw, ranks)
        options = dict(vars(case))
        try:
            case.check(rank)
        except BaseException:
            print(f"rank {rank} call {number}: {options}", file=sys.stderr, flush=True)
            raise
    if rank == 0:
        print(f"{calls} calls on {ranks} ranks equal plain torch", flush=True)


def main() -> None:
    ranks, calls, seed = (int(each) for each in sys.argv[1:4])
    with tempfile.TemporaryDirectory() as folder:
        failed = run_ranks(ranks, folder, 60.0, lambda rank, size: check_calls(rank, size, calls, seed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
