"""Controls for live tuning without a GPU, on a simulated clock: the policy in force sets the step time.

WEFT_TUNE_CONTROLS=examples_controls:VirtualControls; each rank writes the policy of every step to $RECORD/rankN.json.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

from weft.policy import Policy
from weft.tuning.live.options import Facts, Kernel

STEP_S = 0.02
FASTER = {16: 0.8, 24: 0.9, 6: 1.2}  # by CTAs


class VirtualControls:
    def __init__(self, default: Policy, world: int) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.default, self.world, self.policy = default, world, default
        self.seconds, self.policies = 0.0, list[Any]()
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._record)

    def _stepped(self, *_: Any) -> None:
        self.policies.append(self.policy.to_dict())
        self.seconds += STEP_S * FASTER.get(self.policy.max_ctas or 0, 1.0)

    def _record(self) -> None:
        path = Path(os.environ["RECORD"], f"rank{os.environ['RANK']}.json")
        path.write_text(json.dumps({"policies": self.policies, "end": self.policy.to_dict()}))

    def learn(self) -> None:
        pass

    def facts(self, steps: int) -> Facts:
        kernels = (Kernel("nvjet", "nvjet", 10, 8, 1),)
        choices = (6, 16, 24)
        return Facts(
            collectives=4, ctas=12, cta_choices=choices, kernels=kernels, world=self.world, workload="job"
        )

    def preparable(self) -> list[tuple[str, int]]:
        return []

    def prepare(self, policy: Policy, keys: object) -> None:
        pass

    def apply(self, policy: Policy) -> None:
        self.policy = policy

    def harmless(self) -> None:
        self.policy = Policy()

    def release(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return self.seconds

    def copied_bytes(self) -> int:
        return 0

    def between_ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)

    def clock(self) -> dict[str, int]:
        return {"steps": len(self.policies)}
