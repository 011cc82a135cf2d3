"""DDP and FSDP2 models in states that forbid a change, and models that the program changes meanwhile."""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from weft.errors import UnavailableError  # noqa: E402
from weft.policy import Policy  # noqa: E402
from weft.tuning.live import fsdp_communicator  # noqa: E402
from weft.tuning.live.ddp import Buckets  # noqa: E402
from weft.tuning.live.frameworks import Frameworks  # noqa: E402
from weft.tuning.live.fsdp import Sharding  # noqa: E402

WIDTH = 16


used_groups = []
"""Were a reducer the last owner of a group, its destructor would wait for gloo's thread while it holds the GIL, and the
thread may need the GIL to end."""


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    used_groups.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


def net():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def loss_of(model):
    return model(torch.ones(2, WIDTH)).sum()


@pytest.fixture
def replica():
    model = DistributedDataParallel(net())
    buckets = Buckets([model])
    buckets.watch()
    loss_of(model).backward()
    buckets.prepare(0.001, None)
    yield model, buckets
    buckets.use(None, None)
    buckets.release()


def test_a_reducer_whose_backward_pass_is_to_come_is_not_exchanged(replica):
    model, buckets = replica
    loss, before = loss_of(model), model.reducer
    with pytest.raises(UnavailableError, match="its backward pass has not started"):
        buckets.use(0.001, None)
    assert model.reducer is before
    loss.backward()
    buckets.use(0.001, None)
    assert model.reducer is not before


def test_parameters_that_ddp_does_not_reduce_are_not_reduced_by_another_reducer():
    """DDP never reduces the gradients of parameters that the program unfreezes later."""
    model = DistributedDataParallel(net().requires_grad_(False).append(nn.Linear(WIDTH, WIDTH)))
    buckets = Buckets([model])
    buckets.watch()
    loss_of(model).backward()
    model.module[3].requires_grad_(True)
    with pytest.raises(UnavailableError, match="its parameters have changed"):
        buckets.prepare(0.001, None)
    buckets.release()


def test_larger_buckets_are_offered_to_a_program_that_reduces_every_parameter_by_itself():
    model = DistributedDataParallel(net(), bucket_cap_mb=0)
    assert Buckets([model]).choices(4) == [{"bucket_mb": 1.0}]


def test_a_reducer_is_not_exchanged_while_the_program_holds_views_of_its_buckets():
    """A program may look gradients up once: DDP keeps them at the same place."""
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    buckets = Buckets([model])
    buckets.watch()
    loss_of(model).backward()
    held = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(UnavailableError, match="holds gradients"):
        buckets.prepare(0.001, None)
    held.clear()
    buckets.prepare(0.001, None)
    buckets.use(0.001, None)
    buckets.use(None, None)
    buckets.release()


def test_a_reducer_is_not_exchanged_in_the_middle_of_a_backward_pass(replica):
    model, buckets = replica
    found = []

    def exchange(_):
        with pytest.raises(UnavailableError, match="a backward pass is running") as raised:
            buckets.use(0.001, None)
        found.append(raised)

    hook = next(model.parameters()).register_post_accumulate_grad_hook(exchange)
    loss_of(model).backward()
    hook.remove()
    assert found


def test_forward_passes_are_watched_for_as_long_as_buckets_can_be_changed(replica):
    _, buckets = replica
    buckets.use(0.001, None)
    buckets.release()
    assert DistributedDataParallel._post_forward.__module__.startswith("weft")
    buckets.use(None, None)
    buckets.release()
    assert DistributedDataParallel._post_forward.__module__.startswith("torch")
    with pytest.raises(UnavailableError, match="not been observed yet"):
        buckets.prepare(0.001, None)


@pytest.fixture
def shards():
    model = net()
    for part in model:
        fully_shard(part)
    fully_shard(model)
    loss_of(model).backward()
    sharding = Sharding([model, *model])
    sharding.watch_order()
    loss_of(model).backward()
    sharding.order_seen()
    yield model, sharding
    sharding.use(Policy())
    sharding.release()


@pytest.mark.parametrize("policy", [Policy(), Policy(forward_prefetch=2)])
def test_what_the_program_sets_later_holds_after_an_undo(shards, policy):
    model, sharding = shards
    sharding.use(policy)
    loss_of(model).backward()
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[1].set_reshard_after_forward(False)
    listed = model[0]._get_fsdp_state()._states_to_forward_prefetch
    sharding.use(Policy(forward_prefetch=1))
    loss_of(model).backward()
    sharding.use(Policy())
    assert model[0]._get_fsdp_state()._states_to_forward_prefetch is listed
    meshes = [part._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info for part in model]
    assert [mesh is None for mesh in meshes] == [False, True, False, False]


@pytest.mark.parametrize("kept", [True, False])
def test_resharding_that_the_program_asks_for_itself_holds_after_an_undo(shards, kept):
    """A policy has the same effect meanwhile, so that the group's settings do not show it."""
    model, sharding = shards
    setter = type(model).set_reshard_after_forward
    model.set_reshard_after_forward(kept)
    sharding.use(Policy(reshard_after_forward=not kept))
    loss_of(model).backward()
    model.set_reshard_after_forward(not kept)
    loss_of(model).backward()
    sharding.use(Policy())
    meshes = [part._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info for part in model]
    assert [mesh is not None for mesh in meshes] == 4 * [not kept]
    assert type(model).set_reshard_after_forward is setter


def test_the_pass_after_an_undo_computes_with_the_parameters_of_its_own_step(shards):
    """A program may call its model once more, for a log, before the optimizer's step that ends with the undo."""
    model, sharding = shards
    model.set_reshard_after_forward(True)
    of_the_optimizer = list(model[3].parameters())
    sharding.use(Policy(reshard_after_forward=False))
    assert loss_of(model).item() != 0
    with torch.no_grad():
        for parameter in of_the_optimizer:
            parameter.zero_()
    sharding.use(Policy())
    assert loss_of(model).item() == 0


class Calling(nn.Module):
    """Calls another model in the middle of its own forward pass."""

    def __init__(self, other):
        super().__init__()
        self.first, self.second, self.other = net(), net(), [other]
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            x = x + self.other[0](x)
        return self.second(x) * self.scale


@pytest.mark.parametrize("policy", [Policy(forward_prefetch=1), Policy(reshard_after_forward=False)])
def test_a_model_that_another_one_calls_leaves_its_parameters_in_place(policy):
    called = fully_shard(net())
    model = Calling(called)
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model, reshard_after_forward=True)
    expected = loss_of(model)
    expected.backward()
    sharding = Sharding([called, model, model.first, model.second])
    sharding.watch_order()
    loss_of(model).backward()
    sharding.order_seen()
    sharding.use(policy)
    loss = loss_of(model)
    loss.backward()
    assert loss.item() == expected.item()
    sharding.use(Policy())
    sharding.release()


def test_where_one_of_two_models_cannot_be_changed_neither_is(replica, shards):
    """A policy for both raises before anything is changed, whichever of them is not ready."""
    model, buckets = replica
    sharded, sharding = shards
    frameworks = Frameworks()
    frameworks._buckets, frameworks._sharding = buckets, sharding
    listed = [part._get_fsdp_state()._states_to_forward_prefetch for part in sharded]
    loss, reducer = loss_of(model), model.reducer
    both = Policy(bucket_mb=0.001, forward_prefetch=2)
    with pytest.raises(UnavailableError, match="its backward pass has not started"):
        frameworks.apply(both)
    assert [part._get_fsdp_state()._states_to_forward_prefetch for part in sharded] == listed
    loss.backward()
    with pytest.raises(UnavailableError, match="reduce-scatter was not prepared"):
        frameworks.apply(dataclasses.replace(both, reduce_scatter_group=True))
    assert model.reducer is reducer
    frameworks.apply(both)
    assert model.reducer is not reducer
    assert [part._get_fsdp_state()._states_to_forward_prefetch for part in sharded] != listed


def test_models_that_cannot_be_examined_leave_the_others_their_levers(replica, shards, monkeypatch):
    """The process group of a model that nobody uses any more may be gone."""

    def gone(*_: object) -> None:
        raise KeyError("group")

    frameworks = Frameworks()
    frameworks._buckets, frameworks._sharding = replica[1], shards[1]
    monkeypatch.setattr(replica[1], "choices", lambda most: [{"bucket_mb": 5.0}])
    assert {"buckets", "resharding"} <= set(frameworks.choices())
    monkeypatch.setattr(shards[1], "choices", gone)
    assert frameworks.choices() == {"buckets": [{"bucket_mb": 5.0}]}


def test_a_communicator_never_has_the_name_of_another_one(shards):
    _, sharding = shards
    c10d = dist.distributed_c10d
    names = [c10d._hash_ranks_to_str([0])]
    for _ in range(2):
        sharding.prepare(Policy(reduce_scatter_group=True))
        (made,) = sharding._communicators.values()
        names.append(c10d._world.pg_names[made])
        sharding.release()
    assert len(set(names)) == 3
    assert c10d._process_group_name.__module__ == c10d.__name__


def test_ranks_that_are_in_different_numbers_of_groups_name_a_communicator_alike(monkeypatch):
    """Modules may be sharded over different ranks: on some ranks a communicator is the first, on others not."""
    c10d = dist.distributed_c10d

    def names(*of_ranks):
        monkeypatch.setattr(fsdp_communicator, "_named", Counter())  # as in another process
        with fsdp_communicator.name_of_our_own():
            return {ranks: c10d._process_group_name(list(ranks), True) for ranks in of_ranks}

    on_first = names((0, 1), (0, 2))
    another = dist.new_group([0])
    with fsdp_communicator.name_of_our_own(), ThreadPoolExecutor(1) as other_thread:
        of_program = other_thread.submit(c10d._process_group_name, [0], True).result()
    assert of_program == c10d._process_group_name([0], True)
    on_third = names((0, 2), (2, 3))
    dist.destroy_process_group(another)
    assert on_first[0, 2] == on_third[0, 2]
    assert len({*on_first.values(), *on_third.values()}) == 3
