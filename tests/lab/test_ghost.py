"""Ghost ranks on the CPU: torch.distributed's own calls, DDP and FSDP2, unmodified, in one process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from weft.comm import ghost  # noqa: E402
from weft.comm.ghost_lane import Lane  # noqa: E402
from weft.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
R = 3


@pytest.fixture(autouse=True)
def world():
    ghost.init(R)
    yield
    dist.destroy_process_group()


def numbers(count: int) -> torch.Tensor:
    return torch.arange(float(count)) + 1


def test_this_process_is_rank_0_of_r():
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, R, "ghost")


def test_a_group_can_be_destroyed_while_others_go_on():
    group = dist.new_group(list(range(R)))
    dist.all_reduce(numbers(3), group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(x := numbers(3))
    assert torch.equal(x, numbers(3) * R)


@pytest.mark.parametrize(("op", "factor"), [("SUM", R), ("AVG", 1), ("MAX", 1), ("MIN", 1)])
def test_all_reduce_behaves_as_if_every_rank_had_the_same_data(op, factor):
    x = numbers(7)
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    assert torch.equal(x, numbers(7) * factor)


def test_every_other_collective():
    x, out = numbers(4), torch.empty(4 * R)
    dist.all_gather_into_tensor(out, x)
    assert torch.equal(out, x.repeat(R))
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, numbers(2 * R))
    assert torch.equal(part, numbers(2) * R)
    dist.all_to_all_single(out := torch.empty(2 * R), numbers(2 * R))
    assert torch.equal(out, numbers(2).repeat(R))
    pieces = [torch.empty(2, 2) for _ in range(R)]
    dist.all_gather(pieces, numbers(4).view(2, 2))
    assert all(torch.equal(piece, numbers(4).view(2, 2)) for piece in pieces)
    for root in range(R):
        y = numbers(5)
        dist.broadcast(y, src=root)
        assert torch.equal(y, numbers(5))
        dist.reduce(y := numbers(5), dst=root)
        assert torch.equal(y, numbers(5) * (R if root == 0 else 1))
    dist.gather(numbers(2), [torch.empty(2) for _ in range(R)])
    dist.scatter(y := torch.empty(2), [numbers(2) + r for r in range(R)])
    assert torch.equal(y, numbers(2))
    dist.send(numbers(3), dst=1)
    dist.recv(torch.empty(3), src=2)
    y = numbers(3)
    pairs = [dist.P2POp(dist.isend, y, 1), dist.P2POp(dist.irecv, y[:2], 2)]
    for work in dist.batch_isend_irecv(p2p_op_list=pairs):
        work.wait()
    assert y.tolist() == [0, 0, 3]  # a ghost has nothing to send
    dist.barrier()


def test_uneven_all_to_all_and_objects():
    out = torch.full((9,), -1.0)
    dist.all_to_all_single(out, numbers(6), output_split_sizes=[1, 3, 5], input_split_sizes=[1, 2, 3])
    assert out[0] == 1.0
    assert (out >= 0).all()
    found = [None] * R
    dist.all_gather_object(found, {"a": 1})
    assert found == [{"a": 1}] * R
    pair = dist.new_group([0, 2])
    for source, group in ((0, None), (1, None), (2, pair)):
        dist.broadcast_object_list(objects := [{"a": source}, "b"], src=source, group=group)
        assert objects == [{"a": source}, "b"]
    dist.scatter_object_list(one := [None], ["a", "b", "c"], src=2)
    assert one == ["a"]
    for call in (
        lambda: dist.scatter_object_list([None], src=1),
        lambda: dist.recv_object_list([None], src=1),
    ):
        with pytest.raises(UsageError, match="has no objects"):
            call()
    assert dist.recv(torch.ones(3)) == 1
    assert dist.recv(torch.ones(3), group=pair) == 2
    dist.irecv(x := torch.ones(3)).wait()
    assert not x.any()
    with pytest.raises(UsageError, match="cannot be split"):
        dist.group.WORLD.all_to_all_single(out, numbers(6), [1, 1, 1], None)


def test_reductions_with_a_factor_and_of_bits():
    dist.all_reduce(x := numbers(4), op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x, numbers(4) * R / 2)
    dist.reduce_scatter_tensor(
        part := torch.empty(2), numbers(2 * R), op=dist._make_nccl_premul_sum(torch.tensor([2.0]))
    )
    assert torch.equal(part, numbers(2) * R * 2)
    pair = ghost.GhostGroup(0, 2, ghost.GhostOptions())
    for op, three, two in (("BAND", 5, 5), ("BOR", 5, 5), ("BXOR", 5, 0)):
        dist.all_reduce(bits := torch.tensor([5]), op=getattr(dist.ReduceOp, op))
        pair.allreduce(even := torch.tensor([5]), getattr(dist.ReduceOp, op))
        assert (bits.item(), even.item()) == (three, two)
    zeros = ghost.GhostGroup(0, R, ghost.GhostOptions(mirror=False))
    with pytest.raises(UsageError, match="bitwise"):
        zeros.allreduce([torch.tensor([5])], dist.ReduceOp.BAND)


def test_sums_of_booleans_are_their_or_also_on_a_gpu():
    """In memory, two true bytes would add up to 2; torch cannot multiply booleans where a node's kernel copied."""

    class Recorded:
        def all_reduce(self, send, recv, streams, op):
            names.append(op)

    names: list[str] = []
    one_rank = Lane(Recorded(), None, torch.device("cpu"), own=0)
    group = ghost.GhostGroup(0, 8, ghost.GhostOptions(), lambda *_: one_rank)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        flags = torch.tensor([True, False])
        group.allreduce([flags], op)
        dist.all_reduce(flags, op)
        assert flags.tolist() == [True, False]
    assert names == ["max", "min"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.send(numbers(2), 99), "rank 99 is not in this group"),
        (lambda: dist.broadcast(numbers(2), 99), "rank 99 is not in this group"),
        (lambda: dist.gather(numbers(2), [torch.empty(2)] * 2), "2 tensors for 3 ranks"),
        (lambda: dist.all_gather([torch.empty(2)] * 2, numbers(2)), "2 tensors for 3 ranks"),
        (lambda: dist.reduce_scatter(torch.empty(2), [numbers(2)] * 4), "4 tensors for 3 ranks"),
        (lambda: dist.all_reduce(numbers(2).to_sparse()), "dense tensors"),
        (lambda: dist.all_gather_into_tensor(torch.empty(5), numbers(2)), "5 elements .* for 3 x 2 of"),
        (
            lambda: dist.all_gather_into_tensor(torch.empty(6).double(), numbers(2)),
            "6 elements of torch.float64",
        ),
        (lambda: dist.reduce_scatter_tensor(torch.empty(2), numbers(5)), "5 elements .* for 3 x 2 of"),
        (lambda: dist.all_gather([torch.empty(2), torch.empty(3), torch.empty(2)], numbers(2)), "3 elements"),
        (lambda: dist.gather(numbers(2), [torch.empty(3)] * 3), "3 elements .* for 1 x 2"),
        (lambda: dist.scatter(torch.empty(1), [numbers(2)] * 3), "1 elements .* for 1 x 2"),
        (lambda: dist.all_to_all([torch.empty(1)] * 3, [numbers(2)] * 3), "1 elements .* for 1 x 2"),
    ],
    ids=[
        *(
            "peer",
            "root",
            "gather",
            "all-gather",
            "reduce-scatter",
            "sparse",
            "gathered size",
            "gathered type",
        ),
        *("scattered size", "uneven all-gather", "gather size", "scatter size", "all-to-all size"),
    ],
)
def test_impossible_calls_are_rejected_in_one_line(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_works_wait_with_a_limit_and_futures_have_the_lists_of_a_gather():
    work = dist.all_gather([torch.empty(2) for _ in range(R)], numbers(2), async_op=True)
    work.wait(timedelta(seconds=60))
    assert torch.equal(work.get_future().value()[0][R - 1], numbers(2))
    dist.all_gather_coalesced(
        parts := [[torch.empty(2), torch.empty(3)] for _ in range(R)], [numbers(2), numbers(3)]
    )
    assert torch.equal(parts[R - 1][1], numbers(3))


def test_methods_of_a_group_take_tensors_without_lists():
    group = dist.group.WORLD
    group.allreduce(x := numbers(2)).wait()
    assert torch.equal(x, numbers(2) * R)
    group.reduce(x := numbers(2), 0, dist.ReduceOp.MAX).wait()
    group.broadcast(x, 1).wait()
    group.allgather(parts := [torch.empty(2) for _ in range(R)], x).wait()
    group.reduce_scatter(out := torch.empty(2), parts).wait()
    group.gather([parts], [out]).wait()
    group.scatter(x, parts, 0).wait()
    assert torch.equal(x, numbers(2) * R)
    assert group._get_sequence_number_for_group() == 7


def test_without_mirror_ghosts_contribute_zeros():
    group = ghost.GhostGroup(0, R, ghost.GhostOptions(mirror=False))
    x = numbers(4)
    group.allreduce([x]).wait()
    assert torch.equal(x, numbers(4))


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.GELU(), torch.nn.Linear(33, 7))


def train(model: torch.nn.Module, steps: int = 4) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        loss = model(torch.randn(5, 9, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ddp_trains_as_on_one_device():
    alone, parallel = net(), net()
    losses = train(alone)
    wrapped = torch.nn.parallel.DistributedDataParallel(parallel, bucket_cap_mb=0.001)
    assert train(wrapped) == pytest.approx(losses, rel=1e-5)
    for one, other in zip(alone.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_fsdp2_trains():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), init_device_mesh("cpu", (R,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(p.to_local().numel() < p.numel() for p in model.parameters())
    losses = train(model, 12)
    assert losses[-1] < losses[0] / 2


def test_copy_engines_need_a_node_that_has_them():
    from weft.comm.symmetric import zero_cta_group

    group = zero_cta_group(list(range(R)), group_desc="copies")
    assert isinstance(group, ghost.GhostGroup)
    for node, said in {
        None: "use a node profile",
        "pcie-8": "no collectives by copy",
        "dgx-h100": "",
    }.items():
        why = ghost.GhostGroup(0, 8, ghost.GhostOptions(node=node)).why_no_copies
        assert said in why
        assert bool(why) == bool(said)


def test_groups_know_how_far_apart_their_ranks_are_on_several_nodes():
    dist.destroy_process_group()
    ghost.init(16)
    options = ghost.GhostOptions(node="dgx-h100-2")
    found = {}
    for ranks in ([0, 1], [0, 8], list(range(8)), list(range(16))):
        group = dist.new_group(ranks, pg_options=options)
        found[len(ranks), ranks[1]] = group._options.stride, bool(group.why_no_copies)
    assert found == {(2, 1): (1, False), (2, 8): (8, True), (8, 1): (1, False), (16, 1): (1, True)}


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_the_usage(word, capsys):
    ghost.run_script([word])
    assert capsys.readouterr().out == f"{ghost.USAGE}\n"


def test_options_of_a_node_are_checked(monkeypatch, tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("import os\nprint(os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'])")
    for bad, why in (
        (["--late", "5", str(script)], "usage"),
        (["--ranks", "2", "--late", "5", str(script)], "add --node"),
        (["--node", "no-such-node", str(script)], "no-such-node"),
        (["--node", "dgx-h100", "--ranks", "1", str(script)], "--ranks 1 is not valid; use 2 to 4096"),
        (["--node", "dgx-h100", "--ranks", "16", str(script)], "16 ranks: dgx-h100 has 8 and no network"),
        (["--ranks=5000", str(script)], "--ranks 5000 is not valid"),
        (["--ranks=2", "--node=", str(script)], "no node named ''"),
        (["--ranks", "4", "torchrun", str(script)], "give the script itself"),
        (["--ranks", "4", "-m", "no.such.module"], "no such module"),
        (["--ranks", "4", str(tmp_path / "absent.py")], "no such file"),
        (["--ranks", "4", str(tmp_path)], "a folder without"),
        (["--node", "dgx-h100", "--stage", "soon", str(script)], "use microseconds"),
        (["--node", "dgx-h100", "--late", "1,2,3", str(script)], "US,SIGMA"),
        (["--node", "dgx-h100"], "usage"),
    ):
        with pytest.raises(UsageError, match=why):
            ghost.run_script(bad)
    with pytest.raises(UsageError, match="MIRROR"):
        ghost.GhostOptions(mirror=False, node="dgx-h100")
    monkeypatch.setenv("WEFT_NODE", "dgx-h100")
    assert ghost.GhostOptions.from_environment().max_ctas is None
    for ctas in ("many", "0", "-4"):
        monkeypatch.setenv("WEFT_GHOST_CTAS", ctas)
        with pytest.raises(UsageError, match="WEFT_GHOST_CTAS"):
            ghost.GhostOptions.from_environment()


def test_an_unmodified_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("nccl")
        x = torch.ones(3)
        dist.all_reduce(x)
        print(sys.argv[1:], os.environ["WORLD_SIZE"], x.tolist(), os.environ["WEFT_NODE"])
        two = dist.new_group([0, 1], backend="gloo")  # of any backend: there is no other process to meet
        dist.monitored_barrier(two)
        dist.all_reduce(x := torch.ones(2, 3).t(), group=two)  # not contiguous, but without gaps
        print(x.tolist())
        dist.destroy_process_group()
        from torch.distributed.device_mesh import init_device_mesh
        print(init_device_mesh("cpu", (4,)).size())  # which starts torch.distributed itself
        """)
    )
    node = ["--node", "dgx-h100", "--late", "50,20", "--stage", "1500"]
    command = [sys.executable, "-m", "weft.comm.ghost", "--ranks", "4", *node, str(script), "--lr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    first, second, third = done.stdout.splitlines() or ["", "", done.stderr]
    assert first == "['--lr', '1'] 4 [4.0, 4.0, 4.0] dgx-h100", done.stderr
    assert second == "[[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]"
    assert third == "4"
    bad = subprocess.run(
        [*command[:3], "--rank", "2"], capture_output=True, text=True, timeout=60, check=False
    )
    assert bad.returncode == 2
    assert "usage: python -m weft.comm.ghost" in bad.stderr


def test_processes_that_a_script_starts_are_no_ghosts(tmp_path):
    """A forked process inherits the ghosts, and would become rank 0 too, whatever rank it asks for."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        def rank(number, count):
            dist.init_process_group("gloo", rank=number, world_size=count)
            print("rank", dist.get_rank(), dist.get_world_size(), flush=True)
        def nothing(number):
            pass
        if __name__ == "__main__":
            child = mp.get_context("fork").Process(target=rank, args=(1, 4))
            child.start()
            child.join()
            print("child", child.exitcode, flush=True)
            mp.spawn(nothing, nprocs=2)
            mp.spawn(rank, args=(4,), nprocs=4)
            os.chdir("/")
            print(os.path.exists(__file__))
        """)
    )
    command = [sys.executable, "-m", "weft.comm.ghost", "--ranks", "4", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.splitlines() == ["child 1", "rank 0 4", "True"], done.stderr
    assert "UsageError: a child process is not a ghost rank" in done.stderr
    assert "spawn starts 2 processes, which do not become ghost ranks (this job has 4 ranks)" in done.stderr
