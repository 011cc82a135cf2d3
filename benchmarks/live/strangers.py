"""Is an unmodified program ever slower under `weft run --tune`, and do its claims hold outside?

    python benchmarks/live/strangers.py --out DIR [--only NAME …] [--repeats 3] [--budget SECONDS] [--tiny]

Each program of strangers/ (transformers, accelerate, Lightning, torchvision, plain torch) runs without weft
and under `weft run --tune`, by turns, each time in a process of its own, as rank 0 of two with a ghost rank.
The programs themselves note when each step ends; the mean of the last steps is compared. DIR/rows.jsonl has
a line for each process as soon as it ends, and a rerun goes on from there, so that the table may grow over
several sessions. DIR/table.md is the table.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import BASELINE_CTAS, RANKS, ROOT

PROGRAMS = Path(__file__).resolve().parent / "strangers"
STEPS, TINY_STEPS = 230, 120
TAIL = 80  # steps at the end that are compared: the search is over by then
DEADLINE_S = 75.0
WAYS = ("without", "tune")
YES_NO = ("yes", "no")


@dataclass(frozen=True)
class Program:
    """A command line of strangers/."""

    name: str
    command: tuple[str, ...]
    about: str
    steps: float = 1.0
    """Times the usual number of steps."""


_ALL = (
    Program("vit", ("vision.py", "vit_b_16"), "torchvision ViT-B/16, DDP"),
    Program("llama-accelerate", ("accelerated.py", "llama"), "Llama, width 4096, accelerate"),
    Program("gpt-small", ("gpt.py", "small"), "36 narrow layers, DDP: bound by launches"),
    Program("generate", ("serve.py", "generate"), "Llama, TP, model.generate: inference"),
    Program("gpt2-trainer", ("trainer.py", "gpt2"), "GPT-2, Trainer"),
    Program("resnet50", ("vision.py", "resnet50"), "torchvision ResNet-50, DDP"),
    Program("gpt-wide", ("gpt.py", "wide"), "GPT, width 2048, DDP, 2 micro-batches"),
    Program("prefill", ("serve.py", "prefill"), "Llama, TP, long prompts: inference"),
    Program("llama-fsdp2", ("sharded.py",), "Llama, width 3072, FSDP2"),
    Program("bert-trainer", ("trainer.py", "bert"), "BERT, Trainer, 2 micro-batches"),
    Program("vgg16", ("vision.py", "vgg16"), "torchvision VGG-16, DDP"),
    Program("llama-trainer", ("trainer.py", "llama"), "Llama, Trainer, 4 micro-batches", 0.8),
    Program("bert-classify", ("accelerated.py", "classify"), "BERT, lengths vary, evaluation, accelerate"),
    Program("resnet50-lightning", ("lit.py",), "ResNet-50, Lightning"),
)
CATALOG = {program.name: program for program in _ALL}


def run_one(
    program: Program, way: str, repeat: int, args: argparse.Namespace, limit_s: float
) -> dict[str, Any]:
    """One process, to its end or to its deadline."""
    with tempfile.TemporaryDirectory(prefix="weft-strangers-") as name:
        folder = Path(name)
        times, stats = folder / "times.json", folder / "stats.json"
        command = [sys.executable, "-m", "weft.comm.ghost", "--ranks", str(RANKS)]
        command += [str(PROGRAMS / program.command[0]), *program.command[1:]]
        if way == "tune":
            command = [sys.executable, "-m", "weft", "run", "--tune", "--stats", str(stats), "--", *command]
        began, steps = time.monotonic(), TINY_STEPS if args.tiny else round(STEPS * program.steps)
        env = environment(folder, times, steps, args.tiny)
        log = folder / "log"
        code = wait_for(command, env, log, limit_s)
        row: dict[str, Any] = {"program": program.name, "way": way, "repeat": repeat, "ok": code == 0}
        row |= {"exit": code, "seconds": round(time.monotonic() - began, 1), "steps": steps}
        if times.exists():
            stamps = json.loads(times.read_text())
            row["times_ms"] = [round(1e3 * (b - a), 3) for a, b in itertools.pairwise(stamps)]
            tail = row["times_ms"][-TAIL:]
            row["step_ms"], row["median_ms"] = statistics.fmean(tail), statistics.median(tail)
        if stats.exists():
            tuning = json.loads(stats.read_text()).get("tuning") or {}
            names = (
                "state",
                "text",
                "gain_pct",
                "ci",
                "steps",
                "warm_up_steps",
                "noise_pct",
                "policy",
                "watch",
            )
            row["tuning"] = {name: tuning.get(name) for name in names}
        if code != 0:
            row["said"] = log.read_text(errors="replace")[-1500:]
        return row


def wait_for(command: list[str], env: dict[str, str], log: Path, limit_s: float) -> int | str:
    """The exit code, or that it took too long. Nothing of it is left on the GPU when this returns."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"killed after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(folder: Path, times: Path, steps: int, tiny: bool) -> dict[str, str]:
    """The baseline's CTAs, no memory of earlier tuning."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "WEFT_GHOST_CTAS": str(BASELINE_CTAS),
        "WEFT_STORE": str(folder / "store.sqlite"),
        "STRANGER_TIMES": str(times),
        "STRANGER_STEPS": str(steps),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**env, "STRANGER_TINY": "1"} if tiny else env


def rows(out: Path) -> list[dict[str, Any]]:
    """What earlier processes showed."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan(out: Path, chosen: list[Program], repeats: int) -> list[tuple[Program, str, int]]:
    """What is still to be run, by turns; what failed twice is not tried again."""
    known = rows(out)
    done = {(row["program"], row["way"], row["repeat"]) for row in known if row["ok"]}
    failed = [(row["program"], row["way"], row["repeat"]) for row in known if not row["ok"]]
    order = random.Random(len(known))
    turns = []
    for repeat in range(repeats):
        for program in chosen:
            for way in order.sample(WAYS, len(WAYS)):
                key = (program.name, way, repeat)
                if key not in done and failed.count(key) < 2:
                    turns.append((program, way, repeat))
    return turns


def measure(args: argparse.Namespace) -> None:
    """Run what is to be run, one process at a time."""
    until = time.monotonic() + args.budget
    chosen = [p for p in CATALOG.values() if any(fnmatch.fnmatch(p.name, only) for only in args.only)]
    turns = plan(args.out, chosen, args.repeats)
    for number, (program, way, repeat) in enumerate(turns):
        left = until - time.monotonic()
        if left < args.least:
            print(f"out of time: {len(turns) - number} processes left", flush=True)
            break
        row = run_one(program, way, repeat, args, min(args.deadline, left))
        with (args.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = (row.get("tuning") or {}).get("text", "") if row["ok"] else row["said"][-300:]
        ms = f"{row['step_ms']:8.2f} ms" if "step_ms" in row else " " * 11
        print(
            f"{program.name:20} {way:8} {repeat} {row['exit']} {row['seconds']:5.1f} s {ms}  {said}",
            flush=True,
        )
    write_table(args.out)


def write_table(out: Path) -> None:
    """A line for each program: its times, their ratio with its range, the claims and whether they hold."""
    lines = [
        "| program | runs | without weft, ms | after `--tune`, ms | ratio (range) | a program against itself "
        "| claimed | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for program in CATALOG.values():
        found = [
            row for row in rows(out) if row["program"] == program.name and row["ok"] and "step_ms" in row
        ]
        without, tuned = ([row for row in found if row["way"] == way] for way in WAYS)
        if not without or not tuned:
            continue
        base, after = ([row["step_ms"] for row in some] for some in (without, tuned))
        ratio = statistics.median(after) / statistics.median(base)
        low, high = min(after) / max(base), max(after) / min(base)
        scatter = 100 * (max(base) / min(base) - 1)
        claims = [(row["tuning"]["gain_pct"], row["tuning"]["ci"]) for row in tuned if row.get("tuning")]
        made = [claim for claim in claims if claim[0]]
        told = ", ".join(f"{gain:.1f}% ({a:.1f} to {b:.1f})" for gain, (a, b) in made) or "left alone"
        inside = all(100 * (1 - high) <= gain <= 100 * (1 - low) for gain, _ in made)
        known = min(len(base), len(after)) > 1 or not made
        holds = YES_NO[not inside] if known else "one run each: not known"
        lines.append(
            f"| {program.name}: {program.about} | {len(without)} + {len(tuned)} "
            f"| {statistics.median(base):.2f} | {statistics.median(after):.2f} "
            f"| {ratio:.3f} ({low:.3f} to {high:.3f}) | {scatter:.1f}% | {told} | {holds} |"
        )
    (out / "table.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=["*"], help="names of programs, * and ? allowed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=440.0, help="seconds after which no process starts")
    parser.add_argument("--least", type=float, default=25.0, help="seconds that a process must have left")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for one process")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does everything work?")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args)
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
