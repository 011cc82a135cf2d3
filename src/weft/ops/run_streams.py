"""Runs a schedule on a GPU: matmuls on the caller's stream, transfers on their own, events between them.

The list of calls to issue is computed once and compiled to a function. A lane is a stream for transfers. Work
on a lane runs in order, so a matmul waits only for the last transfer it needs on each lane, and a transfer
waits only for the last matmul it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.comm.dma import Copies, CopyEntry, check_result
from weft.ops.program import Program, perform
from weft.ops.steps import Recv, Schedule, Send, Step

_COMPUTE, DRIVER, WAIT, RECORD, CALL = range(5)


@dataclass(slots=True)
class Transfer:
    """The work that a link issues for a send or a receive."""

    lane: int
    """Index of the transfer stream; -1: the caller's stream, just before the step that needs the data."""
    entries: list[CopyEntry] = field(default_factory=list)
    """Driver calls, in order."""
    call: Callable[[list[Any]], None] | None = None
    """A function to call after the entries, with the views; it switches to its stream itself."""
    after: tuple[str, ...] = ()
    """Steps to wait for, in addition to those of the step."""


class Link(Protocol):
    """Moves bytes between this rank and its peers."""

    lanes: Sequence[int]
    """Stream handles."""

    def begin(self, program: Program) -> Transfer | None:
        """Work to issue before the first transfer; None if there is none."""
        ...

    def send(self, step: Send, program: Program) -> Transfer | None: ...

    def recv(self, step: Recv, program: Program) -> Transfer | None: ...

    def end(self, program: Program) -> Transfer | None:
        """Work to issue after the last transfer; None if there is none."""
        ...


class StreamRunner:
    """Runs one schedule over one link."""

    exchanges = False  # transfers are asynchronous: their failures show later, on the GPU

    def __init__(
        self,
        schedule: Schedule,
        program: Program,
        link: Link,
        driver: Copies,
        current: Callable[[], int],
    ) -> None:
        self.program, self._link, self._driver, self._current = program, link, driver, current
        self._made: list[int] = []
        self._start, self._finish = self._event(), [self._event() for _ in link.lanes]
        self._list: list[tuple[int, Any]] = []
        self._transfers: dict[str, tuple[int, int]] = {}  # id → lane, position among all transfers
        self._matmuls: dict[str, int] = {}  # id → place on the caller's stream
        self._order: list[str] = []  # ids by place
        self._waited = [-1] * len(link.lanes)  # place of the last matmul that each lane waited for
        self._events: dict[str, int] = {}
        self._compile(schedule)
        program.finish()
        self._issue = self._write()

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        failed = self._issue(self.program.bind_again(tensors), self._current())
        if failed:
            check_result(failed, "a copy or an event of this operation")

    def _event(self) -> int:
        self._made.append(self._driver.event())
        return self._made[-1]

    def __del__(self) -> None:
        self._driver.give_back(self._made)

    def calls(self, slots: Any, stream: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...], bool]]:
        """The calls to issue, in order: function, arguments, and whether it returns an error code."""
        driver, lanes = self._driver, self._link.lanes
        made: list[Any] = [(driver.record, (self._start, stream), True)]
        made += [(driver.wait, (lane, self._start, 0), True) for lane in lanes]
        for kind, what in self._list:
            if kind == DRIVER:
                made.append((*what, True))
            elif kind == _COMPUTE:
                made.append((perform, (slots, what), False))
            elif kind == WAIT:
                made.append((driver.wait, (stream, what, 0), True))
            elif kind == RECORD:
                made.append((driver.record, (what, stream), True))
            else:
                made.append((what, (slots,), False))
        for lane, event in zip(lanes, self._finish, strict=True):
            made += [(driver.record, (event, lane), True), (driver.wait, (stream, event, 0), True)]
        return made

    def _write(self) -> Callable[[list[Any], int], int]:
        """Generate a function that makes all calls: iterating over a list of 200 would cost 10 µs."""
        known: dict[str, Any] = {}
        names: dict[int, str] = {}

        def name(value: Any) -> str:
            if isinstance(value, _Given):
                return value.name
            if isinstance(value, int):
                return repr(value)
            if id(value) not in names:
                names[id(value)] = f"v{len(names)}"
                known[names[id(value)]] = value
            return names[id(value)]

        lines = ["def issue(slots, stream):", "    failed = 0"]
        for function, arguments, coded in self.calls(_Given("slots"), _Given("stream")):
            call = f"{name(function)}({', '.join(name(value) for value in arguments)})"
            lines.append(f"    failed |= {call}" if coded else f"    {call}")
        exec("\n".join([*lines, "    return failed"]), known)  # contains only generated names and numbers
        written: Callable[[list[Any], int], int] = known["issue"]
        return written

    def _compile(self, schedule: Schedule) -> None:
        transfers = {
            step.id: (self._link.send if isinstance(step, Send) else self._link.recv)(step, self.program)  # type: ignore[arg-type]
            for step in schedule.steps
            if isinstance(step, Send | Recv)
        }
        wanted, awaited = _lasts(schedule, transfers), _awaited(schedule, transfers)
        self._put(self._link.begin(self.program))
        for step in ordered(schedule):
            if isinstance(step, Send | Recv):
                self._transfer(step, transfers[step.id], step.id in wanted)
            else:
                self._compute(step, transfers, step.id in awaited)
        self._put(self._link.end(self.program))

    def _transfer(self, step: Send | Recv, transfer: Transfer | None, wanted: bool) -> None:
        if transfer is None or transfer.lane < 0:
            return
        lane = transfer.lane
        needs = [self._matmuls[name] for name in (*step.after, *transfer.after) if name in self._matmuls]
        if needs and max(needs) > self._waited[lane]:
            self._waited[lane] = max(needs)
            last = self._order[max(needs)]
            self._drive((self._driver.wait, (self._link.lanes[lane], self._events[last], 0)))
        self._put(transfer)
        self._transfers[step.id] = (lane, len(self._transfers))
        if wanted:
            event = self._events[step.id] = self._event()
            self._drive((self._driver.record, (event, self._link.lanes[lane])))

    def _compute(self, step: Step, transfers: dict[str, Transfer | None], waited_for: bool) -> None:
        for name in step.after:
            transfer = transfers.get(name)
            if transfer is not None and transfer.lane < 0:
                self._put(transfer)
                transfers[name] = None
        for name in _last_by_lane(step.after, transfers, self._transfers):
            self._list.append((WAIT, self._events[name]))
        self._list += [(_COMPUTE, made) for made in self.program.compute(step)]
        self._matmuls[step.id] = len(self._matmuls)
        self._order.append(step.id)
        if waited_for:
            event = self._events[step.id] = self._event()
            self._list.append((RECORD, event))

    def _put(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            for entry in transfer.entries:
                self._drive(entry)
            if transfer.call is not None:
                self._list.append((CALL, transfer.call))

    def _drive(self, entry: CopyEntry) -> None:
        self._list.append((DRIVER, entry))


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument of the generated function, by name."""

    name: str


def ordered(schedule: Schedule) -> list[Step]:
    """The steps in order of issue: the first transfers go before a first matmul that does not need them."""
    steps = list(schedule.steps)
    if steps and steps[0].id == "matmul.own" and len(schedule.matmuls) > 1:
        own = steps.pop(0)
        first = next(i for i, step in enumerate(steps) if not isinstance(step, Send | Recv))
        steps.insert(first, own)
    return steps


def _last_by_lane(
    names: Sequence[str], transfers: dict[str, Transfer | None], places: dict[str, tuple[int, int]]
) -> list[str]:
    """The last of the named transfers on each lane."""
    last: dict[int, str] = {}
    for name in names:
        if transfers.get(name) is not None and name in places:
            lane, place = places[name]
            if lane not in last or places[last[lane]][1] < place:
                last[lane] = name
    return list(last.values())


def _lasts(schedule: Schedule, transfers: dict[str, Transfer | None]) -> set[str]:
    """The transfers that need an event, because a local step waits for them."""
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


def _awaited(schedule: Schedule, transfers: dict[str, Transfer | None]) -> set[str]:
    """The steps that a transfer waits for."""
    found: set[str] = set()
    for step in schedule.steps:
        transfer = transfers.get(step.id)
        if transfer is not None:
            found.update(step.after, transfer.after)
    return found
