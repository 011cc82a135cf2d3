"""What is the best policy for one training job? Every policy of a grid, interleaved, in one process.

    weft run -- python benchmarks/live/search.py CONFIG --out FILE [--also POLICY.json …] [--limit SECONDS]

Each round measures every policy of the grid once, in a new random order. The best four, the default and
those of `--also` are then measured again, out of sample. It also says how much of the step is communication,
what the step takes without any (the most that could be gained), and which kernels overlap with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import BASELINE_CTAS, CONFIGS, EXAMPLES, RANKS, Config
from job import take_gate

from weft.errors import InputError
from weft.kernels import glob_regex, is_comm
from weft.measure.intervals import bootstrap_ci, ratio_ci
from weft.policy import Policy
from weft.rules import MAX_PATTERN_BYTES, Rule
from weft.shim import binding, stats
from weft.timeline import Kind, intersect, union
from weft.tuning.live.options import MEMORY_KERNELS

CTAS = (BASELINE_CTAS, 6, 16, 24, 32)
SAMPLE_MS = 40.0  # a sample is as many steps as fill this
WARM_STEPS, CONFIRMED, CONFIRM_ROUNDS = 10, 4, 15
NAME = 120  # characters of a kernel's name that are kept
SHAPED_SHARE = 0.1  # of the compute time that overlaps with communication: less is not worth shaping


class Job:
    """The job under measurement: its step, and the controls on it."""

    def __init__(self, step: Callable[[int], Any]) -> None:
        self._step, self._number = step, 0
        self._lanes: dict[tuple[int, str, int], Any] = {}

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step(self._number)
            self._number += 1

    def ms(self, policy: Policy, count: int) -> float:
        """Milliseconds of a step under a policy."""
        self.apply(policy)
        return self.ms_as_is(count)

    def ms_as_is(self, count: int) -> float:
        """Milliseconds of a step; one more step before is not counted."""
        self.steps(1)
        start = _now()
        self.steps(count)
        return _ms_between(start, _now()) / count

    def apply(self, policy: Policy) -> None:
        """From the next launch on: CTAs by communicators of our own, the rest by the shim."""
        for group in _groups():
            for device in group._lanes:
                group._lanes[device] = self._lane(group, device, policy.max_ctas or BASELINE_CTAS)
        binding.set_policy(dataclasses.replace(policy, max_ctas=None))

    def silence(self) -> None:
        """From now on collectives do nothing. The job computes nonsense, in the time that compute takes."""
        for group in _groups():
            for lane in group._lanes.values():
                lane.ranks = _Silent()

    def _lane(self, group: Any, device: Any, ctas: int) -> Any:
        from weft.comm.ghost_lane import Lane

        own = self._lanes.setdefault((id(group), str(device), BASELINE_CTAS), group._lanes[device])
        key = (id(group), str(device), ctas)
        if key not in self._lanes:
            options = dataclasses.replace(group._options, max_ctas=ctas)
            ranks = group._make_lane(device, group.size(), group.rank(), options).ranks
            lane = Lane(ranks, own.streams, device)
            lane._scratch = own._scratch
            self._lanes[key] = lane
        return self._lanes[key]


class _Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _groups() -> list[Any]:
    import torch.distributed as dist

    from weft.comm.ghost import GhostGroup

    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, GhostGroup)]


def _now() -> Any:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return 1e3 * (end - start)
    end.synchronize()
    return float(start.elapsed_time(end))


def _software() -> tuple[str, str]:
    import torch

    if not torch.cuda.is_available():
        return "", "cpu"
    from weft.comm import nccl

    return nccl.load_nccl().version_text, f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def look(job: Job) -> dict[str, Any]:
    """Three steps through the profiler: the share of communication, and the kernels that overlap with it."""
    import torch

    from weft.execute import spans

    count = 3

    def once() -> None:
        job.steps(count)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    timeline = spans.record_timeline(once) if torch.cuda.is_available() else None
    if timeline is None or not len(timeline):
        return {"share_pct": None, "kernels": []}
    figures, comm = timeline.figures(), timeline.covered(Kind.COMM)
    per_step = 1e-6 / count
    kernels = []
    for index, name in enumerate(timeline.names):
        mine = timeline.name == index
        if timeline.kind[mine][0] != Kind.COMPUTE:
            continue
        spent = union(timeline.start_ns[mine], timeline.end_ns[mine])
        shared = intersect(spent, comm).total_ns
        row = {"name": name[:NAME], "ms": spent.total_ns * per_step, "beside_ms": shared * per_step}
        kernels.append(row)
    kernels.sort(key=lambda kernel: -kernel["beside_ms"])
    return {
        "share_pct": 100 * figures.comm_ns / figures.span_ns,
        "comm_ms": figures.comm_ns * per_step,
        "exposed_ms": figures.exposed_ns * per_step,
        "compute_ms": figures.compute_ns * per_step,
        "idle_ms": figures.idle_ns * per_step,
        "kernels": kernels[:12],
    }


def residents() -> dict[str, tuple[str, int]]:
    """By the name a person reads: the driver's name of each compute kernel, and its blocks per SM."""
    path = binding.attach()
    if path is None:
        raise InputError("this needs the shim: start it with `weft run -- python …`")
    process, found = binding.read_process(path), {}
    for row, _ in process.rows():
        symbol = row.name.decode(errors="replace")
        if not is_comm(symbol):
            name = stats.demangle(symbol)[:NAME]
            found[name] = (symbol, max(row.natural_blocks, found.get(name, ("", 0))[1]))
    return found


def residencies(seen: dict[str, Any], known: dict[str, tuple[str, int]]) -> list[dict[str, Any]]:
    """Fields of a Policy that shape the kernels which take most of the time that overlaps with communication.

    Those that wait for memory are left out: fewer blocks are pure loss for them (docs/lab.md).
    """
    waits = glob_regex(MEMORY_KERNELS)
    total = sum(kernel["beside_ms"] for kernel in seen["kernels"]) or 1.0
    shapable = [
        known[kernel["name"]]
        for kernel in seen["kernels"]
        if known.get(kernel["name"], ("", 0))[1] > 1
        and kernel["beside_ms"] / total >= SHAPED_SHARE
        and waits.fullmatch(known[kernel["name"]][0]) is None
    ]
    choices: list[dict[str, Any]] = [{}]
    for symbol, natural in shapable[:2]:
        pattern = symbol if len(symbol) <= MAX_PATTERN_BYTES else symbol[: MAX_PATTERN_BYTES - 1] + "*"
        for count in sorted({natural - 1, math.ceil(natural / 2)}):
            rules = (Rule(pattern, count),)
            choices.append({"rules": rules, "when": "overlap"})
    return choices


def grid(shapes: list[dict[str, Any]]) -> list[Policy]:
    """Every policy, the default first. Shaped kernels have a head start and priority together, or neither."""
    policies = []
    for shape, ctas in itertools.product(shapes, CTAS):
        for head, priority in itertools.product((0.0, 5.0), ("default", "high")):
            if not shape or (head > 0) == (priority == "high"):
                limit = None if ctas == BASELINE_CTAS else ctas
                policies.append(Policy(max_ctas=limit, head_start_us=head, priority=priority, **shape))
    return policies


class Search:
    """Measures the grid and writes what it knows after every round."""

    def __init__(self, config: Config, out: Path, also: list[Path], limit_s: float) -> None:
        self.out, self.limit_s, self.start = out, limit_s, time.monotonic()
        self.also = [Policy.load(path) for path in also if path.exists()]
        self.document: dict[str, Any] = {"config": config.name, "about": config.about}

    def __call__(self, step: Callable[[int], Any], args: Any) -> None:
        """Takes the place of the examples' loop."""
        job, default = Job(step), Policy()
        job.steps(WARM_STEPS)
        self.start = time.monotonic()
        rough = statistics.median(job.ms(default, 2) for _ in range(3))
        self.count = max(2, math.ceil(SAMPLE_MS / rough))
        seen = look(job)
        known = residents()
        for kernel in seen["kernels"]:
            kernel["blocks_per_sm"] = known.get(kernel["name"], ("", None))[1] or None
        policies = list(dict.fromkeys([*grid(residencies(seen, known)), *self.also]))
        self.document |= {"step_ms": rough, "steps_per_sample": self.count, "communication": seen}
        self.document["nccl"], self.document["device"] = _software()
        self.save()
        for ctas in {policy.max_ctas for policy in policies}:
            job.ms(Policy(max_ctas=ctas), 1)  # new communicators connect at their first collective
        samples = self.rounds(job, policies, self.limit_s * 0.6, least=3, most=12)
        self.document["grid"] = [self.row(policy, samples[policy], samples[default]) for policy in policies]
        self.save()
        best = sorted(policies, key=lambda policy: statistics.median(samples[policy]))[:CONFIRMED]
        chosen = list(dict.fromkeys([default, *best, *self.also]))
        again = self.rounds(job, chosen, self.limit_s, least=5, most=CONFIRM_ROUNDS)
        rows = [self.row(policy, again[policy], again[default]) for policy in chosen]
        self.document["confirmed"] = rows
        self.document["best"] = min(rows, key=lambda row: row["ms"])
        self.document["also"] = [next(row for row in rows if row["policy"] == p.to_dict()) for p in self.also]
        job.apply(default)
        job.silence()
        alone = [job.ms_as_is(self.count) for _ in range(3)]
        self.document["without_communication_ms"] = statistics.median(alone)
        self.save()

    def rounds(
        self, job: Job, policies: list[Policy], until_s: float, least: int, most: int
    ) -> dict[Policy, list[float]]:
        samples: dict[Policy, list[float]] = {policy: [] for policy in policies}
        order = random.Random(len(policies))
        for number in range(most):
            late = time.monotonic() - self.start > until_s * (1 if number >= least else 2)
            if number and late:
                break
            for policy in order.sample(policies, len(policies)):
                samples[policy].append(job.ms(policy, self.count))
        return samples

    def row(self, policy: Policy, samples: list[float], default: list[float]) -> dict[str, Any]:
        ratio, low, high = ratio_ci(samples, default)
        return {
            "label": policy.label,
            "policy": policy.to_dict(),
            "ms": statistics.median(samples),
            "ci_ms": bootstrap_ci(samples),
            "to_default": [ratio, low, high],
            "samples": len(samples),
        }

    def save(self) -> None:
        self.document["seconds"] = round(time.monotonic() - self.start, 1)
        self.out.write_text(json.dumps(self.document, indent=1) + "\n")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("config", choices=CONFIGS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--also", type=Path, action="append", default=[], help="policies to measure too")
    parser.add_argument("--limit", type=float, default=25.0, help="seconds for all measurements")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(take_gate(sys.argv[1:]))
    from weft.comm import ghost

    config = CONFIGS[args.config].tiny() if args.tiny else CONFIGS[args.config]
    ghost.impersonate(RANKS)
    sys.path.insert(0, str(EXAMPLES))
    import common

    common.loop = Search(config, args.out, args.also, args.limit)
    sys.argv = config.arguments(steps=1)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
