"""Plans of the watch: steps decided before they run, with an occasional probe of the default."""

from __future__ import annotations

import random
from dataclasses import dataclass

from weft.policy import Policy

LEAST_BLOCK, WITHOUT_PROBES = 8, 64  # steps planned at a time: fewest with a probe, and without probes


@dataclass(frozen=True)
class Planned:
    """A decided step: its policy, its arm (1: the policy), the probability of arm 1, and its purpose."""

    policy: Policy
    arm: int
    share: float
    purpose: str


def probed_block(policy: Policy, default: Policy, probes: float, order: random.Random) -> list[Planned]:
    """Steps under the policy with one probe of the default, at a random position in the second half, so that
    two probes are never far apart. `probes`: the share of probes; 0 for none."""
    if probes <= 0:
        return [Planned(policy, 1, 1.0, "watch")] * WITHOUT_PROBES
    size = max(LEAST_BLOCK, round(1 / probes))
    steps = [Planned(policy, 1, 1.0, "watch")] * size
    at = order.randrange(size // 2, size)
    for index in range(size // 2, at):
        steps[index] = Planned(policy, 1, 1 - 1 / (size - index), "watch")
    steps[at] = Planned(default, 0, 1 - 1 / (size - at), "probe")
    return steps
