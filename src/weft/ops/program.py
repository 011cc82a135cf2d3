"""A schedule compiled to run many times: its scratch memory, its views, and instructions for its steps.

Everything that does not depend on the caller's tensors is made once. A call creates its views of the caller's
tensors with a few strided calls, then performs the instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

from weft.ops.operands import NARROW_DTYPES, Operands, given_name
from weft.ops.steps import Add, Copy, Matmul, Region, Schedule, Step, runs

MM, BMM, _COPY, SUM, WIDE_FIRST, WIDE_MORE, NARROW, ADDMM, BADDBMM, SCALED = range(10)

Instruction: TypeAlias = tuple[int, Any, Any, Any]
"""Operation code, slots of the two views it reads, slot of the view it writes; -1: unused.

SCALED has pairs: (view, scale) twice, then (view, whether to accumulate fast)."""

Binding: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""Size, strides and offset of a view of the caller's tensor, and its slot; all slots for a batch of views."""
Views: TypeAlias = list[tuple[int, Any]]
"""(slot, view) pairs."""

_KEPT = 256
"""Most addresses to remember for each of the caller's tensors. Views are kept for addresses seen twice."""
WIDE = "wide"
"""The fp32 buffer that accumulates partial sums over k."""


class Program:
    """The scratch memory and the views of one schedule on one device."""

    def __init__(
        self,
        schedule: Schedule,
        operands: Operands,
        memory: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`memory`: scratch buffers owned by something else, by name (symmetric memory)."""
        self.schedule, self.operands = schedule, operands
        self.dtype, self.device = operands.dtype, operands.device
        self._callers = operands.names
        self._strides: dict[str, tuple[int, int]] = dict(operands.strides(schedule))
        self.tensors: dict[str, torch.Tensor] = {}
        for name, (rows, cols) in schedule.buffers.items():
            if name in ("x", "w", "out"):
                continue
            given = (memory or {}).get(name)
            dtype = operands.dtype_of(name)
            self._add(
                name, torch.empty(rows, cols, dtype=dtype, device=self.device) if given is None else given
            )
        self._views: dict[tuple[Any, ...], int] = {}
        self._slots: list[Any] = []
        self._wanted: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int, int]]] = {}
        self._bindings: tuple[list[Binding], ...] = tuple([] for _ in self._callers)
        self._nothing = -1
        self._filled: set[tuple[str, int]] = set()
        self._kept: dict[tuple[int, ...], list[Any]] = {}
        self._views_at: tuple[dict[int, Views], ...] = tuple({} for _ in self._callers)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        self._strides[name] = (tensor.shape[1], 1)

    def view(self, *regions: Region) -> int:
        """The slot of the view of one region, or of several evenly spaced regions as a batch."""
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
            if buffer in self._callers:
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
            self._slots.append(torch.empty(0, dtype=self.operands.moved_dtype, device=self.device))
        return self._nothing

    def compute(self, step: Step) -> list[Instruction]:
        """The instructions of a local step (not a send or a receive)."""
        if isinstance(step, Matmul):
            return [*self._fill(step.a), *self._matmul(step)]
        if isinstance(step, Copy):
            return [
                *self._fill(step.sources),
                *(
                    made
                    for sources, targets in self.operands.copies(step)
                    for made in self._copies(sources, targets)
                ),
            ]
        if isinstance(step, Add):
            return [(SUM, self.view(*step.sources), -1, self.view(step.target))]
        raise TypeError(f"{step.id} is not local")

    def _fill(self, regions: Sequence[Region]) -> list[Instruction]:
        """Copies of those rows of x that this step is the first to read, if the caller's x has another order.

        Steps are compiled in the order in which they run, so each row is copied once, as late as possible.
        """
        made: list[Instruction] = []
        for region in regions:
            if region.buffer != "x" or not region.rows:
                continue
            for name, held, size, strides in self.operands.rows_given(region.row, region.rows):
                new = [place for place in held if (name, place) not in self._filled]
                self._filled.update((name, place) for place in new)
                dense = torch.empty(size, device="meta").stride()
                for first, count in _consecutive(new):
                    part = (count, *size[1:])
                    source = self._slot(given_name(name), part, strides, first * strides[0])
                    made.append((_COPY, source, -1, self._slot(name, part, dense, first * dense[0])))
        return made

    def _copies(self, sources: Sequence[Region], targets: Sequence[Region]) -> list[Instruction]:
        return [
            (_COPY, self.view(*sources[first:end]), -1, self.view(*targets[first:end]))
            for first, end in runs(sources, targets)
        ]

    def _matmul(self, step: Matmul) -> list[Instruction]:
        if self._accumulates and self.dtype in NARROW_DTYPES:
            return self._wide_matmul(step)
        made: list[Instruction] = []
        for number, (a, b, c) in enumerate(self.operands.matmuls(step)):
            accumulate = step.accumulate or (number > 0 and self.schedule.scatters)
            made += self._one_matmul(a, b, c, accumulate)
        return made

    def _one_matmul(
        self, a: Sequence[Region], b: Region, c: Sequence[Region], accumulate: bool
    ) -> list[Instruction]:
        if self.operands.scaled:
            return [self._scaled(left, b, right) for left, right in zip(a, c, strict=True)]
        made: list[Instruction] = []
        for first, end in runs(a, c):
            left, right = self.view(*a[first:end]), self.view(*c[first:end])
            if end - first == 1:
                made.append((ADDMM if accumulate else MM, left, self.view(b), right))
            else:
                code = BADDBMM if accumulate else BMM
                made.append((code, left, self._repeated(b, end - first), right))
        return made

    def _scaled(self, a: Region, b: Region, c: Region) -> Instruction:
        """A matmul with scales. Row scales follow the rows of `a` (reduce-scatter) or of `c` (gather)."""
        rows = a if self.schedule.scatters else c
        size, stride, offset = self.operands.scale_of_rows(rows)
        scale_a = self._slot("scale.a", size, stride, offset)
        name, size, stride, offset = self.operands.scale_of_columns(b)
        scale_b = self._slot(name, size, stride, offset)
        return (
            SCALED,
            (self.view(a), scale_a),
            (self.view(b), scale_b),
            (self.view(c), self.operands.fast_accum),
        )

    @property
    def _accumulates(self) -> bool:
        return any(step.accumulate for step in self.schedule.matmuls)

    def _wide_matmul(self, step: Matmul) -> list[Instruction]:
        """Partial sums over k stay in fp32 until the last one."""
        if WIDE not in self.tensors:
            if self.device.type == "cuda":
                mixed_matmuls(self.device, self.dtype)  # cache the answer before a CUDA graph is captured
            rows, cols = self.schedule.buffers["out"]
            self._add(WIDE, torch.empty(rows, cols, dtype=torch.float32, device=self.device))
        code = WIDE_MORE if step.accumulate else WIDE_FIRST
        made: list[Instruction] = []
        column = 0
        for a, b, c in self.operands.matmuls(step):
            total = self.view(Region(WIDE, 0, self.schedule.buffers["out"][0], column, b.cols))
            made.append((code, self.view(*a), self.view(b), total))
            if step is self.schedule.matmuls[-1]:
                made.append((NARROW, total, -1, self.view(*c)))
            column += b.cols
        return made

    def _repeated(self, b: Region, times: int) -> int:
        row, col = self._strides[b.buffer]
        return self._slot(b.buffer, (times, b.rows, b.cols), (0, row, col), b.row * row + b.col * col)

    def finish(self) -> None:
        """Group the views of the caller's tensors: one call makes all evenly spaced ones of a shape."""
        for source, name in enumerate(self._callers):
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

    def bind(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """All views by slot, for the caller's tensors in the order of `Operands.names`."""
        slots: list[Any] = self._slots.copy()
        for source, tensor in enumerate(tensors):
            for slot, view in self._bound(source, tensor):
                slots[slot] = view
        return slots

    def bind_again(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Like `bind`, but reuses the views of an earlier call for tensors at the same addresses.

        An allocator hands out the same addresses repeatedly, and 57 views cost 25 µs. The views of a tensor
        are kept from its second use on. They do not own their memory and are only used during a call, while
        the caller holds it. Each tensor is remembered separately: in a model, each layer has its own w.
        """
        places = tuple([tensor.data_ptr() for tensor in tensors])
        slots = self._kept.get(places)
        if slots is not None:
            return slots
        slots = self._slots.copy()
        again = True
        for source, tensor in enumerate(tensors):
            views = self._views_at[source].get(places[source])
            if not views:
                again = again and views is not None
                views = self._remember(source, tensor, places[source], views is not None)
            for slot, view in views:
                slots[slot] = view
        if again:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[places] = slots
        return slots

    def forget_views(self) -> None:
        """Forget all addresses and views."""
        self._kept.clear()
        for views_at in self._views_at:
            views_at.clear()

    def _remember(self, source: int, tensor: torch.Tensor, place: int, again: bool) -> Views:
        """The views of a tensor. If it was used before (`again`), keep them; else only its address."""
        views_at = self._views_at[source]
        if again:
            with torch.inference_mode(False):
                views_at[place] = views = self._bound(source, _alias(tensor))
            return views
        if len(views_at) >= _KEPT:
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
    """A tensor on the same memory that does not own it; the tensor itself if this torch cannot make one."""
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None or not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = make(tensor.data_ptr(), tensor.device, span * tensor.element_size())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, 0, tensor.shape, tensor.stride())


def _consecutive(places: Sequence[int]) -> list[tuple[int, int]]:
    """First number and length of each run of consecutive numbers."""
    starts = [i for i, place in enumerate(places) if not i or place != places[i - 1] + 1]
    ends = [*starts[1:], len(places)]
    return [(places[start], end - start) for start, end in zip(starts, ends, strict=False)]


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
    """Perform one instruction on the current stream."""
    code, a, b, c = instruction
    if code == MM:
        torch.mm(slots[a], slots[b], out=slots[c])
    elif code == BMM:
        torch.bmm(slots[a], slots[b], out=slots[c])
    elif code in (_COPY, NARROW):
        slots[c].copy_(slots[a])
    elif code == SUM:
        torch.sum(slots[a], 0, out=slots[c])
    elif code == ADDMM:
        torch.addmm(slots[c], slots[a], slots[b], out=slots[c])
    elif code == BADDBMM:
        torch.baddbmm(slots[c], slots[a], slots[b], out=slots[c])
    elif code == SCALED:
        _scaled_matmul(slots, a, b, c)
    elif slots[a].is_cuda and mixed_matmuls(slots[a].device, slots[a].dtype):
        if code == WIDE_FIRST:
            torch.mm(slots[a], slots[b], out_dtype=torch.float32, out=slots[c])
        else:
            torch.addmm(slots[c], slots[a], slots[b], out_dtype=torch.float32, out=slots[c])
    elif code == WIDE_FIRST:
        torch.mm(slots[a].float(), slots[b].float(), out=slots[c])
    else:
        slots[c].addmm_(slots[a].float(), slots[b].float())


def _scaled_matmul(slots: list[Any], a: tuple[int, int], b: tuple[int, int], c: tuple[int, bool]) -> None:
    out = slots[c[0]]
    torch._scaled_mm(
        slots[a[0]],
        slots[b[0]],
        slots[a[1]],
        slots[b[1]],
        out_dtype=out.dtype,
        use_fast_accum=c[1],
        out=out,
    )


@cache
def mixed_matmuls(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch can multiply matrices of this dtype into fp32; if not, they are widened first."""
    one = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
