"""Runs a schedule with torch.distributed's send and receive, one message per step: gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.ops.operands import FP8_DTYPES
from weft.ops.program import Instruction, Program, perform
from weft.ops.steps import Recv, Schedule, Send
from weft.ops.teams import Team


class MessageRunner:
    """Posts sends and receives as early as their data allows; a step waits only for the data it reads."""

    exchanges = True
    """Whether an error now may be due to a peer; false while this rank computes."""

    def __init__(self, schedule: Schedule, program: Program, team: Team) -> None:
        self.program, self._group, self._patience = program, team.group, team.patience
        steps = schedule.steps
        self._recvs = [
            (step.id, program.view(step.target), step.peer, step.round)
            for step in steps
            if isinstance(step, Recv)
        ]
        names = {step.id for step in steps if isinstance(step, Recv)}
        self._steps: list[tuple[tuple[str, ...], tuple[int, int, int] | None, list[Instruction]]] = []
        early = [step for step in steps if isinstance(step, Send) and step.source.buffer == "x"]
        late = [step for step in steps if step not in early and not isinstance(step, Recv)]
        for step in [*early, *late]:
            waits = tuple(name for name in step.after if name in names)
            if isinstance(step, Send):
                self._steps.append((waits, (program.view(step.source), step.peer, step.round), []))
            else:
                self._steps.append((waits, None, program.compute(step)))
        program.finish()

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        self.exchanges = True
        slots = self.program.bind(tensors)
        group, patience = self._group, self._patience
        arriving = {
            name: group.recv([as_message(slots[slot])], peer, tag) for name, slot, peer, tag in self._recvs
        }
        leaving: list[tuple[Any, torch.Tensor]] = []
        for waits, send, instructions in self._steps:
            for name in waits:
                work = arriving.pop(name, None)
                if work is not None:
                    work.wait(patience)
            if send is not None:
                slot, peer, tag = send
                data = as_message(slots[slot].contiguous())
                leaving.append((group.send([data], peer, tag), data))
            self.exchanges = False
            for instruction in instructions:
                perform(slots, instruction)
            self.exchanges = True
        for work, _ in leaving:
            work.wait(patience)


class LocalRunner:
    """Runs the matmuls of a group of one rank."""

    exchanges = False

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.program = program
        self._instructions = [made for step in schedule.steps for made in program.compute(step)]
        program.finish()

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        slots = self.program.bind(tensors)
        for instruction in self._instructions:
            perform(slots, instruction)


def as_message(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that gloo supports."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor
