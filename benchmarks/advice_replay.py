# ruff: noqa: E501
"""Does the advice of `weft analyze` come true? Records jobs on a GPU, applies changes, and judges the advice later.

    python benchmarks/advice_replay.py record OUT --deadline 240      # on the GPU: needs torch, not msgspec
    python benchmarks/advice_replay.py judge OUT                      # anywhere: needs weft's dependencies

`record` runs each job of benchmarks/live/configs.py (two ranks, one a ghost) several times in turn: once under
torch.profiler, then without it as it is and with every change that advice could name. `judge` analyzes each trace and
holds the range of each item that has a command against what that change saved between processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks/live"), str(ROOT / "examples")]

STEPS = 14
WARM = 5
BASE_CTAS = 12
RUN_S = 40
# By the control that advice names: environment, and arguments of `weft run`.
CHANGES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "base": ({}, ()),
    "min_ctas": ({"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "16"}, ()),
    "max_ctas": ({"NCCL_MAX_CTAS": "6"}, ()),
    "priority": ({}, ("--priority", "high")),
    "head_start": ({}, ("--priority", "high", "--head-start", "5")),
    "residency": ({}, ("--priority", "high", "--residency", "2", "--when", "overlap")),
    "base again": ({}, ()),
}
JOBS = (
    "ddp-2048", "triton-ddp-1024", "fsdp2-3072", "tp", "triton-fsdp2-1536", "inference-tp", "ddp-4096", "ddp-1536",
)  # fmt: skip


def profiled(step: Any, args: argparse.Namespace) -> None:
    """Stands in for the examples' loop: some steps to warm up, then three under the profiler."""
    import torch

    for number in range(WARM):
        step(number)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step(WARM + number)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(os.environ["WEFT_REPLAY_TRACE"])


def child(rest: list[str]) -> None:
    """Runs an example in this process; under the profiler where a trace is wanted."""
    import runpy

    import common

    if os.environ.get("WEFT_REPLAY_TRACE"):
        common.loop = profiled
    sys.argv = rest
    runpy.run_path(rest[0], run_name="__main__")


def run(job: Any, out: Path, change: str, trace: Path | None, limit_s: float) -> list[float] | None:
    """Milliseconds of each step of one run, or None where it failed or took too long."""
    env, flags = CHANGES[change]
    times = out / f"{job.name}.{change.replace(' ', '-')}.times"
    ghost = [sys.executable, "-m", "weft.comm.ghost", "--ranks", "2", str(Path(__file__)), "child"]
    command = [*ghost, *job.arguments(STEPS), "--times", str(times)]
    if flags:
        command = [sys.executable, "-m", "weft", "run", *flags, "--", *command]
    path = os.pathsep.join(sys.path[:3])
    full = {**os.environ, "PYTHONPATH": path, "NCCL_MAX_CTAS": str(BASE_CTAS), **env}
    if trace:
        full["WEFT_REPLAY_TRACE"] = str(trace)
    try:
        done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(f"{job.name} {change}: {done.stderr[-300:]}", file=sys.stderr)
        return None
    return [float(line) for line in times.read_text().split()] if times.exists() else []


def record(out: Path, deadline_s: float, names: list[str]) -> None:
    """Fills a folder with a trace and step times per job and change; stops in time."""
    import configs

    known = configs.CONFIGS
    until = time.monotonic() + deadline_s
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in names:
        job, found = known[name], {}
        for change in ("trace", *CHANGES):
            left = until - time.monotonic()
            if left < 5:
                break
            trace = out / f"{name}.rank0.json" if change == "trace" else None
            found[change] = run(job, out, "base" if trace else change, trace, min(RUN_S, left))
        results[name] = found
        (out / "times.json").write_text(json.dumps(results))
        print(
            name, {k: v and round(statistics.median(v[WARM:]), 2) for k, v in found.items() if v}, flush=True
        )


def judge(out: Path) -> None:
    """A row for each item of advice that has a command, and for each job without one."""
    import weft

    right = total = 0
    for name, found in json.loads((out / "times.json").read_text()).items():
        trace = out / f"{name}.rank0.json"
        base = [statistics.median(found[key][WARM:]) for key in ("base", "base again") if found.get(key)]
        if not trace.exists() or not base:
            print(f"{name}: not recorded")
            continue
        advice = [item for item in weft.analyze(trace).advice if item.control in CHANGES]
        was = statistics.mean(base)
        for item in advice:
            if not found.get(item.control):
                print(f"{name}: {item.control} was not measured")
                continue
            saved = 100 * (1 - statistics.median(found[item.control][WARM:]) / was)
            low, high = item.step_pct
            total, right = total + 1, right + (low <= saved <= high)
            print(
                f"{name}: {item.control} stated {low:.1f} to {high:.1f}%, saved {saved:.1f}% of {was:.2f} ms"
            )
        if not advice:
            saved = {
                k: round(100 * (1 - statistics.median(v[WARM:]) / was), 1)
                for k, v in found.items()
                if v and k != "trace"
            }
            print(f"{name}: nothing advised; saved in percent: {saved}")
    print(f"{right} of {total} inside the stated range")


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("record", "judge"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline", type=float, default=240)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS))
    args = parser.parse_args()
    if args.do == "record":
        record(args.out, args.deadline, args.jobs)
    else:
        judge(args.out)


if __name__ == "__main__":
    main()
