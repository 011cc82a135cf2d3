"""Opening a window for copy engines: it succeeds on all ranks or on none, and none waits for a rank that failed."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from weft.comm import symmetric  # noqa: E402
from weft.errors import UnavailableError  # noqa: E402
from weft.shim import communicators, nccl_binding  # noqa: E402
from weft.tuning.live import copy_engines  # noqa: E402

RANKS = 2
STEPS = ("options", "group", "communicators", "allocate", "register", "counters", "gather")
me = threading.local()


class Rig:
    """Two threads as ranks. Agreements wait for both, for each group separately; `failing` fails on rank 1."""

    def __init__(self, failing: str) -> None:
        self.failing, self.left = failing, [0] * RANKS
        self.barriers = {name: threading.Barrier(RANKS, timeout=30) for name in ("own", "zero", "gather")}
        self.problems = dict.fromkeys(self.barriers, "")

    def step(self, name: str) -> None:
        if name == self.failing and me.rank == 1:
            raise OSError(f"no {name} here")

    def agree(self, problem: str, group: str, device: object) -> None:
        if problem:  # not a read and a write by both ranks: one would undo the other's
            self.problems[group] = problem
        self.barriers[group].wait()
        failed = bool(self.problems[group])
        self.barriers[group].wait()  # until both have read it
        if failed:
            raise UnavailableError(problem or "another rank")

    def options(self) -> str:
        self.step("options")
        return "options"

    def group(self, ranks: list[int], options: str, **_: object) -> str:
        self.step("group")
        self.left[me.rank] += 1
        me.made = True
        return "zero"

    def destroy(self, group: str) -> None:
        self.left[me.rank] -= 1

    def seen(self) -> list[SimpleNamespace]:
        if getattr(me, "made", False):
            self.step("communicators")
        return [SimpleNamespace(key="1f")] if getattr(me, "made", False) else []

    def kernels(self) -> int:
        self.step("counters")
        return 0

    def gather(self, whole: torch.Tensor, mine: torch.Tensor, group: str) -> None:
        self.barriers["gather"].wait()
        self.step("gather")
        whole.copy_(torch.tensor([1, 2], dtype=torch.uint8).repeat_interleave(mine.numel()))


def arena_of(rig: Rig) -> type:
    class Arena:
        def __init__(self, key: int, size: int) -> None:
            rig.step("allocate")
            rig.left[me.rank] += 1
            self.bytes = torch.zeros(size, dtype=torch.uint8)

        def register(self) -> None:
            rig.step("register")

        def close(self) -> None:
            rig.left[me.rank] -= 1

    return Arena


@pytest.mark.parametrize("failing", ["", *STEPS])
def test_a_window_opens_on_all_ranks_or_on_none(monkeypatch, failing):
    rig = Rig(failing)
    monkeypatch.setattr(copy_engines, "_agree", rig.agree)
    monkeypatch.setattr(copy_engines, "comm_kernels", rig.kernels)
    monkeypatch.setattr(symmetric, "zero_cta_options", rig.options)
    monkeypatch.setattr(symmetric, "zero_cta_group", rig.group)
    monkeypatch.setattr(communicators, "communicators", rig.seen)
    monkeypatch.setattr(nccl_binding, "NcclArena", arena_of(rig))
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: memory.bytes)
    # It changes torch for a moment, for all threads.
    monkeypatch.setattr(copy_engines, "name_of_our_own", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(dist, "destroy_process_group", rig.destroy)
    monkeypatch.setattr(dist, "get_rank", lambda group: me.rank)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "all_gather_into_tensor", rig.gather)
    group = SimpleNamespace(mesh_info=SimpleNamespace(shard_process_group="own"), device=torch.device("cpu"))
    outcomes: list[object] = [None] * RANKS

    def rank(number: int) -> None:
        me.rank = number
        try:
            outcomes[number] = copy_engines.open_window(group, (0, 1), 4096)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failing:
        assert [type(outcome) for outcome in outcomes] == [UnavailableError] * RANKS
        assert rig.left == [0] * RANKS
    else:
        assert [type(outcome) for outcome in outcomes] == [copy_engines.Window] * RANKS
        assert rig.left == [2] * RANKS
