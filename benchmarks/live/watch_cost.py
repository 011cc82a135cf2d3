"""What does the watch of live tuning cost a step, on the rank that decides?

    python benchmarks/live/watch_cost.py [--steps 4000] [--out FILE]

The session, conductor and watch of a one-process job run on a simulated clock, so only their own time is
measured, in a loop that keeps them in the caches. `hook_us` is what the whole optimizer
hook takes per step in a job of two gloo ranks that was left alone, with the program's own work in between.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from document import show

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit")]

from test_live_watch import DEFAULT, POLICY, kept, left_alone  # noqa: E402

from weft.policy import Policy  # noqa: E402
from weft.ranks import Agreement  # noqa: E402
from weft.tuning.live.conductor import conduct  # noqa: E402
from weft.tuning.live.session import Session  # noqa: E402
from weft.tuning.live.trial import Trial  # noqa: E402
from weft.tuning.live.tuned_job import TunedJob  # noqa: E402
from weft.tuning.live.watch import watch  # noqa: E402

STEPS_MS = (1.0, 10.0, 30.0, 100.0)
GLOO_STEPS, GLOO_COUNTED = 12_000, 2000
GLOO_JOB = f"""
import json, os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as hooks
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(20, 1))
optimizer, data, spent = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(32, 20), []
def timed(*arguments, hook):
    start = time.perf_counter()
    hook(*arguments)
    spent.append(time.perf_counter() - start)
for number in range({GLOO_STEPS}):
    if number == {GLOO_STEPS - GLOO_COUNTED}:
        known = hooks._global_optimizer_post_hooks
        for key, hook in list(known.items()):
            known[key] = lambda *arguments, hook=hook: timed(*arguments, hook=hook)
        began = time.perf_counter()
    model(data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    step_us = 1e6 * (time.perf_counter() - began) / {GLOO_COUNTED}
    hook_us = [1e6 * seconds for seconds in spent]
    mean, middle = sum(hook_us) / {GLOO_COUNTED}, sorted(hook_us)[len(hook_us) // 2]
    print("FOUND", json.dumps({{"step_us": step_us, "hook_us": mean, "hook_us_median": middle}}), flush=True)
dist.barrier()
os._exit(0)
"""


class Controls:
    """Controls that change nothing, on a simulated clock."""

    def __init__(self) -> None:
        self.default, self.now, self.ms = DEFAULT, DEFAULT, 0.0

    def preparable(self) -> list[tuple[str, int]]:
        return []

    def apply(self, policy: Policy) -> None:
        self.now = policy

    def mark(self) -> float:
        return self.ms

    def copied_bytes(self) -> int:
        return 0

    def between_ms(self, start: float, end: float) -> float:
        return end - start

    def clock(self) -> dict[str, int]:
        return {}

    def synchronize(self) -> None: ...
    def release(self) -> None: ...
    def harmless(self) -> None: ...


def scaled(outcome: TunedJob, step_ms: float) -> TunedJob:
    """An outcome of 100 ms steps, converted to another step time."""
    by = step_ms / 100
    tried = tuple(
        replace(one, ms=[by * ms for ms in one.ms], proof_ms=[by * ms for ms in one.proof_ms])
        for one in outcome.tried
    )
    return replace(outcome, default_ms=step_ms, best_ms=0.92 * step_ms, tried=tried)


def watched_us(outcome: TunedJob, step_ms: float, steps: int) -> float:
    """Microseconds per step in the session of a job that was tuned."""

    def found() -> Any:
        yield Trial(DEFAULT)
        return outcome

    controls, noise = Controls(), random.Random(1)
    conductor = conduct(found(), DEFAULT, lambda told, ahead, each: watch(told, ahead=ahead, each=each))
    session = Session(controls, Agreement(None, 0, [0], 5.0), conductor, lambda result: None)  # type: ignore[arg-type]
    session.begin()
    spent = 0.0
    for _ in range(steps):
        policy_ms = step_ms * (0.92 if controls.now == POLICY else 1.0)
        controls.ms += policy_ms * math.exp(noise.gauss(0, 0.01))
        start = time.perf_counter()
        session.step()
        spent += time.perf_counter() - start
    return 1e6 * spent / steps


def in_a_job() -> dict[str, float]:
    """The optimizer hook of a real job that is left alone, on rank 0."""
    with tempfile.TemporaryDirectory() as name:
        program = Path(name, "job.py")
        program.write_text(GLOO_JOB)
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'jobs'}",
            "WEFT_TUNE_CONTROLS": "live_job:FakeControls",
            "REAL": "1",
            "WEFT_STORE": str(Path(name, "store.sqlite")),
            "OMP_NUM_THREADS": "1",
        }
        ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
        command = [sys.executable, "-m", "weft", "run", "--tune", "--", *ranks]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, float] = json.loads(line.removeprefix("FOUND "))
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    outcomes = {"a policy is in force": kept(), "left alone": left_alone()}
    document = {
        "command": f"python benchmarks/live/watch_cost.py --steps {args.steps}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "us_per_step": {
            name: {f"{ms:g} ms": round(watched_us(scaled(outcome, ms), ms, args.steps), 2) for ms in STEPS_MS}
            for name, outcome in outcomes.items()
        },
        "left alone, two gloo ranks": in_a_job(),
    }
    show(document, args.out)


if __name__ == "__main__":
    main()
