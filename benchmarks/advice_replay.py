"""Does the advice of `weft analyze` come true? Records jobs on a GPU under every change; judges them later.

    python benchmarks/advice_replay.py record OUT --deadline 200    # on the GPU: torch, an NCCL for ghosts
    python benchmarks/advice_replay.py judge OUT [--out RESULTS]    # anywhere, with weft's dependencies

`record` runs jobs of benchmarks/live/configs.py (two ranks, one a ghost), each in its own process, with each
of two CTA counts as the job's own. It measures the job unchanged and with every change that advice could
name, interleaved, then profiles a few steps with torch.profiler. While one process uses the GPU, the next one
starts up. `judge` analyzes each trace, and compares the stated range of each advice item that has a command
with what that change saved. It names the recording, and says whether constants of the advice were fitted to
it; if so, its figures show how well the model fits, not how well it predicts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import runpy
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "live")]

from configs import BASELINE_CTAS, CONFIGS, EXAMPLES, RANKS  # noqa: E402

from weft.policy import Policy  # noqa: E402

JOBS = (
    "ddp-2048", "triton-ddp-1024", "fsdp2-3072", "tp",
    "ddp-1536", "triton-fsdp2-1536", "inference-tp", "ddp-4096",
)  # fmt: skip
BASES = (BASELINE_CTAS, 4)
RECORDING = "recording.json"
FITTED_TO = "2026-11-15"
"""The recording that constants of the advice were fitted to. It has no RECORDING: it is older."""
WARM_STEPS, TRACED_STEPS = 6, 3
SAMPLE_MS = 100.0
LEAST_ROUNDS, MOST_ROUNDS = 3, 10
MEASURE_S, PROCESS_S = 9.0, 45.0


def changes(base: int, *, residencies: tuple[int, ...]) -> list[Policy]:
    """The job as it is with this number of CTAs, and every change that advice could name."""
    own = Policy(max_ctas=base)
    return [
        own,
        *(replace(own, max_ctas=ctas) for ctas in (16, base // 2)),
        replace(own, priority="high"),
        replace(own, priority="high", head_start_us=5.0),
        *(replace(own, priority="high", residency=blocks, when="overlap") for blocks in residencies),
    ]


def key_of(policy: Policy) -> str:
    return json.dumps(policy.to_dict(), sort_keys=True)


class Replay:
    """Replaces the examples' step loop: measures all changes interleaved, then profiles each base."""

    def __init__(self, name: str, out: Path, limit_s: float) -> None:
        self.name, self.out, self.limit_s = name, out, limit_s

    def __call__(self, step: Any, _args: Any) -> None:
        from running_job import Job

        job = Job(step)
        job.steps(WARM_STEPS)
        residencies = (1, 2, 3) if "triton" in self.name else ()
        policies = list(dict.fromkeys(p for base in BASES for p in changes(base, residencies=residencies)))
        for policy in policies:
            job.ms(policy, 1)  # new communicators connect at their first collective
        count = max(1, round(SAMPLE_MS / job.ms(policies[0], 2)))
        samples: dict[str, list[float]] = {key_of(policy): [] for policy in policies}
        until, order = time.monotonic() + self.limit_s, random.Random(0)
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and time.monotonic() > until:
                break
            for policy in order.sample(policies, len(policies)):
                samples[key_of(policy)].append(job.ms(policy, count))
        self.save({"samples_ms": samples, "steps_per_sample": count})
        for base in BASES:
            job.apply(Policy(max_ctas=base))
            self.trace(job, self.out / f"{self.name}.{base}.rank0.json.gz")

    def save(self, document: dict[str, Any]) -> None:
        (self.out / f"{self.name}.json").write_text(json.dumps({"job": self.name, **document}) + "\n")

    @staticmethod
    def trace(job: Any, path: Path) -> None:
        """Profile some steps. Comes last, because the profiler slows every later launch."""
        import torch

        if not torch.cuda.is_available():
            return
        job.steps(2)
        torch.cuda.synchronize()
        calls, restore = logged_calls()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for number in range(TRACED_STEPS):
                with torch.profiler.record_function(f"ProfilerStep#{number}"):
                    job.steps(1)
            torch.cuda.synchronize()
        restore()
        profiler.export_chrome_trace(str(path))
        describe(path, calls)


class Logged:
    """NCCL ranks that note what each collective moves, as PyTorch's own group writes it in a trace."""

    NAMES: ClassVar = {
        "all_reduce": "allreduce",
        "all_gather": "_allgather_base",
        "reduce_scatter": "_reduce_scatter_base",
        "broadcast": "broadcast",
    }

    def __init__(self, ranks: Any, calls: list[dict[str, Any]]) -> None:
        self._ranks, self._calls = ranks, calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._ranks, name)
        if name not in (*self.NAMES, "all_to_all", "exchange"):
            return real

        def call(*given: Any, **more: Any) -> Any:
            note: dict[str, Any] = {}
            if name in self.NAMES:
                send, recv = given[0][0], given[1][0]
                dtype = {"torch.bfloat16": "BFloat16", "torch.float32": "Float"}.get(str(send.dtype), "")
                note = {
                    "Collective name": self.NAMES[name],
                    "In msg nelems": send.numel(),
                    "Out msg nelems": recv.numel(),
                    "Group size": RANKS,
                    "dtype": dtype,
                    "Process Group Name": "0",
                }
            self._calls.append(note)
            return real(*given, **more)

        return call


def logged_calls() -> tuple[list[dict[str, Any]], Any]:
    """Notes collectives from now on; returns the notes, and what ends it."""
    from running_job import groups

    calls: list[dict[str, Any]] = []
    held = [(lane, lane.ranks) for group in groups() for lane in group._lanes.values()]
    for lane, ranks in held:
        lane.ranks = Logged(ranks, calls)

    def restore() -> None:
        for lane, ranks in held:
            lane.ranks = ranks

    return calls, restore


def describe(path: Path, calls: list[dict[str, Any]]) -> None:
    """Adds to each NCCL kernel of a trace what its call moved: the ranks of a call launch one each."""
    with gzip.open(path) as file:
        document = json.load(file)
    kernels = [e for e in document["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
    kernels.sort(key=lambda event: event["args"]["correlation"])
    if len(kernels) != RANKS * len(calls):
        print(f"{path.name}: {len(kernels)} kernels for {len(calls)} calls, sizes are not known", flush=True)
        return
    for at, event in enumerate(kernels):
        event["args"].update(calls[at // RANKS])
    with gzip.open(path, "wt", compresslevel=1) as file:
        json.dump(document, file)


def child(arguments: list[str]) -> None:
    """Run one job in this process once its gate opens: --gate FILE NAME OUT LIMIT [--tiny]."""
    from job import take_gate

    name, out, limit_s, *tiny = take_gate(arguments)
    from weft.comm import ghost

    config = CONFIGS[name].tiny() if tiny else CONFIGS[name]
    ghost.impersonate(RANKS)
    sys.path.insert(0, str(EXAMPLES))
    import common

    common.loop = Replay(name, Path(out), float(limit_s))
    sys.argv = config.arguments(steps=1)
    runpy.run_path(sys.argv[0], run_name="__main__")


def record(out: Path, names: list[str], deadline_s: float, measure_s: float, more: list[str]) -> None:
    """Fill a folder with times and traces of each job. At the deadline it keeps what it has."""
    from compare import Process, environment

    out.mkdir(parents=True, exist_ok=True)
    name = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    (out / RECORDING).write_text(json.dumps({"name": name}) + "\n")
    until = time.monotonic() + deadline_s

    def start(name: str) -> Any:
        own = ["child", "--gate", str(out / f"{name}.gate"), name, str(out), str(measure_s), *more]
        command = [sys.executable, "-m", "weft", "run", "--", sys.executable, str(Path(__file__)), *own]
        return Process(name, command, environment(out / f"{name}.store"), out)

    waiting = start(names[0]) if names else None
    try:
        for number, name in enumerate(names):
            left = until - time.monotonic()
            if left < measure_s or waiting is None:
                print(f"out of time: {len(names) - number} jobs left", flush=True)
                break
            process, waiting = waiting, start(names[number + 1]) if number + 1 < len(names) else None
            code, seconds = process.run(min(PROCESS_S, left))
            said = "" if code == 0 else process_log(out, name)
            print(f"{name:20} {code} {seconds:5.1f} s {summary(out, name)} {said}", flush=True)
    finally:
        if waiting is not None:
            waiting.end()


def process_log(out: Path, name: str) -> str:
    return (out / f"{name}.log").read_text(errors="replace")[-400:]


def summary(out: Path, name: str) -> str:
    path = out / f"{name}.json"
    if not path.exists():
        return "nothing measured"
    samples = json.loads(path.read_text())["samples_ms"]
    return ", ".join(
        f"{Policy.from_dict(json.loads(key)).label} {statistics.median(values):.2f}"
        for key, values in samples.items()
    )


def advised_policy(command: str, base: int) -> Policy:
    """The policy that an advised command applies, for a job with this number of CTAs."""
    words = shlex.split(command.split(" -- ", maxsplit=1)[0])
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    flags = {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}
    policy = Policy(max_ctas=int(settings.get("NCCL_MAX_CTAS", base)))
    if "--priority" in flags:
        policy = replace(policy, priority=flags["--priority"])
    if "--head-start" in flags:
        policy = replace(policy, head_start_us=float(flags["--head-start"]))
    if "--residency" in flags:
        policy = replace(policy, residency=int(flags["--residency"]), when=flags["--when"])
    return policy


def saved_pct(samples: dict[str, list[float]], policy: Policy, base: Policy) -> tuple[float, float, float]:
    """Percent of the step that a change saved, and a 95% interval."""
    from weft.measure.intervals import ratio_ci

    ratio, low, high = ratio_ci(samples[key_of(policy)], samples[key_of(base)])
    return 100 * (1 - ratio), 100 * (1 - high), 100 * (1 - low)


def judge(out: Path, results: Path | None) -> None:
    """A row for each item of advice that has a command, and for each job without one."""
    rows = [row for name in JOBS for base in BASES for row in judged(out, name, base)]
    advised = [row for row in rows if "inside" in row]
    lost = [row for row in advised if row["saved_pct"][2] <= 0]
    head = [
        "# Advice replayed on an H200",
        "",
        "`python benchmarks/advice_replay.py record OUT`, then `judge OUT`; two ranks, one a ghost. A job"
        " is a configuration at a number of CTAs. Percent of the step, with a 95% interval.",
        "",
        f"{sum(row['inside'] for row in advised)} of {len(advised)} measured savings are inside the stated"
        f" range; {len(lost)} advised changes won nothing. Ranges are {mean_width(advised):.1f} points wide"
        f" on average; {sum(map(overlaps, advised))} of {len(advised)} overlap with the interval of the"
        " saving.",
        "",
        provenance(recording_name(out)),
        "",
        "| job | CTAs | step ms | advised | stated | saved | inside | best change measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    text = "\n".join([*head, *(table_row(row) for row in rows)]) + "\n"
    print(text)
    if results:
        results.mkdir(parents=True, exist_ok=True)
        (results / "advice.md").write_text(text)
        (results / "advice.json").write_text(json.dumps(rows, indent=1) + "\n")


def mean_width(rows: list[dict[str, Any]]) -> float:
    """Mean width of the stated ranges, in percentage points of the step."""
    return statistics.fmean(row["stated_pct"][1] - row["stated_pct"][0] for row in rows) if rows else 0.0


def overlaps(row: dict[str, Any]) -> bool:
    """Whether the stated range and the 95% interval of the saving have a value in common."""
    (low, high), (_, least, most) = row["stated_pct"], row["saved_pct"]
    return bool(low <= most and least <= high)


def recording_name(out: Path) -> str:
    """When a folder was recorded."""
    file = out / RECORDING
    return str(json.loads(file.read_text())["name"]) if file.exists() else FITTED_TO


def provenance(name: str) -> str:
    """Which recording is judged, and what was fitted to it."""
    from weft.trace.advise import RESIDENCY_COST
    from weft.trace.ctas import CTA_SCALING

    constants = f"CTA_SCALING ({CTA_SCALING}) and RESIDENCY_COST ({RESIDENCY_COST}) of weft.trace"
    if name != FITTED_TO:
        return f"Recording: {name}. Nothing was fitted to it: {constants} come from the one of {FITTED_TO}."
    return (
        f"Recording: {name}. **Not a blind test**: {constants} were taken from this same recording, so the"
        " figures below show how well the model fits. The recording version did not yet write the sizes of"
        " collectives into the traces, as PyTorch's own process group does; they were added afterwards from"
        " the shapes of the models. A fresh recording decides whether the advice holds."
    )


def judged(out: Path, name: str, base: int) -> list[dict[str, Any]]:
    """The advice for one job and its measured effect."""
    import weft

    times, trace = out / f"{name}.json", out / f"{name}.{base}.rank0.json.gz"
    if not times.exists() or not trace.exists():
        return []
    samples, own = json.loads(times.read_text())["samples_ms"], Policy(max_ctas=base)
    best = min(samples, key=lambda key: statistics.median(samples[key]))
    common = {
        "job": name,
        "ctas": base,
        "step_ms": statistics.median(samples[key_of(own)]),
        "best": Policy.from_dict(json.loads(best)).label,
        "best_saved_pct": saved_pct(samples, Policy.from_dict(json.loads(best)), own)[0],
    }
    rows = []
    for item in weft.analyze(trace).advice:
        if item.command is None:
            continue
        policy = advised_policy(item.command, base)
        row = {**common, "control": item.control, "command": item.command, "stated_pct": item.step_pct}
        if key_of(policy) in samples:
            row["saved_pct"] = saved_pct(samples, policy, own)
            row["inside"] = item.step_pct[0] <= row["saved_pct"][0] <= item.step_pct[1]
        rows.append(row)
    return rows or [{**common, "control": None}]


def table_row(row: dict[str, Any]) -> str:
    stated = "{:.1f} to {:.1f}".format(*row["stated_pct"]) if row["control"] else "-"
    saved = "{:.1f} ({:.1f} to {:.1f})".format(*row["saved_pct"]) if "inside" in row else "not measured"
    cells = (
        row["job"],
        row["ctas"],
        f"{row['step_ms']:.2f}",
        row["control"] or "nothing",
        stated,
        saved if row["control"] else "-",
        "-" if "inside" not in row else "yes" if row["inside"] else "no",
        f"{row['best']}: {row['best_saved_pct']:.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2:])
        return
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("do", choices=("record", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deadline", type=float, default=200.0, help="seconds for all jobs")
    parser.add_argument("--measure", type=float, default=MEASURE_S, help="seconds of measurements in a job")
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=CONFIGS)
    parser.add_argument("--tiny", action="store_true", help="record: sizes for a CPU, without traces")
    parser.add_argument("--out", type=Path, help="judge: folder for advice.md and advice.json")
    args = parser.parse_args()
    if args.do == "record":
        more = ["--tiny"] if args.tiny else []
        record(args.folder.resolve(), args.jobs, args.deadline, args.measure, more)
    else:
        judge(args.folder, args.out)


if __name__ == "__main__":
    main()
