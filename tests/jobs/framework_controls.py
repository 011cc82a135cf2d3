"""Controls for live tuning without a GPU that change real DDP and FSDP2 models, on a simulated clock.

WEFT_TUNE_CONTROLS=framework_controls:FrameworkControls. EFFECTS: factors on the step time by part of a
policy's label. FAIL: label@rank, a policy that fails on that rank. COPIES: offers FSDP2 gathers by copy
engines, with gloo and plain memory in their place; "refused": opening the window fails. Each rank writes
$RECORD/rankN.json.
"""

from __future__ import annotations

import json
import math
import os
import random
from typing import Any

from examples_controls import STEP_S, VirtualControls

from weft.errors import UnavailableError
from weft.policy import Policy
from weft.tuning.live import copy_engines
from weft.tuning.live.frameworks import Frameworks
from weft.tuning.live.fsdp_communicator import name_of_our_own
from weft.tuning.live.options import Facts


def open_window(group: Any, ranks: Any, size: int, problem: str = "") -> copy_engines.Window:
    """Stands in for the real open_window on a CPU: a separate group, and memory that FSDP2 uses in turn."""
    import torch
    import torch.distributed as dist

    if os.environ["COPIES"] == "refused":
        raise UnavailableError("no window here")
    with name_of_our_own():
        made = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="weft_copies")
    arena = torch.full((size,), 255, dtype=torch.uint8)
    return copy_engines.Window(made, arena, lambda: dist.destroy_process_group(made))


class FrameworkControls(VirtualControls):
    def __init__(self, default: Policy, world: int) -> None:
        super().__init__(default, world)
        if os.environ.get("COPIES"):
            copy_engines.open_window, copy_engines._why_not = open_window, lambda group: ""
        self.frameworks = Frameworks(default)
        self.effects = json.loads(os.environ.get("EFFECTS", "{}"))
        self.fails = os.environ.get("FAIL", "")

    def _stepped(self, *_: Any) -> None:
        self.policies.append(self.policy.to_dict())
        parts = self.policy.label.split("+")
        scatter = random.Random(len(self.policies)).gauss(0, 0.005)
        self.seconds += STEP_S * math.prod(self.effects.get(part, 1.0) for part in parts) * math.exp(scatter)

    def learn(self) -> None:
        self.frameworks.learn()

    def facts(self, steps: int) -> Facts:
        return Facts(
            launches=False,
            collectives=4,
            framework=self.frameworks.choices(),
            world=self.world,
            workload="frameworks",
        )

    def prepare(self, policy: Policy, keys: object) -> None:
        self.frameworks.prepare(policy)

    def apply(self, policy: Policy) -> None:
        label, _, rank = self.fails.partition("@")
        if label and label in policy.label.split("+") and os.environ["RANK"] == rank:
            raise RuntimeError(f"{label} is refused here")
        self.frameworks.apply(policy)
        self.policy = policy

    def harmless(self) -> None:
        pass

    def release(self) -> None:
        self.frameworks.release()
