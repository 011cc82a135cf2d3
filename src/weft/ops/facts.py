"""What ranks say about a call before they make it, and whether it fits together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import UsageError

LEFT_OPEN = "left open"
"""A fact about which a call says nothing."""

RankFacts = Mapping[str, Any]


class DisagreementError(UsageError):
    """Ranks of one group are about to do different things."""


@dataclass(slots=True)
class TeamAgreement:
    """What all ranks said about one kind of call, and what they made together for it."""

    everyone: list[RankFacts]
    kind: str = ""
    memory: Any = None
    """Symmetric memory, where there is any."""
    joined: bool = False
    """Whether the ranks have tried to make what they share."""

    def leaves_open(self, operation: str) -> bool:
        """Whether it is about calls of this operation that name no schedule."""
        facts = self.everyone[0]
        return bool(facts["operation"] == operation and facts["schedule"] == LEFT_OPEN)


def compare_facts(everyone: list[RankFacts | None]) -> None:
    """Raise unless all that is said fits together. A fact `problem` is a rank that cannot go on at all."""
    said = [(rank, facts) for rank, facts in enumerate(everyone) if facts is not None]
    for rank, facts in said:
        if "problem" in facts:
            raise DisagreementError(f"rank {rank} cannot continue: {facts['problem']}")
    first_rank, first = said[0]
    for rank, facts in said[1:]:
        for name in [*first, *facts]:
            if name.startswith("own "):
                continue
            here, there = first.get(name), facts.get(name)
            if here != there:
                raise DisagreementError(
                    f"{first['operation']}: ranks disagree on {name}: rank {first_rank} has "
                    f"{_said(here)}, rank {rank} has {_said(there)}; all ranks must make the same call"
                )
    _compare_blocks(said)


def _compare_blocks(said: list[tuple[int, RankFacts]]) -> None:
    """All-to-all: what one rank sends is what the other expects."""
    for rank, facts in said:
        for peer, other in said:
            sent, expected = facts.get("own sent"), other.get("own received")
            if sent is not None and expected is not None and sent[peer] != expected[rank]:
                raise DisagreementError(
                    f"{facts['operation']}: rank {rank} sends {sent[peer]} rows to rank {peer}, which "
                    f"expects {expected[rank]}; input_splits and output_splits must fit"
                )


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)
