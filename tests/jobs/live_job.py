"""A small DDP job over gloo: the policy in force sets its step time, and it records the policy of each step.

The controls stand in for the shim and NCCL. The test's environment says what a policy does:
EFFECTS     {"ctas16": 0.5, …}: factors on the step time by part of a policy's label; over 100: it stalls
DRIFT_AT    step from which DRIFT (same form) replaces EFFECTS
UNEVEN      step times scatter a lot
LENGTHS     inputs of 0.7 to 1.3 times the usual length; the longest input of all ranks sets the step time
REAL        steps take their real (wall-clock) time; policies change nothing
STEPS       number of steps; OPTIMIZERS: sgd,adam or none; NO_GROUP: without torch.distributed
AGAIN       step at which the process group is destroyed and created again
DIE         step@rank that exits, at the first start; PAUSE: step@rank that takes 3 s
REFUSE      ctas@rank that cannot be prepared; RECORD: the folder for each rank's record
HOLD        {"100": "seen"}: at this step, wait for this file in RECORD; "start": before the group is made
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import threading
import time
from pathlib import Path

from weft.policy import Policy
from weft.tuning.live.options import Facts, Kernel

EFFECTS: dict[str, float] = {}
now = Policy()
seconds = 0.0
released = False
step_number = copied = 0


def settings() -> None:
    """Read EFFECTS from the environment."""
    global EFFECTS
    EFFECTS = json.loads(os.environ.get("EFFECTS", "{}"))


class FakeControls:
    def __init__(self, default: Policy, world: int) -> None:
        self.default, self.world = default, world

    def learn(self) -> None:
        pass

    def facts(self, steps: int) -> Facts:
        kernels = (Kernel("gemm", "gemm", 10, 8, 4), Kernel("nvjet", "nvjet", 10, 8, 1))
        choices = (
            tuple(map(int, os.environ.get("CTAS", "6,16,24").split(",")))
            if os.environ.get("CTAS", "6,16,24")
            else ()
        )
        return Facts(
            collectives=4,
            ctas=12,
            cta_choices=choices,
            kernels=kernels,
            world=self.world,
            workload="gloo job",
        )

    def preparable(self) -> list[tuple[str, int]]:
        return []

    def prepare(self, policy: Policy, keys: object) -> None:
        if os.environ.get("REFUSE") == f"{policy.max_ctas}@{os.environ['RANK']}":
            raise RuntimeError(f"{policy.max_ctas} CTAs are refused here")

    def apply(self, policy: Policy) -> None:
        global now
        now = policy

    def harmless(self) -> None:
        global now
        now = Policy()

    def release(self) -> None:
        global released
        released = True

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter() if "REAL" in os.environ else seconds

    def copied_bytes(self) -> int:
        return copied

    def between_ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)

    def clock(self) -> dict[str, int]:
        return {"steps": step_number}


def hooked(function: object) -> bool:
    """Whether a function of torch.distributed is still weft's wrapper."""
    return Path(function.__code__.co_filename).match("weft/tuning/live/*.py")


def work() -> None:
    """The part of a step whose length depends on the policy, on the simulated clock."""
    global seconds, copied
    if "REAL" in os.environ:
        return
    factor = 1.0
    if "LENGTHS" in os.environ:
        r = random.Random(f"lengths {step_number}")
        lengths = [r.uniform(0.7, 1.3) for _ in range(int(os.environ["WORLD_SIZE"]))]
        copied += round(1e6 * lengths[int(os.environ["RANK"])])
        factor = max(lengths)
    drifted = step_number >= int(os.environ.get("DRIFT_AT", "1000000"))
    effects = json.loads(os.environ["DRIFT"]) if drifted else EFFECTS
    for part in now.label.split("+"):
        factor *= effects.get(part, 1.0)
    scatter = random.Random(step_number).gauss(0, 0.3 if "UNEVEN" in os.environ else 0.005)
    seconds += 0.03 * factor * math.exp(scatter)
    stalled = now
    while factor > 100 and now is stalled:  # until another policy is applied
        time.sleep(0.01)


def hold(when: str) -> None:
    """Wait for the file that HOLD names for this moment, if any."""
    name = json.loads(os.environ.get("HOLD", "{}")).get(when)
    while name is not None and not Path(os.environ["RECORD"], name).exists():
        time.sleep(0.01)


def main() -> list[object]:
    global step_number
    import torch
    import torch.distributed as dist
    from leaving import leave
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    hold("start")
    if os.environ.get("NO_GROUP") != "1":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
    else:
        rank = int(os.environ.get("RANK", "0"))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    parts = list(model.parameters())
    names = os.environ.get("OPTIMIZERS", "sgd").split(",") if os.environ.get("OPTIMIZERS", "sgd") else []
    optimizers = [kinds[name](parts[i :: len(names)], lr=1e-3) for i, name in enumerate(names)]
    torch.manual_seed(rank)
    losses, policies = [], []
    for step in range(int(os.environ.get("STEPS", "90"))):
        step_number = step
        hold(str(step))
        policies.append(now.label)
        if os.environ.get("DIE") == f"{step}@{rank}" and not int(
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ):
            os._exit(9)
        if os.environ.get("PAUSE") == f"{step}@{rank}":
            time.sleep(3)
        if os.environ.get("AGAIN") == str(step):
            plain = model.module
            del model
            world = dist.get_world_size()
            dist.destroy_process_group()
            # Not on the first group's port: a rank might reach the old store, which rank 0 is about to close.
            store = dist.FileStore(str(Path(os.environ["RECORD"], "again")), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            model = DistributedDataParallel(plain)
        x = torch.randn(16, 32)
        loss = model(x).pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        work()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    from torch.optim import optimizer as module

    hooks = len(module._global_optimizer_post_hooks)
    left = [f.__name__ for f in (dist.init_process_group, dist.destroy_process_group) if hooked(f)]
    Path(os.environ["RECORD"], f"rank{rank}.json").write_text(
        json.dumps(
            {
                "losses": losses,
                "policies": policies,
                "hooks": hooks,
                "left": left,
                "threads": [t.name for t in threading.enumerate() if "weft" in t.name],
                "released": released,
                "end": now.label,
            }
        )
    )
    leave()
    return [model, optimizers]


if __name__ == "__main__":
    # weft imports this file as `live_job` for its controls: make that this module, so they share the policy.
    sys.modules["live_job"] = sys.modules["__main__"]
    settings()
    main()
    from leaving import end

    end()
