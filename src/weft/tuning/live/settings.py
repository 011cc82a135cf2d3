"""Settings that `weft run --tune` passes to the job's processes through the environment."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from weft.policy import Policy

POLICY_VARIABLE = "WEFT_TUNE_POLICY"
CONTROLS_VARIABLE = "WEFT_TUNE_CONTROLS"
"""For tests: `module:function` that creates the controls from the default policy and the number of ranks."""
STALL_VARIABLE = "WEFT_TUNE_STALL_S"
DEADLINE_VARIABLE = "WEFT_TUNE_DEADLINE_S"
BUDGET_VARIABLE = "WEFT_TUNE_BUDGET"
MOST_DEADLINE_S = 20.0


def first_deadline_s(step_s: float) -> float:
    """Seconds for all ranks to find their step, which last took `step_s` here; some may never step."""
    from weft.tuning.live.session import DEADLINE

    return max(least_deadline_s(), min(DEADLINE * step_s, MOST_DEADLINE_S))


def least_deadline_s() -> float:
    """Least number of seconds that ranks wait for each other at a trial boundary."""
    from weft.tuning.live.session import LEAST_DEADLINE_S

    return float(os.environ.get(DEADLINE_VARIABLE, LEAST_DEADLINE_S))


def least_stall_s() -> float:
    """Least number of seconds after which a trial that has not ended counts as stalled."""
    from weft.tuning.live.session import LEAST_STALL_S

    return float(os.environ.get(STALL_VARIABLE, LEAST_STALL_S))


def watch_budget() -> float:
    """Share of the steps that the watch may use; 0 turns the watch off."""
    from weft.tuning.live.watch import SHARE

    return float(os.environ.get(BUDGET_VARIABLE) or SHARE)


def start_policy() -> Policy:
    """The policy that the job was started with."""
    given = os.environ.get(POLICY_VARIABLE)
    return Policy.from_dict(json.loads(given)) if given else Policy()


def controls_here(default: Policy, world: int, optimizer: Any) -> Any:
    """The controls for this process, or a string that says why there are none."""
    made_by = os.environ.get(CONTROLS_VARIABLE)
    if made_by:
        module, _, name = made_by.partition(":")
        return getattr(importlib.import_module(module), name)(default, world)
    import torch

    from weft.shim import binding
    from weft.tuning.live.controls import LaunchControls

    if not torch.cuda.is_initialized():
        return "the program uses no GPU"
    if not binding.injected():
        return "the launch shim is not in this process"
    groups = optimizer.param_groups if optimizer is not None else ()
    parameters = sum(p.numel() for group in groups for p in group["params"])
    return LaunchControls(default, world, parameters, models=optimizer is not None)
