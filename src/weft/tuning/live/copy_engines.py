"""Runs FSDP2's all-gathers on copy engines: NCCL copies buffers in a symmetric window without using SMs.

The buffers are in one window of a separate communicator that asks for zero CTAs; a fixed number of them is
used in rotation. All ranks must use the same buffer in the same call; they do, because FSDP2 gathers in the
same order on all ranks. FSDP2's own `set_allocate_memory_from_process_group_for_comm` does not suffice: torch
registers that pool without a symmetric window. Neither does `set_symm_mem_for_comm`: it needs a group that
asked for zero CTAs when it was created, it cannot be undone, and its pool, when it grows, registers memory at
a time that the ranks have not agreed on (pytorch PR 192112). Here NCCL allocates and registers memory once.

`prepare` succeeds on all ranks or on none, after a test gather that ran no kernel and delivered every byte.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from weft.errors import UnavailableError
from weft.tuning.live.fsdp_communicator import name_of_our_own

_BUFFERS = 4  # FSDP2 holds at most three without explicit prefetching
_ALIGNMENT = 512
_COPIES = (2, 28, 0)
"""First NCCL version that uses copy engines for collectives."""
_COPIES_OF_TWO = (2, 31, 2)
"""First NCCL version for two ranks: before it, their first copy-engine collective can hang
(github.com/NVIDIA/nccl/issues/2241)."""
_log = logging.getLogger("weft.live")


class WindowedAllGather:
    """An AllGather of `torch.distributed.fsdp` whose buffers are in a window and used in rotation.

    A buffer is free when FSDP2 holds no result in it. Whether its tensor still exists is no indication:
    threads of the process group may hold it longer on one rank than on another. A gather that does not fit,
    runs on another stream than the first, or finds no free buffer uses `plain`, FSDP2's own AllGather.
    """

    def __init__(self, group: Any, arena: Any, plain: Any, held: Callable[[], set[int]]) -> None:
        """`held`: returns the addresses of all gathered parameters that FSDP2 still needs."""
        self._group, self._plain, self._held = group, plain, held
        self._size = arena.numel() // _BUFFERS
        self._buffers = [arena[i * self._size : (i + 1) * self._size] for i in range(_BUFFERS)]
        self._addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._next = 0
        self._stream: int | None = None

    @property
    def plain(self) -> Any:
        """The program's own AllGather."""
        return self._plain

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """A buffer for a gathered group of parameters."""
        count = math.prod(int(length) for length in size)
        place = self._free(count * dtype.itemsize, device)
        if place is None:
            return self._plain.allocate(size, dtype=dtype, device=device)
        self._next = (place + 1) % _BUFFERS
        return self._buffers[place][: count * dtype.itemsize].view(dtype)

    def _free(self, size: int, device: Any) -> int | None:
        stream = _stream(device)
        self._stream = stream if self._stream is None else self._stream
        if not 0 < size <= self._size or stream != self._stream:
            return None
        held = self._held()
        turn = ((self._next + i) % _BUFFERS for i in range(_BUFFERS))
        return next((place for place in turn if self._addresses[place] not in held), None)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather, through the window's communicator if the output is in the window."""
        return self._plain(
            output_tensor=output_tensor,
            input_tensor=input_tensor,
            group=self._group if output_tensor.data_ptr() in self._addresses else group,
            async_op=async_op,
        )


@dataclass(frozen=True)
class Window:
    """Memory that all ranks of a group have registered, and a function that releases it."""

    group: Any
    arena: Any
    close: Callable[[], None]


class CopyEngines:
    """The windows of this process's FSDP2 parameter groups, by the ranks that shard their parameters."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, ...], Window] = {}
        self._used: set[tuple[int, ...]] = set()
        self._held: Callable[[], set[int]] = set

    def why_not(self, groups: Sequence[Any]) -> str:
        """Why copy engines cannot gather these parameter groups; empty if they can."""
        if not groups:
            return "there is no FSDP2 model"
        return next((why for group in groups if (why := _why_not(group))), "")

    def bytes(self, groups: Iterable[Any]) -> int:
        """Bytes of GPU memory that the windows of these groups take."""
        return _BUFFERS * sum(_largest(groups).values())

    def prepare(self, groups: Sequence[Any]) -> None:
        """Create the windows. All ranks call this together; UnavailableError on all of them or none."""
        for ranks, size in sorted(_largest(groups).items()):
            if ranks not in self._windows:
                of = next(group for group in groups if shard_ranks(group) == ranks)
                problem = self.why_not(groups)
                self._windows[ranks] = open_window(of, ranks, _BUFFERS * size, problem)

    def use(self, groups: Sequence[Any], on: bool) -> None:
        """If `on`, gather groups that have windows by copy engines; all others as the program does."""
        self._held = _held_by(groups)
        made: dict[tuple[int, ...], WindowedAllGather] = {}
        for group in groups:
            ranks, now = shard_ranks(group), getattr(group, "_all_gather_comm", None)
            plain = now.plain if isinstance(now, WindowedAllGather) else now
            window = self._windows.get(ranks) if on else None
            if window is None:
                if plain is not now:
                    group._all_gather_comm = plain
            else:  # all groups of these ranks share one AllGather and its buffers
                if ranks not in made:
                    made[ranks] = WindowedAllGather(window.group, window.arena, plain, self._held)
                group._all_gather_comm = made[ranks]
        self._used = set(made)

    def release(self) -> None:
        """Release the windows that are not in use. All ranks call this together."""
        held = self._held()
        for ranks, window in list(self._windows.items()):
            first = window.arena.data_ptr()
            pending = any(first <= address < first + window.arena.numel() for address in held)
            if ranks not in self._used and not pending:
                self._windows.pop(ranks).close()


def open_window(group: Any, ranks: Sequence[int], size: int, problem: str = "") -> Window:
    """Open and test a window of `size` bytes between these ranks of an FSDP2 parameter group.

    All ranks call this together; raises UnavailableError on all of them or none. `problem`: an obstacle that
    this rank already knows of; empty if none. Before each step that waits for other ranks, all ranks agree
    that they have reached it, so that no rank waits for one that has failed.
    """
    import torch.distributed as dist

    from weft.comm.symmetric import zero_cta_group, zero_cta_options
    from weft.shim import communicators

    own, device = group.mesh_info.shard_process_group, group.device
    made: list[Callable[[], None]] = []

    def close() -> None:
        while made:
            try:
                made.pop()()
            except Exception:  # harmless: nothing uses the window any more
                _log.debug("a window of copy engines was not fully released", exc_info=True)

    def prepare() -> tuple[Any, set[str]]:
        if problem:
            raise UnavailableError(problem)
        return zero_cta_options(), {found.key for found in communicators.communicators()}

    def new_group() -> Any:
        with name_of_our_own():
            options = {"use_local_synchronization": True, "group_desc": "weft_copy_engines"}
            zero = zero_cta_group(list(ranks), asked, **options)
        made.append(lambda: dist.destroy_process_group(zero))
        return zero

    def tested() -> Any:
        arena = _registered(zero, before, size, device, made)
        _try_out(zero, arena, len(ranks), device)
        return arena

    try:
        asked, before = _together(prepare, own, device)
        zero = _together(new_group, own, device)
        arena = _together(tested, own, device)
    except Exception:
        close()
        raise
    return Window(zero, arena, close)


def _registered(zero: Any, before: set[str], size: int, device: Any, made: list[Callable[[], None]]) -> Any:
    """Allocate memory in a symmetric window: one allocation, so one window, registered once on all ranks.

    `before`: keys of the communicators that existed before the group. `made`: takes functions that undo this.
    """
    import torch

    from weft.shim import communicators
    from weft.shim.nccl_binding import NcclArena

    def allocate() -> tuple[Any, Any]:
        keys = [found.key for found in communicators.communicators() if found.key and found.key not in before]
        if len(keys) != 1:
            raise UnavailableError("its communicator was not seen")
        memory = NcclArena(int(keys[0], 16), size)
        made.extend((memory.close, lambda: torch.cuda.synchronize(device)))  # called last to first
        return memory, torch.as_tensor(memory, device=device)

    _agree("", zero, device)  # the first collective creates the communicator, if it does not exist yet
    memory, arena = _together(allocate, zero, device)
    _together(memory.register, zero, device)  # waits for all ranks
    return arena


def _try_out(zero: Any, arena: Any, ranks: int, device: Any) -> None:
    """Gather once through the window; raise unless every byte arrives and no kernel runs."""
    import torch
    import torch.distributed as dist

    def fill() -> tuple[Any, Any]:
        comm_kernels()  # fail here if it cannot be read
        part = min(1 << 20, arena.numel() // ranks) // _ALIGNMENT * _ALIGNMENT
        whole = arena[: part * ranks].zero_()
        mine = whole[dist.get_rank(zero) * part :][:part].fill_(dist.get_rank(zero) + 1)
        torch.cuda.synchronize(arena.device)
        return whole, mine

    whole, mine = _together(fill, zero, device)
    before = comm_kernels()
    dist.all_gather_into_tensor(whole, mine, group=zero)
    torch.cuda.synchronize(arena.device)
    if comm_kernels() != before:
        raise UnavailableError(
            "NCCL launched a kernel for a gather within a symmetric window (NVLink between all ranks?)"
        )
    values = torch.arange(1, ranks + 1, dtype=torch.uint8, device=arena.device)
    if dist.get_backend(zero) == "ghost":  # ghost ranks contribute this rank's data
        values.fill_(dist.get_rank(zero) + 1)
    if not bool((whole == values.repeat_interleave(mine.numel())).all()):
        raise UnavailableError("a gather by copy engines did not deliver its bytes")


def comm_kernels() -> int:
    """Kernels of collectives that this process has launched so far."""
    from weft.shim import stats

    return int(stats.snapshot()["comm_launches"])


def _together(step: Callable[[], Any], group: Any, device: Any) -> Any:
    """The result of `step` if it succeeds on all ranks; else raises UnavailableError on all of them."""
    done, problem = None, ""
    try:
        done = step()
    except Exception as error:
        _log.debug("no window for copy engines", exc_info=True)
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    _agree(problem, group, device)
    return done


def _agree(problem: str, group: Any, device: Any) -> None:
    """Raise UnavailableError on all ranks of a group if any of them has a problem."""
    import torch
    import torch.distributed as dist

    failed = torch.tensor([1 if problem else 0], dtype=torch.int32, device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if int(failed.item()):
        raise UnavailableError(problem or "copy engines cannot gather on another rank")


def _why_not(group: Any) -> str:
    import torch.distributed as dist

    from weft.shim import communicators

    ranks, device = shard_ranks(group), group.device
    own = group.mesh_info.shard_process_group
    ghosts = getattr(own, "why_no_copies", None)  # only a weft.comm.ghost_group.GhostGroup has this
    backend = own._get_backend(device)
    options = getattr(dist, "ProcessGroupNCCL", None)
    versions = [_version(found.nccl) for found in communicators.communicators()]
    two = len(ranks) == 2
    reasons = {
        ghosts or "": bool(ghosts),
        "the process group is not NCCL's": ghosts is None
        and not type(backend).__name__.startswith("ProcessGroupNCCL"),
        "this torch cannot ask NCCL for zero CTAs": ghosts is None
        and not hasattr(options, "NCCL_CTA_POLICY_ZERO"),
        "the program gathers in its own way": type(getattr(group, "_all_gather_comm", None)).__name__
        not in ("DefaultAllGather", "WindowedAllGather"),
        "NCCL is older than 2.28": not versions or min(versions) < _COPIES,
        "two ranks need NCCL 2.31.2, before which their first copy can hang": two
        and bool(versions)
        and min(versions) < _COPIES_OF_TWO,
        "its ranks are not known to be on one node": not _one_node(ranks),
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: a waiting copy would hold up all streams": os.environ.get(
            "CUDA_DEVICE_MAX_CONNECTIONS"
        )
        == "1",
        "there is one rank": len(ranks) < 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _one_node(ranks: Sequence[int]) -> bool:
    """Whether these ranks share a node, by torchrun's numbering; without it, if the world fits on one."""
    import torch
    import torch.distributed as dist

    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local) > 0:
        return len({rank // int(local) for rank in ranks}) == 1
    return bool(dist.get_world_size() <= torch.cuda.device_count())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def shard_ranks(group: Any) -> tuple[int, ...]:
    """The ranks between which a group's parameters are sharded."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group))


def _held_by(groups: Iterable[Any]) -> Callable[[], set[int]]:
    """A function that returns the addresses of gathered parameters that FSDP2 still needs.

    All ranks need the same buffers at the same call, so they choose the same free one.
    """
    known = [ref(group) for group in groups]

    def held() -> set[int]:
        found = set()
        for group in (group for one in known if (group := one()) is not None):
            state = group.comm_ctx.all_gather_state  # FSDP2 frees it after the next copy-out
            for result in (group._all_gather_result, state and state.all_gather_result):
                if result is not None:
                    found.add(result.all_gather_output.data_ptr())
        return found

    return held


def _largest(groups: Iterable[Any]) -> dict[tuple[int, ...], int]:
    """Bytes of the largest gathered parameter group by ranks, as FSDP2 allocates it."""
    found: dict[tuple[int, ...], int] = {}
    for group in groups:
        ranks = shard_ranks(group)
        size = len(ranks) * sum(
            param._sharded_param_data.numel() * (param.param_dtype or param.orig_dtype).itemsize
            for param in group.fsdp_params
        )
        found[ranks] = max(found.get(ranks, 0), -(-size // _ALIGNMENT) * _ALIGNMENT)
    return found


def _stream(device: Any) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
