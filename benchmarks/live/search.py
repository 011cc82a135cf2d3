"""What does each lever gain in a training job, what is the best combination, and is the tuner's as good?

    python benchmarks/live/search.py --out DIR [--only NAME …] [--tuned ROWS.jsonl] [--limit SECONDS] [--tiny]

For each job of configs.py, in one process under `weft run`, with the levers and controls of live tuning:

1. every change of every lever alone, against the default, in interleaved rounds;
2. combinations of changes that were faster than the default: the best of each lever, and its runner-up if
   close; only the most promising ones if there are more than COMBINATIONS;
3. the best of these, the default and the policies that `weft run --tune` ended with (`tuning.policy` in the
   rows of strangers.py), measured again, out of sample;
4. the step without communication; plus the SM-time of the collectives, it is the floor.

A sample is several consecutive steps, as in normal training. DIR/NAME.json has all samples, DIR/levers.md the
tables. About 45 seconds a job.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs import BASELINE_CTAS, CONFIGS, ROOT, Config

from weft.measure.intervals import bootstrap_ci, ratio_ci
from weft.policy import Policy
from weft.tuning.live.levers import LeverStage, search_stages
from weft.tuning.live.options import Facts

SAMPLE_MS = 250.0  # a sample has as many steps as fill this time
WARM_STEPS = 10
ROUNDS = {"levers": (3, 8), "combinations": (2, 4), "confirmed": (5, 12)}  # minimum and maximum
SHARES = {"levers": 0.45, "combinations": 0.75, "confirmed": 1.0}  # of the time, by the end of each part
COMBINATIONS, CONFIRMED = 16, 4
CLOSE = 0.004  # a change this close (log) to its lever's best is combined, too
SIX = 6
DEADLINE_S = 110.0
Samples = dict[Policy, list[float]]


class Search:
    """Measures a job, and writes its results after every part."""

    def __init__(self, config: Config, out: Path, tuned: Sequence[Policy], limit_s: float) -> None:
        self.out, self.limit_s, self.tuned = out, limit_s, tuned
        self.document: dict[str, Any] = {"config": config.name, "about": config.about}
        self.begin = time.monotonic()

    def __call__(self, step: Callable[[int], Any], _args: Any) -> None:
        """Replaces the example's step loop."""
        from running_job import Job, alone_ms, look, software

        job, default = Job(step), Policy()
        job.steps(WARM_STEPS)
        facts = job.profile()
        stages = search_stages(facts, default)
        self.begin = time.monotonic()
        self.count = max(3, math.ceil(SAMPLE_MS / statistics.median(job.ms(default, 2) for _ in range(3))))
        self.document |= {"steps_per_sample": self.count, "facts": about(facts)}
        self.document["nccl"], self.document["device"] = software()
        singles = {
            stage.lever: [dataclasses.replace(default, **change) for change in stage.changes]
            for stage in stages
        }
        alone = self.rounds(job, [default, *itertools.chain(*singles.values())], "levers")
        self.document["levers"] = [
            {"lever": lever, **self.row(policy, alone)}
            for lever, policies in singles.items()
            for policy in policies
            if policy in alone
        ]
        together = self.rounds(job, [default, *combinations(stages, alone)], "combinations")
        self.document["combinations"] = [self.row(policy, together) for policy in together]
        # Ratios are taken within a part: each has its own samples of the default.
        leads = {
            policy: mean_log(samples[policy], samples[default])
            for samples in (alone, together)
            for policy in samples
        }
        best = sorted(leads, key=lambda policy: leads[policy])[:CONFIRMED]
        again = self.rounds(job, [default, *best, *self.tuned], "confirmed")
        rows = {policy: self.row(policy, again) for policy in again}
        self.document["confirmed"] = list(rows.values())
        self.document["best"] = min(rows.values(), key=lambda row: row["ms"])
        self.document["tuned"] = [rows[policy] for policy in self.tuned if policy in rows]
        self.save()
        job.apply(default)
        self.document["profiled"] = look(job)
        self.document["without_communication_ms"] = alone_ms(job, self.count)
        self.save()

    def rounds(self, job: Any, policies: Sequence[Policy], part: str) -> Samples:
        """Run every policy once a round, in random order; a policy that cannot be applied is dropped."""
        samples: Samples = {policy: [] for policy in dict.fromkeys(policies)}
        order, (least, most) = random.Random(len(samples)), ROUNDS[part]
        for number in range(most):
            if number >= least and time.monotonic() - self.begin > SHARES[part] * self.limit_s:
                break
            for policy in order.sample(list(samples), len(samples)):
                try:
                    samples[policy].append(job.ms(policy, self.count))
                except Exception as error:
                    self.document.setdefault("problems", {})[policy.label] = (
                        f"{type(error).__name__}: {error}"
                    )
                    samples.pop(policy)
        self.save()
        return samples

    def row(self, policy: Policy, samples: Samples) -> dict[str, Any]:
        own, default = samples[policy], samples[Policy()]
        ratio, low, high = ratio_ci(own, default)
        return {
            "label": policy.label,
            "policy": policy.to_dict(),
            "ms": statistics.median(own),
            "ci_ms": bootstrap_ci(own),
            "to_default": [ratio, low, high],
            "samples_ms": [round(ms, 4) for ms in own],
        }

    def save(self) -> None:
        self.document["seconds"] = round(time.monotonic() - self.begin, 1)
        self.out.write_text(json.dumps(self.document, indent=1) + "\n")


def about(facts: Facts) -> dict[str, Any]:
    """The parts of a profile that the floor and the table need."""
    costs = dataclasses.asdict(facts.costs) if facts.costs else None
    return {"ctas": facts.ctas, "comm_ms": facts.comm_ms, "exposed_ms": facts.exposed_ms, "costs": costs}


def mean_log(own: Sequence[float], default: Sequence[float]) -> float:
    """Logarithm of the median of the samples over the default's."""
    return math.log(statistics.median(own) / statistics.median(default))


def combinations(stages: Sequence[LeverStage], samples: Samples) -> list[Policy]:
    """Policies with one change of each of two or more levers that helped, the most promising first."""
    default = Policy()
    helped: list[list[tuple[float, dict[str, Any]]]] = []
    for stage in stages:
        found = [
            (mean_log(samples[policy], samples[default]), change)
            for change in stage.changes
            if samples.get(policy := dataclasses.replace(default, **change))
        ]
        found = sorted((one for one in found if one[0] < 0), key=lambda one: one[0])
        if found:
            helped.append([one for one in found if one[0] <= found[0][0] + CLOSE][:2])
    chosen: dict[Policy, float] = {}
    for size in range(2, len(helped) + 1):
        for levers in itertools.combinations(helped, size):
            for changes in itertools.product(*levers):
                merged_change = {name: value for _, change in changes for name, value in change.items()}
                chosen[dataclasses.replace(default, **merged_change)] = sum(gain for gain, _ in changes)
    return sorted(chosen, key=lambda policy: chosen[policy])[:COMBINATIONS]


# --- the driver ---------------------------------------------------------------------------------------------


def tuned_policies(path: Path | None, config: str) -> list[Policy]:
    """The policies that `weft run --tune` ended with, from the rows of strangers.py."""
    if path is None:
        return []
    found = (json.loads(line) for line in path.read_text().splitlines())
    given = ((row.get("tuning") or {}).get("policy") for row in found if row["program"] == config)
    return list(dict.fromkeys(Policy.from_dict(policy) for policy in given if policy))


def start(config: str, args: argparse.Namespace) -> None:
    """Search one job in a separate process, which ends at its deadline."""
    command = [
        sys.executable,
        "-m",
        "weft",
        "run",
        "--quiet",
        "--",
        sys.executable,
        __file__,
        "--one",
        config,
    ]
    command += ["--out", str(args.out), "--limit", str(args.limit), *(["--tiny"] if args.tiny else [])]
    command += ["--tuned", str(args.tuned)] if args.tuned else []
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "WEFT_GHOST_CTAS": str(BASELINE_CTAS)}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        said = "" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-600:]}"
    except subprocess.TimeoutExpired:
        said = "killed at its deadline"
    print(f"{config}: {time.monotonic() - began:.0f} s {said}", flush=True)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """One job: the possible gain, the gain of each lever, the best policy and the tuner's."""
    default, best = found["confirmed"][0], found["best"]
    costs = found["facts"]["costs"] or {}
    alone, held = found.get("without_communication_ms"), costs.get("held_ms", 0.0)
    floor = None if alone is None else alone + held
    could = None if floor is None else 100 * max(0.0, 1 - floor / default["ms"])
    tuned = max(found["tuned"] or [default], key=lambda row: row["ms"])  # the worst, if there are several
    gain = 100 * (1 - tuned["to_default"][0])
    return {
        "config": found["config"],
        "about": found["about"],
        "default_ms": default["ms"],
        "alone_ms": alone,
        "held_ms": held,
        "floor_ms": floor,
        "could_win_pct": could,
        "best": best["label"],
        "best_pct": 100 * (1 - best["to_default"][0]),
        "tuned": tuned["label"],
        "tuned_pct": gain,
        "tuned_over_best": tuned["ms"] / best["ms"],
        "share_won": gain / could if could else None,
    }


def markdown(documents: Sequence[dict[str, Any]]) -> str:
    """The table of jobs, then the levers of each."""
    lines = [
        "| job | default, ms | floor, ms (without communication + SM-time) | could be won "
        "| best of the search | after `--tune` | over the best | of what could be won |",
        "|---|---|---|---|---|---|---|---|",
    ]
    jobs = [summary(found) for found in documents]
    for job in jobs:
        floor = (
            "unknown"
            if job["floor_ms"] is None
            else (f"{job['floor_ms']:.2f} ({job['alone_ms']:.2f} + {job['held_ms']:.2f})")
        )
        could = "" if job["could_win_pct"] is None else f"{job['could_win_pct']:.1f}%"
        share = "" if job["share_won"] is None else f"{100 * job['share_won']:.0f}%"
        lines.append(
            f"| {job['config']}: {job['about']} | {job['default_ms']:.2f} | {floor} | {could} "
            f"| {job['best']}: {job['best_pct']:.1f}% | {job['tuned']}: {job['tuned_pct']:.1f}% "
            f"| {job['tuned_over_best']:.3f} | {share} |"
        )
    shares = [job["share_won"] for job in jobs if job["share_won"] is not None]
    if jobs:
        mean = statistics.fmean(job["tuned_pct"] for job in jobs)
        most = statistics.fmean(job["best_pct"] for job in jobs)
        of = f"; of what could be won: {100 * statistics.fmean(shares):.0f}%" if shares else ""
        lines.append(
            f"\nMean gain after `--tune`: {mean:.2f}%, of the best: {most:.2f}%, {len(jobs)} jobs{of}"
        )
    for found in documents:
        lines += [
            f"\n**{found['config']}**: each lever alone, percent less time (95%)\n",
            "| lever | policy | gain |",
        ]
        lines.append("|---|---|---|")
        for row in sorted(found["levers"], key=lambda row: row["to_default"][0]):
            gain, low, high = (100 * (1 - row["to_default"][at]) for at in (0, 2, 1))
            lines.append(f"| {row['lever']} | {row['label']} | {gain:.1f} ({low:.1f} to {high:.1f}) |")
        lines += [f"- {label}: {problem}" for label, problem in found.get("problems", {}).items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of configurations, * and ? allowed; default: six")
    parser.add_argument("--tuned", type=Path, help="rows of strangers.py, with the tuner's policies")
    parser.add_argument("--limit", type=float, default=38.0, help="seconds for the measurements of a job")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no job starts")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does everything work?")
    parser.add_argument("--one", choices=CONFIGS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        from running_job import run

        config = CONFIGS[args.one].tiny() if args.tiny else CONFIGS[args.one]
        tuned = tuned_policies(args.tuned, config.name)
        run(config, Search(config, args.out / f"{config.name}.json", tuned, args.limit))
        return
    until = time.monotonic() + args.budget
    chosen = [name for name in CONFIGS if any(fnmatch.fnmatch(name, only) for only in args.only or ["*"])]
    for name in chosen if args.only else chosen[:SIX]:
        if time.monotonic() < until:
            start(name, args)
    found = [json.loads(path.read_text()) for name in CONFIGS if (path := args.out / f"{name}.json").exists()]
    found = [document for document in found if "best" in document]
    (args.out / "levers.md").write_text(markdown(found))
    print((args.out / "levers.md").read_text())


if __name__ == "__main__":
    main()
