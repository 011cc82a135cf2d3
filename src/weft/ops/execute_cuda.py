"""Runs a schedule on a GPU: products on the caller's stream, transfers on their own, events between them.

The list of what to issue is made once. A lane is a stream for transfers; work on a lane runs in order, so a
product waits for the last transfer it needs on each lane, and a transfer for the last product it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.comm.dma import Copies, Entry, check
from weft.ops.program import Instruction, Program, perform
from weft.ops.steps import Recv, Schedule, Send, Step

_COMPUTE, _DRIVER, _WAIT, _RECORD, _CALL = range(5)


@dataclass(slots=True)
class Transfer:
    """What a link does for a send or a receive."""

    lane: int
    """Which transfer stream; -1: the caller's stream, where the data is needed."""
    entries: list[Entry] = field(default_factory=list)
    """Driver calls, in order."""
    call: Callable[[list[Any]], None] | None = None
    """Or anything else; it gets the views and switches to its stream itself."""
    after: tuple[str, ...] = ()
    """Steps to wait for besides the step's own."""


class Link(Protocol):
    """What moves bytes between this rank and its peers."""

    lanes: Sequence[int]
    """Stream handles."""

    def begin(self, program: Program) -> Transfer | None:
        """What comes before the first transfer."""
        ...

    def send(self, step: Send, program: Program) -> Transfer | None: ...

    def recv(self, step: Recv, program: Program) -> Transfer | None: ...

    def end(self, program: Program) -> Transfer | None:
        """What comes after the last transfer."""
        ...


class CudaExecutor:
    """One schedule, its link and the list of what to issue."""

    def __init__(
        self,
        schedule: Schedule,
        program: Program,
        link: Link,
        driver: Copies,
        current: Callable[[], int],
    ) -> None:
        self.program, self._link, self._driver, self._current = program, link, driver, current
        self._start, self._finish = driver.event(), [driver.event() for _ in link.lanes]
        self._list: list[tuple[int, Any, Any]] = []
        self._transfers: dict[str, tuple[int, int]] = {}  # id → lane, place in the lane
        self._products: dict[str, int] = {}  # id → place on the caller's stream
        self._waited = [-1] * len(link.lanes)  # the last product that each lane waited for
        self._events: dict[str, int] = {}
        self._compile(schedule)
        program.finish()

    def run(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        slots = self.program.bind(x, w, out)
        stream, driver, lanes = self._current(), self._driver, self._link.lanes
        wait, record = driver.wait, driver.record
        failed = record(self._start, stream)
        for lane in lanes:
            failed |= wait(lane, self._start, 0)
        for kind, what, more in self._list:
            if kind == _COMPUTE:
                perform(slots, what)
            elif kind == _DRIVER:
                failed |= what(*more)
            elif kind == _WAIT:
                failed |= wait(stream, what, 0)
            elif kind == _RECORD:
                failed |= record(what, stream)
            else:
                what(slots)
        for lane, event in zip(lanes, self._finish, strict=True):
            failed |= record(event, lane) | wait(stream, event, 0)
        if failed:
            check(failed, "a copy or an event of this operation")

    def _compile(self, schedule: Schedule) -> None:
        transfers = {
            step.id: (self._link.send if isinstance(step, Send) else self._link.recv)(step, self.program)  # type: ignore[arg-type]
            for step in schedule.steps
            if isinstance(step, Send | Recv)
        }
        wanted = _lasts(schedule, transfers)
        self._put(self._link.begin(self.program))
        for step in ordered(schedule):
            if isinstance(step, Send | Recv):
                self._transfer(step, transfers[step.id], step.id in wanted)
            else:
                self._compute(step, transfers, any(_waits_for(step.id, schedule, transfers)))
        self._put(self._link.end(self.program))

    def _transfer(self, step: Send | Recv, transfer: Transfer | None, wanted: bool) -> None:
        if transfer is None or transfer.lane < 0:
            return
        lane = transfer.lane
        needs = [self._products[name] for name in (*step.after, *transfer.after) if name in self._products]
        if needs and max(needs) > self._waited[lane]:
            self._waited[lane] = max(needs)
            (last,) = [name for name, place in self._products.items() if place == max(needs)]
            self._list.append((_DRIVER, self._driver.wait, (self._link.lanes[lane], self._events[last], 0)))
        self._put(transfer)
        self._transfers[step.id] = (lane, len(self._transfers))
        if wanted:
            event = self._events[step.id] = self._driver.event()
            self._list.append((_DRIVER, self._driver.record, (event, self._link.lanes[lane])))

    def _compute(self, step: Step, transfers: dict[str, Transfer | None], waited_for: bool) -> None:
        for name in step.after:
            transfer = transfers.get(name)
            if transfer is not None and transfer.lane < 0:
                self._put(transfer)
                transfers[name] = None
        for name in _last_by_lane(step.after, transfers, self._transfers):
            self._list.append((_WAIT, self._events[name], None))
        self._list += [(_COMPUTE, made, None) for made in self.program.compute(step)]
        self._products[step.id] = len(self._products)
        if waited_for:
            event = self._events[step.id] = self._driver.event()
            self._list.append((_RECORD, event, None))

    def _put(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            self._list += [(_DRIVER, function, arguments) for function, arguments in transfer.entries]
            if transfer.call is not None:
                self._list.append((_CALL, transfer.call, None))

    @property
    def issued(self) -> list[Instruction]:
        """The products, copies and sums of a call, for looking at."""
        return [what for kind, what, _ in self._list if kind == _COMPUTE]


def ordered(schedule: Schedule) -> list[Step]:
    """The steps as they are issued: the first transfers before a first product that needs none."""
    steps = list(schedule.steps)
    if steps and steps[0].id == "matmul.own" and len(schedule.matmuls) > 1:
        own = steps.pop(0)
        first = next(i for i, step in enumerate(steps) if not isinstance(step, Send | Recv))
        steps.insert(first, own)
    return steps


def _last_by_lane(
    names: Sequence[str], transfers: dict[str, Transfer | None], places: dict[str, tuple[int, int]]
) -> list[str]:
    """Of some transfers, the last one on each lane."""
    last: dict[int, str] = {}
    for name in names:
        if transfers.get(name) is not None and name in places:
            lane, place = places[name]
            if lane not in last or places[last[lane]][1] < place:
                last[lane] = name
    return list(last.values())


def _lasts(schedule: Schedule, transfers: dict[str, Transfer | None]) -> set[str]:
    """The transfers that need an event."""
    places: dict[str, tuple[int, int]] = {}
    for step in ordered(schedule):
        transfer = transfers.get(step.id)
        if transfer is not None and transfer.lane >= 0:
            places[step.id] = (transfer.lane, len(places))
    found: set[str] = set()
    for step in schedule.steps:
        if not isinstance(step, Send | Recv):
            found.update(_last_by_lane(step.after, transfers, places))
    return found


def _waits_for(product: str, schedule: Schedule, transfers: dict[str, Transfer | None]) -> list[bool]:
    """Whether some transfer waits for a product, one truth each."""
    found = []
    for step in schedule.steps:
        transfer = transfers.get(step.id)
        if isinstance(step, Send | Recv) and transfer is not None:
            found.append(product in step.after or product in transfer.after)
    return found
