"""Runs named checks of weft.ops on P ranks over gloo, forked once: `ops_ranks.py P FOLDER CHECK…`."""

from __future__ import annotations

import itertools
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from forked_ranks import run_ranks

import weft.ops.functions  # noqa: F401  (before the fork, so that ranks need not import it again)
from weft.errors import WeftError
from weft.ops import all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter
from weft.ops.schedule import OPERATIONS, split
from weft.policy import SCHEDULES, Policy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tensors(operation, rank, ranks, m, n, k, dtype, rows):
    """All ranks' x, w and gradients of the result; the same on every rank."""
    made = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(*shape, generator=made).to(dtype)

    if operation == "all_gather_matmul":  # columns of w differ by rank
        xs = [random(count, k) for count in rows]
        ws = [random(k, n + q % 2) for q in range(ranks)]
        gs = [random(sum(rows), n + q % 2) for q in range(ranks)]
    elif operation == "matmul_reduce_scatter":  # rows of w differ by rank
        xs = [random(m, k + q % 3) for q in range(ranks)]
        ws = [random(k + q % 3, n) for q in range(ranks)]
        gs = [random(count, n) for count in rows]
    else:
        xs = [random(m, k) for _ in range(ranks)]
        ws = [random(k, n + q % 2) for q in range(ranks)]
        gs = [random(ranks * rows[q], n + q % 2) for q in range(ranks)]
    return xs, ws, gs


def expected(operation, rank, xs, ws, gs, rows):
    """The serial reference in fp64: result, gradient of x, gradient of w."""
    xs = [x.double().requires_grad_() for x in xs]
    ws = [w.double().requires_grad_() for w in ws]
    if operation == "all_gather_matmul":
        ys = [torch.cat(xs) @ w for w in ws]
    elif operation == "matmul_reduce_scatter":
        ys = list(sum(x @ w for x, w in zip(xs, ws, strict=True)).split(rows))
    else:
        ys = [torch.cat([x.split(rows)[q] for x in xs]) @ w for q, w in enumerate(ws)]
    sum((y * g.double()).sum() for y, g in zip(ys, gs, strict=True)).backward()
    return ys[rank], xs[rank].grad, ws[rank].grad


def close(got, want, dtype, what):
    scale = want.abs().max().clamp(min=1.0)
    error = ((got.double() - want).abs().max() / scale).item() if want.numel() else 0.0
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    assert error < TOLERANCE[dtype], f"{what}: off by {error:.2g} of the largest value"


def call(operation, x, w, rows, **options):
    if operation == "all_gather_matmul":
        return all_gather_matmul(x, w, rows=rows, **options)
    if operation == "matmul_reduce_scatter":
        return matmul_reduce_scatter(x, w, rows=rows, **options)
    return all_to_all_matmul(x, w, **options)


def check_every_schedule(rank, ranks):
    """Forward and backward of every schedule of every operation, uneven m, n and k, three dtypes."""
    sizes = [(ranks * ranks + 3, 5, 7), (ranks * ranks * 2, 8, ranks * 3)]
    for operation, (m, n, k), dtype in itertools.product(OPERATIONS, sizes, TOLERANCE):
        for rows in (split(m, ranks), (m - ranks + 1, *[1] * (ranks - 1))):
            if operation == "all_to_all_matmul" and rows != split(m, ranks):
                continue
            if dtype != torch.float32 and rows == split(m, ranks) and operation != "all_to_all_matmul":
                continue  # each dtype once
            xs, ws, gs = tensors(operation, rank, ranks, m, n, k, dtype, rows)
            y, dx, dw = expected(operation, rank, xs, ws, gs, rows)
            for schedule in SCHEDULES:
                x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
                what = f"{operation} {schedule} {m}x{n}x{k} {rows} {dtype} rank {rank}"
                got = call(operation, x, w, rows, schedule=schedule)
                close(got, y, dtype, f"{what}: result")
                got.backward(gs[rank])
                close(x.grad, dx, dtype, f"{what}: gradient of x")
                close(w.grad, dw, dtype, f"{what}: gradient of w")


def check_again_and_again(rank, ranks):
    """One plan, many calls on new tensors; a transposed w; out=; more dimensions; more pieces; a policy."""
    m, n, k = ranks * 6, 5, 4
    for operation in OPERATIONS:
        rows = split(m, ranks)
        for schedule in SCHEDULES:
            for turn in range(2):
                xs, ws, gs = tensors(operation, rank, ranks, m, n, k, torch.float32, rows)
                y, _, _ = expected(operation, rank, [x + turn for x in xs], ws, gs, rows)
                x, w = xs[rank] + turn, ws[rank].t().contiguous().t()
                what = f"{operation} {schedule} turn {turn}"
                out = torch.full(y.shape, float("nan"))
                assert call(operation, x, w, rows, schedule=schedule, out=out) is out
                close(out, y, torch.float32, what)
                close(call(operation, x, w, rows, policy=Policy(schedule=schedule)), y, torch.float32, what)
                close(call(operation, x, w, rows, schedule=schedule, pieces=3), y, torch.float32, what)
                strided = torch.randn(x.shape[0], 2 * x.shape[1])[:, ::2].copy_(x)
                close(call(operation, strided, w, rows), y, torch.float32, f"{what} strided")
    x = torch.randn(3, 2, k, generator=torch.Generator().manual_seed(rank))
    w = torch.randn(k, n, generator=torch.Generator().manual_seed(100))
    everyone = [torch.randn(3, 2, k, generator=torch.Generator().manual_seed(q)) for q in range(ranks)]
    close(all_gather_matmul(x, w), torch.cat(everyone).double() @ w.double(), torch.float32, "3-d")
    tall = torch.ones(2 * ranks + 1, 3, k)
    kept = matmul_reduce_scatter(tall, w)
    want = (ranks * tall.double() @ w.double()).split(split(2 * ranks + 1, ranks))[rank]
    close(kept, want, torch.float32, "3-d, uneven")


def check_uneven_blocks(rank, ranks):
    """All-to-all blocks of any size, including empty ones."""
    sizes = [[(3 * source + 2 * to) % 5 for to in range(ranks)] for source in range(ranks)]
    sizes[0][0] += 1
    k, n = 6, 4
    xs = [
        torch.randn(max(sum(s), 1), k, generator=torch.Generator().manual_seed(q))
        for q, s in enumerate(sizes)
    ]
    xs = [x[: sum(s)] for x, s in zip(xs, sizes, strict=True)]
    w = torch.randn(k, n, generator=torch.Generator().manual_seed(50 + rank)).requires_grad_()
    blocks = torch.cat([x.split(s)[rank] for x, s in zip(xs, sizes, strict=True)])
    for schedule in SCHEDULES:
        x = xs[rank].clone().requires_grad_()
        got = all_to_all_matmul(
            x, w, input_splits=sizes[rank], output_splits=[s[rank] for s in sizes], schedule=schedule
        )
        close(got, blocks.double() @ w.detach().double(), torch.float32, f"blocks {schedule}")
        w.grad = None
        (got * (rank + 1)).sum().backward()
        ones = torch.full((len(blocks), n), float(rank + 1), dtype=torch.double)
        close(w.grad, blocks.double().t() @ ones, torch.float32, "gradient of w")
        to = torch.arange(ranks).repeat_interleave(torch.tensor(sizes[rank]))
        every = [
            torch.randn(k, n, generator=torch.Generator().manual_seed(50 + q)).double() for q in range(ranks)
        ]
        want = torch.stack([every[q].sum(1) * (q + 1) for q in to.tolist()]) if len(to) else torch.zeros(0, k)
        close(x.grad, want, torch.float32, "gradient of x")


def check_changes_alone(rank, ranks):
    """Some sizes may change without the others' consent: blocks between two other ranks, a rank's n or k."""
    for count in (1, 2, 3, 1):
        blocks = [[count if {q, p} == {0, 1} else 1 for p in range(ranks)] for q in range(ranks)]
        sent, received = blocks[rank], [blocks[q][rank] for q in range(ranks)]
        y = all_to_all_matmul(
            torch.full((sum(sent), 4), 1.0 + rank),
            torch.ones(4, 3),
            input_splits=sent,
            output_splits=received,
        )
        want = torch.cat([torch.full((received[q], 3), 4.0 * (1 + q)) for q in range(ranks)])
        close(y, want.double(), torch.float32, f"{count} rows between 0 and 1")
    for size in (5, 6, 5):
        own = size if rank == 0 else 5
        y = all_gather_matmul(torch.ones(2, 4), torch.ones(4, own), schedule="hetero-fused-1d")
        close(y, torch.full((2 * ranks, own), 4.0).double(), torch.float32, f"n {own}")
        y = matmul_reduce_scatter(torch.ones(ranks, own), torch.ones(own, 3), schedule="shard")
        close(y, torch.full((1, 3), 5.0 * (ranks - 1) + size).double(), torch.float32, f"k {own}")


def check_odd_calls(rank, ranks):
    """Every rank refuses these calls alike, and the group stays usable."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    from weft.ops.teams import KEPT, team_of

    x, w = torch.ones(2 * ranks, 4), torch.ones(4, 4)
    with torch.inference_mode():
        matmul_reduce_scatter(x, w)
    close(
        matmul_reduce_scatter(x, w),
        torch.full((2, 4), 4.0 * ranks).double(),
        torch.float32,
        "after inference",
    )
    for schedule in SCHEDULES:
        error = refused(lambda schedule=schedule: all_to_all_matmul(x, w, out=x, schedule=schedule))
        assert "out shares memory with A" in error
    part = distribute_tensor(x, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    assert "A is a DTensor; give this rank's part, A.to_local()" in refused(
        lambda: all_gather_matmul(part, w)
    )
    assert "must be a tensor, not int" in refused(lambda: all_gather_matmul(x, [1]))
    assert "only the dimension that is gathered or scattered may be empty" in refused(
        lambda: all_gather_matmul(torch.ones(2, 0, 4), w)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "int64 is not supported" in refused(lambda: all_gather_matmul(x.long(), w.long()))
    pair = dist.new_group([0, 1])
    if rank < 2:
        close(all_gather_matmul(w, w, pair), torch.full((8, 4), 4.0).double(), torch.float32, "a pair")
    else:
        assert "this rank is not in the group" in refused(lambda: all_gather_matmul(w, w, pair))
    for rows in (*range(1, KEPT + 5), 1):
        y = all_gather_matmul(torch.ones(rows, 4), w)
        close(y, torch.full((rows * ranks, 4), 4.0).double(), torch.float32, f"{rows} rows")
    assert len(team_of(None).prepared) == KEPT
    team = team_of(None)
    said = [key for key in (f"{call}.0/{rank}" for call in range(team.calls + 1)) if team.store.check([key])]
    assert len(said) <= 1, said  # the store does not grow
    bad = torch.empty(1) if rank == 0 else None  # the others learn why rank 0 does not take part
    error = refused(lambda: all_gather_matmul(torch.ones(1, 4), w, out=bad))
    assert "out has shape (1,)" in error, error


def refused(call):
    try:
        call()
    except WeftError as error:
        return str(error)
    raise AssertionError("was not refused")


def problem(*words):
    """A context that expects a WeftError containing all these words."""

    class Wanted:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            assert error is not None, f"no error; wanted {words}"
            assert isinstance(error, WeftError), f"{kind}: {error}"
            assert all(word in str(error) for word in words), f"{error} lacks one of {words}"
            return True

    return Wanted()


def check_disagreements(rank, ranks):
    """Ranks that differ in shape, dtype or schedule: on every rank the error names both sides."""
    odd = rank == ranks - 1
    last = f"rank {ranks - 1}"
    w = torch.ones(4, 4)
    with problem("columns of A", "rank 0 has 4", f"{last} has 5"):
        all_gather_matmul(torch.ones(2, 5 if odd else 4), torch.ones(5 if odd else 4, 4))
    with problem("rows", "rank 0 has", last):
        all_gather_matmul(torch.ones(3 if odd else 2, 4), w)
    with problem("dtype", "float32", "bfloat16", last):
        kind = torch.bfloat16 if odd else torch.float32
        all_gather_matmul(torch.ones(2, 4, dtype=kind), w.to(kind))
    with problem("schedule", "serial", "shard", last):
        matmul_reduce_scatter(torch.ones(ranks, 4), w, schedule="shard" if odd else "serial")
    with problem("dimension", "rank 0 has 0", f"{last} has 1"):  # the same rows, in another order
        all_gather_matmul(torch.ones(3, 3, 4), w, gather_dim=int(odd))
    with problem("dtype", "float32", "float8_e4m3fn", last):
        eight, scale = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(())
        scales = {"A_scale": scale, "B_scale": scale}
        if odd:
            all_gather_matmul(eight, torch.ones(16, 32).to(torch.float8_e4m3fn).t(), **scales)
        else:
            all_gather_matmul(eight.float(), torch.ones(32, 16))
    with problem("operation", "all_gather_matmul", "matmul_reduce_scatter"):
        (matmul_reduce_scatter if odd else all_gather_matmul)(torch.ones(7, 4), w)
    with problem("sends", "expects"):
        all_to_all_matmul(
            torch.ones(ranks, 4),
            w,
            input_splits=[1] * ranks,
            output_splits=[*[1] * (ranks - 1), 2 if not odd else 1],
        )
    with problem("int32", "not supported"):
        kind = torch.int32 if odd else torch.float32
        all_gather_matmul(torch.ones(9, 4, dtype=kind), w.to(kind))
    with problem("A has 4 columns and B has 3 rows"):
        all_gather_matmul(torch.ones(11, 4), torch.ones(3 if odd else 4, 2))
    got = all_gather_matmul(torch.ones(2, 4), w)
    assert torch.equal(got, torch.full((2 * ranks, 4), 4.0)), "the group must still work afterwards"


def check_late_disagreement(rank, ranks):
    """One rank changes its shape; the others repeat an agreed call and wait for its data until the timeout.

    The group's timeout is short, and starts when all ranks have arrived, however long that took. The others
    must fail before the odd rank, which waits for their reply, gives up; so the odd rank calls later.
    """
    w, timeout_s = torch.ones(4, 4), 4.0
    hasty = dist.new_group(timeout=timedelta(seconds=timeout_s))
    all_gather_matmul(torch.ones(2, 4), w, hasty)
    odd = rank == ranks - 1
    dist.barrier()
    if odd:
        time.sleep(0.35 * timeout_s)
    with problem("rows" if ranks > 1 else "", f"rank {ranks - 1}"):
        all_gather_matmul(torch.ones(3 if odd else 2, 4), w, hasty)


def in_time(begun, ranks):
    """The error must come with the group's timeout, not torch's half hour; a busy machine gets more time."""
    from weft.ops.teams import team_of

    took, most = time.monotonic() - begun, 10 * team_of(None).timeout_s
    assert took < most, f"the error took {took:.1f} s, more than {most:.1f}"


def check_fails_midway(rank, ranks):
    """A rank's matmul fails in the middle of a schedule: the others learn which rank's, and all can exit."""
    from weft.ops import run_messages

    w = torch.ones(4, 4)
    for schedule in SCHEDULES:  # prepare all, so that later calls exchange only data
        matmul_reduce_scatter(torch.ones(2 * ranks, 4), w, schedule=schedule)
    begun, last = time.monotonic(), ranks - 1
    if rank == last:
        run_messages.perform = fail
        try:
            matmul_reduce_scatter(torch.ones(2 * ranks, 4), w, schedule="shard")
        except RuntimeError as error:
            assert str(error) == "no such matmul", error
        else:
            raise AssertionError("the matmul did not fail")
    else:
        with problem(f"rank {last} cannot continue: RuntimeError: no such matmul"):
            matmul_reduce_scatter(torch.ones(2 * ranks, 4), w, schedule="shard")
    in_time(begun, ranks)
    dist.destroy_process_group()


def fail(*_):
    raise RuntimeError("no such matmul")  # what torch raises, and gloo when a peer is gone


def check_first_rank_dies(rank, ranks):
    """Rank 0, which hosts the group's store, dies: the others still get an error that names it."""
    w = torch.ones(4, 4)
    all_gather_matmul(torch.ones(2, 4), w)
    if rank == 0:
        os._exit(0)
    begun = time.monotonic()
    with problem("rank 0", "did not take part"):
        for _ in range(3):
            all_gather_matmul(torch.ones(2, 4), w)
    with problem("rank 0", "did not take part"):
        all_gather_matmul(torch.ones(5, 4), w)  # a new kind of call uses only the store
    in_time(begun, ranks)


def check_peer_dies(rank, ranks):
    """A rank exits: within the group's timeout the others get an error that says so."""
    w = torch.ones(4, 4)
    all_gather_matmul(torch.ones(2, 4), w, schedule="hetero-fused-1d")
    if rank == ranks - 1:
        os._exit(0)
    begun = time.monotonic()
    with problem(f"rank {ranks - 1}", "did not take part"):
        for _ in range(3):
            all_gather_matmul(torch.ones(2, 4), w, schedule="hetero-fused-1d")
    in_time(begun, ranks)
    dist.destroy_process_group()


def check_tuned(rank, ranks):
    """A measured verdict is stored and applies to every rank's next call; only rank 0 reads the store."""
    from weft.ops import tune, tuner
    from weft.ops.teams import team_of
    from weft.tuning.store import Store

    x, w = torch.ones(4 * ranks, 8), torch.ones(8, 6)
    timed, ms = tuner._timed, {"serial": 2.0, "shard": 1.0}

    def slow_on_rank(function, x, w, group, choice, options):
        timed(function, x, w, group, choice, options)
        return ms.get(choice.schedule, 3.0) * (1 + 0.5 * rank)  # ranks differ; all must decide alike

    tuner._timed = slow_on_rank
    found = tune("matmul_reduce_scatter", x, w, rounds=5)
    slowest = 1 + 0.5 * (ranks - 1)
    assert (found.policy.schedule, found.best_ms, found.baseline_ms) == ("shard", slowest, 2 * slowest), found
    assert found.gain_ci_pct == (50.0, 50.0), found.gain_ci_pct
    ms["shard"] = 2.5
    lost = tune("matmul_reduce_scatter", x + 1, w, rounds=5, store=False)
    assert (lost.policy.schedule, lost.leave, lost.gain_pct) == ("serial", True, 0.0), lost
    tuner._timed = timed
    labels = {each.candidate for each in found.candidates}
    assert labels == {f"{name} sm" for name in SCHEDULES} | {f"hetero-fused-1d/{2 * ranks} sm"}
    dist.barrier()
    (entry,) = Store().entries()
    assert entry.policy.schedule == "shard"
    matmul_reduce_scatter(x, w)
    assert list(team_of(None).prepared.values())[-1].schedule.name == "shard"
    tune("matmul_reduce_scatter", x, w, rounds=3, store=False)  # drops what was prepared
    dist.barrier()
    if rank == 0:
        Store().put(entry.key, Policy(schedule="uniform-fused-2d"), {"text": "by hand"})
    else:
        os.environ["WEFT_STORE"] = "/nonexistent/file"
    dist.barrier()
    got = matmul_reduce_scatter(x, w)
    close(got, torch.full((4, 6), 8.0 * ranks).double(), torch.float32, "tuned")
    prepared = list(team_of(None).prepared.values())[-1]
    assert prepared.schedule.name == prepared.choice.schedule == "uniform-fused-2d"


def check_compiled(rank, ranks):
    """The same values and gradients under torch.compile, with no graph break; several weights, any dimension."""
    torch._dynamo.config.cache_size_limit = 64
    options = {"schedule": "hetero-fused-1d"}
    layers = {
        "all_gather_matmul": lambda x, w: all_gather_matmul(torch.sin(x), w, **options).relu(),
        "with a group": lambda x, w: all_gather_matmul(torch.sin(x), w, dist.group.WORLD, **options).relu(),
        "matmul_reduce_scatter": lambda x, w: matmul_reduce_scatter(torch.sin(x), w, **options).relu(),
        "all_to_all_matmul": lambda x, w: all_to_all_matmul(torch.sin(x), w, **options).relu(),
        "two weights": lambda x, w: sum(all_gather_matmul(torch.sin(x), [w, 2 * w], bias=[w[0], None])),
        "gathered": lambda x, w: torch.cat(all_gather_matmul(torch.sin(x), w, return_A=True), 1),
        "second dimension": lambda x, w: matmul_reduce_scatter(
            torch.stack([x, torch.sin(x)]), w, scatter_dim=1
        ),
    }
    for name, layer in layers.items():
        random = torch.Generator().manual_seed(rank)
        compiled_layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for rows in (2 * ranks, 3 * ranks, 5 * ranks):  # from the second on, sizes are symbolic
            x, w = torch.randn(rows, 4, generator=random), torch.randn(4, 5, generator=random)
            results = []
            for function in (layer, compiled_layer):
                x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
                y = function(x, w)
                y.square().sum().backward()
                results.append((y.detach(), x.grad, w.grad))
            for eager, compiled in zip(*results, strict=True):
                close(compiled, eager.double(), torch.float32, f"{name} compiled")


def main():
    ranks, folder, timeout_s, *checks = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), *sys.argv[4:]

    def rank_main(rank, ranks):
        for name in checks:
            globals()[f"check_{name}"](rank, ranks)

    sys.exit(1 if run_ranks(ranks, folder, timeout_s, rank_main) else 0)


if __name__ == "__main__":
    main()
