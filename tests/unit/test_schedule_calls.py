"""The operations in one process: a group of one, refused calls, and the choice of a schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from weft.errors import UsageError  # noqa: E402
from weft.ops import all_gather_matmul, all_to_all_matmul, choose, matmul_reduce_scatter, promise  # noqa: E402
from weft.ops.call import Call, out_rows  # noqa: E402
from weft.ops.choose import Choice, workload  # noqa: E402
from weft.ops.operands import Operands  # noqa: E402
from weft.ops.program import Program  # noqa: E402
from weft.ops.schedule import OPERATIONS, Problem, build  # noqa: E402
from weft.ops.teams import DisagreementError, compare_facts, team_of  # noqa: E402
from weft.policy import SCHEDULES, Policy  # noqa: E402

FUNCTIONS = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "all_to_all_matmul": all_to_all_matmul,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", [None, *SCHEDULES])
def test_on_one_rank_it_is_a_matmul(operation, name):
    x, w = torch.randn(3, 5, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    y = FUNCTIONS[operation](x, w, schedule=name)
    want = x.detach() @ w.detach()
    assert torch.allclose(y, want, atol=1e-5)
    y.sum().backward()
    assert torch.allclose(x.grad, torch.ones(3, 5, 6) @ w.detach().t(), atol=1e-5)
    assert torch.allclose(w.grad, x.detach().reshape(-1, 4).t() @ torch.ones(15, 6), atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((torch.ones(2, 3), torch.ones(4, 5)), {}, "A has 3 columns and B has 4 rows"),
        ((torch.ones(3), torch.ones(3, 5)), {}, "needs at least 2"),
        ((torch.ones(2, 3), torch.ones(3)), {}, "B has 1; A needs at least 2, B exactly 2"),
        ((torch.ones(2, 3), torch.ones(3, 5).half()), {}, "A is float32 on cpu and B is float16 on cpu"),
        ((torch.ones(2, 3).int(), torch.ones(3, 5).int()), {}, "int32 is not supported; use bfloat16"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"schedule": "fast"}, "schedule 'fast' is not known"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"engine": "tpu"}, "engine 'tpu' is not known"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"pieces": 0}, "pieces 0 is not valid"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"rows": [1, 1]}, "2 counts were given for 1 ranks"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"rows": [3]}, "rows says 3 for rank 0, whose A has 2"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"out": torch.ones(5, 2)}, r"must be contiguous, \(2, 5\)"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"out": torch.ones(2, 5).half()}, "out is float16"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"group": 1}, "must be a torch process group, .*, not int"),
        ((torch.ones(2, 3), torch.ones(3, 5)), {"group": "tp"}, "no process group has the name 'tp'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arguments, options, says):
    with pytest.raises(UsageError, match=says) as error:
        all_gather_matmul(*arguments, **options)
    assert "\n" not in str(error.value)


def test_out_has_no_gradient():
    with pytest.raises(UsageError, match="out= has no gradient"):
        all_gather_matmul(torch.ones(2, 3, requires_grad=True), torch.ones(3, 4), out=torch.ones(2, 4))


def test_splits_come_in_pairs():
    with pytest.raises(UsageError, match="both input_splits and output_splits"):
        all_to_all_matmul(torch.ones(2, 3), torch.ones(3, 4), input_splits=[2])


def test_the_call_goes_before_the_policy():
    x, w = torch.ones(2, 3), torch.ones(3, 4)
    all_gather_matmul(x, w, schedule="shard", policy=Policy(schedule="serial", engine="dma"))
    prepared = list(team_of(None).prepared.values())[-1]
    assert (prepared.call.schedule, prepared.call.engine) == ("shard", "dma")


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (Policy(), (None, None)),
        (Policy(priority="high"), (None, None)),
        (Policy(schedule="shard"), ("shard", "sm")),
        (Policy(engine="dma"), (None, "dma")),
    ],
)
def test_a_policy_that_says_nothing_of_schedules_changes_nothing(policy, asked):
    all_gather_matmul(torch.ones(2, 7), torch.ones(7, 4), policy=policy)
    call = list(team_of(None).prepared.values())[-1].call
    assert (call.schedule, call.engine) == asked


class Shape:
    """Stands in for a tensor on a GPU."""

    dtype = torch.bfloat16
    device = torch.device("cuda", 0)


class Ranks:
    size, rank, group = 8, 0, None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_a_gpu_the_sizes_decide(operation, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "none.sqlite"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    tiny = Problem(m=8, n=8, k=8, ranks=8)
    found = choose.choose(Call(operation), tiny, Shape, Ranks)
    assert found.schedule == "serial"
    large = Problem(m=131072, n=16384, k=8192, ranks=8)
    assert choose.choose(Call(operation), large, Shape, Ranks).schedule in SCHEDULES
    only = choose.choose(Call(operation, engine="sm"), large, Shape, Ranks)
    assert only.engine == "sm"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Something else")
    with pytest.warns(RuntimeWarning, match="picked as for an h100"):
        choose.choose(Call(operation), large, Shape, Ranks)
    choose._SAID.clear()


def test_a_stored_verdict_goes_before_the_pick(monkeypatch, tmp_path):
    from weft.tuning.store import Store, here

    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    problem = Problem(m=64, n=8, k=8, ranks=8)
    name = workload("all_gather_matmul", problem, torch.bfloat16, None)
    Store().put(here(name), Policy(schedule="uniform-fused-2d", engine="dma"), {"pieces": 4})
    found = choose.choose(Call("all_gather_matmul"), problem, Shape, Ranks)
    assert found == Choice("uniform-fused-2d", "dma", 4)
    assert (
        choose.choose(Call("all_gather_matmul", schedule="shard"), problem, Shape, Ranks).schedule == "shard"
    )


def test_the_shape_of_a_result_is_known_beforehand():
    assert out_rows(Call("all_gather_matmul", None), (3, 2, 5), 0, 4) == 12
    assert out_rows(Call("all_gather_matmul", (6, 2)), (3, 2, 5), 0, 2) == 4
    assert out_rows(Call("matmul_reduce_scatter", None), (7, 5), 0, 2) == 4
    assert out_rows(Call("matmul_reduce_scatter", (2, 5)), (7, 5), 1, 2) == 5
    assert out_rows(Call("all_to_all_matmul", None), (7, 5), 1, 2) == 6


def test_ranks_are_compared_by_what_they_say():
    same = {"operation": "all_gather_matmul", "columns of A": 4}
    compare_facts([same, None, {**same}])
    with pytest.raises(DisagreementError, match="rank 0 has 4, rank 2 has 5"):
        compare_facts([same, None, {**same, "columns of A": 5}])
    with pytest.raises(DisagreementError, match="rank 1 cannot continue: no GPU"):
        compare_facts([same, {"operation": "all_gather_matmul", "problem": "no GPU"}])
    with pytest.raises(DisagreementError, match="rank 0 sends 3 rows to rank 1, which expects 2"):
        compare_facts(
            [
                {"operation": "all_to_all_matmul", "own sent": [1, 3], "own received": [1, 1]},
                {"operation": "all_to_all_matmul", "own sent": [1, 1], "own received": [2, 1]},
            ]
        )


def test_views_of_a_call_take_few_calls(monkeypatch):
    """57 matmuls, one strided view of out for all but the local one: that keeps a call cheap."""
    schedule = build("all_gather_matmul", "hetero-unfused-1d", Problem(m=512, n=4, k=4, ranks=8), 0)
    program = Program(
        schedule, Operands.of(Call("all_gather_matmul"), (torch.ones(64, 4),), (torch.ones(4, 4),), ())
    )
    for step in schedule.matmuls:
        program.compute(step)
    program.finish()
    calls = []
    whole = torch.as_strided
    monkeypatch.setattr(torch, "as_strided", lambda *given: calls.append(given) or whole(*given))
    program.bind((torch.ones(64, 4), torch.ones(4, 4), torch.ones(512, 4)))
    assert len(calls) <= 5


@pytest.mark.parametrize(
    ("schedule", "device", "engine"),
    [("shard", "cuda", "dma"), ("serial", "cuda", "sm"), ("shard", "cpu", "sm")],
)
def test_the_engine_of_a_schedule_asked_for_does_not_follow_from_sizes(schedule, device, engine):
    """Ranks may have different sizes, and must use one engine."""
    from types import SimpleNamespace

    from weft.ops.call import Call
    from weft.ops.choose import choose
    from weft.ops.schedule import Problem

    x = SimpleNamespace(device=SimpleNamespace(type=device), dtype="torch.bfloat16")
    for n in (1, 30000):
        found = choose(
            Call("all_gather_matmul", schedule=schedule),
            Problem(m=8192, n=n, k=4096, ranks=8),
            x,
            SimpleNamespace(group=None),
        )
        assert found == (schedule, engine, None)


def test_prepared_calls_go_when_many_came_after_them_but_not_those_that_a_graph_replays():
    import gc
    import weakref
    from types import SimpleNamespace

    from weft.ops.teams import KEPT, Team, TeamAgreement

    class Prepared:
        agreement = TeamAgreement([], "a kind")

    team = Team(SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    team._agreements["a kind"] = Prepared.agreement
    replayed, eager = Prepared(), Prepared()
    team.keep("replayed", replayed)
    team.hold(replayed)
    team.hold(replayed)
    team.keep("eager", eager)
    alive = weakref.ref(replayed), weakref.ref(eager)
    for number in range(KEPT):
        team.keep(number, Prepared())
        team.used(number, Prepared)
    team.drop(lambda prepared: True)
    del replayed, eager
    gc.collect()
    assert alive[0]() is not None
    assert alive[1]() is None
    assert len(team._captured) == 1


def test_batch_first_several_weights_bias_and_the_gathered_input():
    x, ws = torch.randn(2, 5, 4), [torch.randn(4, n) for n in (6, 3)]
    bias = [torch.randn(6), None]
    a, (first, second) = all_gather_matmul(x, ws, gather_dim=1, return_A=True, bias=bias)
    assert torch.equal(a, x)
    torch.testing.assert_close(first, x @ ws[0] + bias[0])
    torch.testing.assert_close(second, x @ ws[1])
    out = torch.empty(2, 5, 6)
    assert matmul_reduce_scatter(x, ws[0], scatter_dim=-2, out=out) is out
    torch.testing.assert_close(out, x @ ws[0])


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_fp8_is_what_scaled_mm_gives(operation, per_row):
    x, weight = (torch.randn(size, 32).to(torch.float8_e4m3fn) for size in (8, 16))
    a_scale, b_scale = (torch.rand(8, 1), torch.rand(1, 16)) if per_row else (torch.rand(()), torch.rand(()))
    want = torch._scaled_mm(x, weight.t(), a_scale, b_scale, out_dtype=torch.bfloat16)
    got = FUNCTIONS[operation](x, weight.t(), A_scale=a_scale, B_scale=b_scale)
    assert torch.equal(got, want)
    wide = FUNCTIONS[operation](x, weight.t(), A_scale=a_scale, B_scale=b_scale, out_dtype=torch.float32)
    assert wide.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give A_scale and a B_scale for each weight"),
        ({"A_scale": torch.ones(()), "B_scale": torch.ones(1, 16)}, "give one scale for each tensor, or all"),
        ({"A_scale": torch.ones(2), "B_scale": torch.ones(())}, r"A_scale is \(2,\); give one number"),
        ({"A_scale": torch.ones(()).half(), "B_scale": torch.ones(())}, "must be float32"),
        (
            {"A_scale": torch.ones(()), "B_scale": torch.ones(()), "schedule": "uniform-fused-2d"},
            "adds up over K, which fp8 cannot",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(given, says):
    x, weight = (torch.randn(size, 32).to(torch.float8_e4m3fn) for size in (8, 16))
    with pytest.raises(UsageError, match=says):
        all_gather_matmul(x, weight.t(), **given)
    with pytest.raises(UsageError, match="scales are for fp8"):
        all_gather_matmul(x.float(), weight.float().t(), A_scale=torch.ones(()), B_scale=torch.ones(()))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, w: all_gather_matmul(x, w, gather_dim=2), "gather_dim 2 is not valid"),
        (lambda x, w: matmul_reduce_scatter(x, w, scatter_dim=-1), "scatter_dim -1 is not valid"),
        (lambda x, w: matmul_reduce_scatter(x, [w, w]), "a reduce-scatter takes one"),
        (lambda x, w: all_gather_matmul(x, []), "B has no tensor"),
        (lambda x, w: all_gather_matmul(x, [w], bias=[w, w]), "bias has 2 tensors for 1 of B"),
        (lambda x, w: torch.vmap(lambda row: all_gather_matmul(row, w))(x), "torch.func transforms"),
        (lambda x, w: torch.func.grad(lambda a: all_gather_matmul(a, w).sum())(x), "torch.func transforms"),
    ],
)
def test_calls_that_cannot_be_are_refused_before_anything_is_sent(call, says, monkeypatch):
    monkeypatch.setattr("weft.ops.run.prepared_call", lambda *_: pytest.fail("it went on"))
    with pytest.raises(UsageError, match=says):
        call(torch.ones(2, 3, 4), torch.ones(4, 5))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_meta_and_fake_tensors_give_shapes_and_move_nothing(operation, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr("weft.ops.run.prepared_call", lambda *_: pytest.fail("it went on"))
    x, w = torch.empty(2, 3, 4, device="meta", requires_grad=True), torch.empty(4, 5, device="meta")
    y = FUNCTIONS[operation](x, w)
    assert y.device.type == "meta"
    assert y.shape == (2, 3, 5)
    y.sum().backward()
    assert x.grad.shape == x.shape
    with FakeTensorMode():
        assert FUNCTIONS[operation](torch.empty(2, 4), torch.empty(4, 5)).shape == (2, 5)


def test_a_transfer_that_is_too_short_to_hide_is_not_replaced(monkeypatch):
    monkeypatch.setattr(promise, "pick_arguments", lambda x: ("bf16", "h200"))
    monkeypatch.setenv("WEFT_OPS", "pick")
    gpu, cpu, double = (
        SimpleNamespace(device=SimpleNamespace(type=kind), dtype=dtype)
        for kind, dtype in (("cuda", torch.bfloat16), ("cpu", torch.bfloat16), ("cuda", torch.float64))
    )
    assert promise.may_gain("all_gather_matmul", 16384, 8192, 8, gpu)
    assert not promise.may_gain("all_gather_matmul", 16384, 8192, 8, double)  # no operation takes it
    assert not promise.may_gain("all_gather_matmul", 64, 64, 8, gpu)
    assert not promise.may_gain("all_gather_matmul", 16384, 8192, 1, gpu)
    assert not promise.may_gain("matmul_reduce_scatter", 16384, 8192, 8, cpu)
    monkeypatch.delenv("WEFT_OPS")
    assert not promise.may_gain("all_gather_matmul", 16384, 8192, 8, gpu)
    monkeypatch.setenv("WEFT_OPS", "all")
    assert promise.may_gain("matmul_reduce_scatter", 16384, 8192, 8, cpu)
