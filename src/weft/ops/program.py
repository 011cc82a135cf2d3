"""A schedule made ready to run many times: its scratch memory, its views, its steps as a flat list.

Everything that does not depend on the caller's tensors is made once. A call makes its views of x, w and out
in a few strided calls, then walks the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

from weft.errors import UsageError
from weft.ops.steps import Add, Copy, Matmul, Region, Schedule, Step, runs

MM, BMM, COPY, SUM, WIDE_FIRST, WIDE_MORE, NARROW, ADDMM = range(8)

Instruction: TypeAlias = tuple[int, int, int, int]
"""What to do, and the views it reads (two) and writes."""

Binding: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""Size, strides and offset of a view of the caller's tensor, and its slot; of several, their slots."""
Views: TypeAlias = list[tuple[int, Any]]
"""Slots and what is in them."""

CALLERS = ("x", "w", "out")
KEPT = 256
"""Addresses of x, of w and of results that a plan remembers, with the views of those that came twice."""
NARROW_DTYPES = (torch.bfloat16, torch.float16)


class Program:
    """The scratch memory and the views of one schedule on one device."""

    def __init__(
        self,
        schedule: Schedule,
        dtype: torch.dtype,
        device: torch.device,
        w_strides: tuple[int, int],
        memory: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`memory`: scratch that something else owns, by name (symmetric memory)."""
        self.schedule, self.dtype, self.device = schedule, dtype, device
        self.tensors: dict[str, torch.Tensor] = {}
        self._strides: dict[str, tuple[int, int]] = {"w": w_strides}
        for name, (rows, cols) in schedule.buffers.items():
            if name in CALLERS:
                self._strides.setdefault(name, (cols, 1))
                continue
            given = (memory or {}).get(name)
            self.tensors[name] = (
                torch.empty(rows, cols, dtype=dtype, device=device) if given is None else given
            )
            self._strides[name] = (cols, 1)
        self._views: dict[tuple[Any, ...], int] = {}
        self._slots: list[torch.Tensor | None] = []
        self._wanted: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int, int]]] = {}
        self._bindings: tuple[list[Binding], ...] = ([], [], [])
        self._wide: torch.Tensor | None = None
        self._wide_slot = self._nothing = -1
        self._kept: dict[tuple[int, int, int], list[Any]] = {}
        self._views_at: tuple[dict[int, Views], ...] = ({}, {}, {})

    def view(self, *regions: Region) -> int:
        """The slot of one region, or of several evenly spaced ones as a batch."""
        first = regions[0]
        row, col = self._strides[first.buffer]
        size: tuple[int, ...] = (first.rows, first.cols)
        stride: tuple[int, ...] = (row, col)
        if len(regions) > 1:
            size, stride = (len(regions), *size), ((regions[1].row - first.row) * row, *stride)
        return self._slot(first.buffer, size, stride, first.row * row + first.col * col)

    def _slot(self, buffer: str, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> int:
        key = (buffer, size, stride, offset)
        if key not in self._views:
            self._views[key] = slot = len(self._slots)
            if buffer in CALLERS:
                self._slots.append(None)
                self._wanted.setdefault(buffer, []).append((size, stride, offset, slot))
            else:
                home = self.tensors[buffer]
                self._slots.append(torch.as_strided(home, size, stride, home.storage_offset() + offset))
        return self._views[key]

    def nothing(self) -> int:
        """The slot of an empty tensor."""
        if self._nothing < 0:
            self._nothing = len(self._slots)
            self._slots.append(torch.empty(0, dtype=self.dtype, device=self.device))
        return self._nothing

    def compute(self, step: Step) -> list[Instruction]:
        """The instructions of a step that stays on this rank."""
        if isinstance(step, Matmul):
            return self._matmul(step)
        if isinstance(step, Copy):
            return self._copies(step.sources, step.targets)
        if isinstance(step, Add):
            return [(SUM, self.view(*step.sources), -1, self.view(step.target))]
        raise TypeError(f"{step.id} is not local")

    def _copies(self, sources: Sequence[Region], targets: Sequence[Region]) -> list[Instruction]:
        return [
            (COPY, self.view(*sources[first:end]), -1, self.view(*targets[first:end]))
            for first, end in runs(sources, targets)
        ]

    def _matmul(self, step: Matmul) -> list[Instruction]:
        if self._accumulates and self.dtype in NARROW_DTYPES:
            return self._wide_matmul(step)
        if step.accumulate:
            return [(ADDMM, self.view(*step.a), self.view(step.b), self.view(*step.c))]
        made: list[Instruction] = []
        for first, end in runs(step.a, step.c):
            a, c = self.view(*step.a[first:end]), self.view(*step.c[first:end])
            if end - first == 1:
                made.append((MM, a, self.view(step.b), c))
            else:
                made.append((BMM, a, self._repeated(step.b, end - first), c))
        return made

    @property
    def _accumulates(self) -> bool:
        return any(step.accumulate for step in self.schedule.matmuls)

    def _wide_matmul(self, step: Matmul) -> list[Instruction]:
        """Partial sums over k stay in fp32 until the last one."""
        if self._wide is None:
            if self.device.type == "cuda":
                mixed_products(self.device, self.dtype)  # asked before a graph may be captured
            rows, cols = self.schedule.buffers["out"]
            self._wide = torch.empty(rows, cols, dtype=torch.float32, device=self.device)
            self._wide_slot = len(self._slots)
            self._slots.append(self._wide)
        code = WIDE_MORE if step.accumulate else WIDE_FIRST
        made: list[Instruction] = [(code, self.view(*step.a), self.view(step.b), self._wide_slot)]
        if step is self.schedule.matmuls[-1]:
            made.append((NARROW, self._wide_slot, -1, self.view(*step.c)))
        return made

    def _repeated(self, b: Region, times: int) -> int:
        row, col = self._strides[b.buffer]
        return self._slot(b.buffer, (times, b.rows, b.cols), (0, row, col), b.row * row + b.col * col)

    def finish(self) -> None:
        """Group the views of the caller's tensors: evenly spaced ones of one shape are made by one call."""
        for source, name in enumerate(CALLERS):
            alike: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
            for size, stride, offset, slot in self._wanted.get(name, []):
                alike.setdefault((size, stride), []).append((offset, slot))
            for (size, stride), places in alike.items():
                for group in _evenly_spaced(sorted(places)):
                    slots = tuple(slot for _, slot in group)
                    start = group[0][0]
                    if len(group) == 1:
                        self._bindings[source].append((size, stride, start, slots))
                    else:
                        step = group[1][0] - start
                        batch = (len(group), *size)
                        self._bindings[source].append((batch, (step, *stride), start, slots))

    def bind(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> list[Any]:
        """All views, with the caller's tensors in their places."""
        slots: list[Any] = self._slots.copy()
        for source, tensor in enumerate((x, w, out)):
            for slot, view in self._bound(source, tensor):
                slots[slot] = view
        return slots

    def bind_again(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> list[Any]:
        """The same, but views of an earlier call serve again where the memory is the same.

        An allocator hands out the same addresses over and over, and 57 views cost 25 µs. From the second time
        on a tensor's views are kept. They own nothing: they are for use during a call, while the caller holds
        the memory. x, w and out are remembered apart: in a model each layer has its own w.
        """
        places = (x.data_ptr(), w.data_ptr(), out.data_ptr())
        slots = self._kept.get(places)
        if slots is not None:
            return slots
        slots = self._slots.copy()
        again = True
        for source, tensor in enumerate((x, w, out)):
            views = self._views_at[source].get(places[source])
            if not views:
                again = again and views is not None
                views = self._remember(source, tensor, places[source], views is not None)
            for slot, view in views:
                slots[slot] = view
        if again:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[places] = slots
        return slots

    def forget_views(self) -> None:
        """As if no tensor had come before."""
        self._kept.clear()
        for views_at in self._views_at:
            views_at.clear()

    def _remember(self, source: int, tensor: torch.Tensor, place: int, again: bool) -> Views:
        """The views of a tensor. Of one that came before they are kept, else only its address."""
        views_at = self._views_at[source]
        if again:
            with torch.inference_mode(False):
                views_at[place] = views = self._bound(source, _alias(tensor))
            return views
        if len(views_at) >= KEPT:
            self.forget_views()
        views_at[place] = []
        return self._bound(source, tensor)

    def _bound(self, source: int, tensor: torch.Tensor) -> Views:
        views: Views = []
        start = tensor.storage_offset()
        for size, stride, offset, places in self._bindings[source]:
            made = torch.as_strided(tensor, size, stride, offset + start)
            if len(places) == 1:
                views.append((places[0], made))
            else:
                views += zip(places, made.unbind(0), strict=True)
        return views


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, not owned; the tensor itself where this torch has no such thing."""
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None or not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = make(tensor.data_ptr(), tensor.device, span * tensor.element_size())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, 0, tensor.shape, tensor.stride())


def _evenly_spaced(places: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    groups: list[list[tuple[int, int]]] = []
    for place in places:
        group = groups[-1] if groups else []
        fits = len(group) == 1 or (len(group) > 1 and place[0] - group[-1][0] == group[1][0] - group[0][0])
        if fits:
            group.append(place)
        else:
            groups.append([place])
    return groups


def perform(slots: list[Any], instruction: Instruction) -> None:
    """Do one instruction on the current stream."""
    code, a, b, c = instruction
    if code == MM:
        torch.mm(slots[a], slots[b], out=slots[c])
    elif code == BMM:
        torch.bmm(slots[a], slots[b], out=slots[c])
    elif code in (COPY, NARROW):
        slots[c].copy_(slots[a])
    elif code == SUM:
        torch.sum(slots[a], 0, out=slots[c])
    elif code == ADDMM:
        torch.addmm(slots[c], slots[a], slots[b], out=slots[c])
    elif slots[a].is_cuda and mixed_products(slots[a].device, slots[a].dtype):
        if code == WIDE_FIRST:
            torch.mm(slots[a], slots[b], out_dtype=torch.float32, out=slots[c])
        else:
            torch.addmm(slots[c], slots[a], slots[b], out_dtype=torch.float32, out=slots[c])
    elif code == WIDE_FIRST:
        torch.mm(slots[a].float(), slots[b].float(), out=slots[c])
    else:
        slots[c].addmm_(slots[a].float(), slots[b].float())


@cache
def mixed_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies two of this dtype into fp32; where not, they are widened first."""
    one = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def check_tensors(operation: str, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None) -> None:
    """Refuse what cannot be multiplied, and say which sizes do not fit."""
    if x.dim() < 2 or w.dim() != 2:
        raise UsageError(
            f"{operation}: x has {x.dim()} dimensions and w has {w.dim()}; x needs at least 2, w exactly 2"
        )
    if x.shape[-1] != w.shape[0]:
        raise UsageError(
            f"{operation}: x has {x.shape[-1]} columns and w has {w.shape[0]} rows; they must be equal"
        )
    if x.dtype != w.dtype or x.device != w.device:
        raise UsageError(
            f"{operation}: x is {_kind(x)} and w is {_kind(w)}; both must have one dtype on one device"
        )
    if x.dtype not in (torch.float32, *NARROW_DTYPES):
        raise UsageError(f"{operation}: dtype {x.dtype} is not supported; use bfloat16, float16 or float32")
    if out is not None and (out.dtype != x.dtype or out.device != x.device):
        raise UsageError(f"{operation}: out is {_kind(out)} and x is {_kind(x)}; they must be alike")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
