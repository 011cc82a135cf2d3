"""Is an unmodified program ever slower under `weft run --tune`, and do its claims hold outside?

    python benchmarks/live/strangers.py --out DIR [--public FOLDER] [--only NAME …] [--repeats 3] [--tiny]

Each program of strangers/catalog.py runs twice at once, as rank 0 of two with a ghost rank: without weft, and
under `weft run --tune`. The search has the GPU for itself. Then the two take turns of half a second or more,
in random order: one waits, between two of its steps and with an idle device, while the other runs. So both
meet the same clocks, neighbors and disks. A stopwatch that is not weft's notes when each step ends
(strangers/watched.py). The next pair imports its libraries meanwhile, on cores of its own.

DIR/rows.jsonl has a line for each pair as soon as it ends, and a rerun goes on from there, so that the table
may grow over several sessions. DIR/table.md is the table.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from configs import ROOT
from strangers.catalog import CATALOG, PAUSE, Program, prepare
from strangers.process import WAYS, EndedError, Process, start

SETTLE_S = {"without": 2.0, "tune": 1.0}  # after the first steps; after the search
TURN_S, TURNS_S, TURNS = 0.5, 22.0, (6, 22)  # seconds of a turn, of all of them; turns of each process
FIRST_STEPS, LEAST_STEPS = 10, 12  # that show how many steps a turn has; that are counted in a turn
NOT_COUNTED = 2  # steps at the beginning of a turn
DEADLINE_S = 110.0
Pair = dict[str, Process]


def run(pair: Pair, limit_s: float, order: random.Random, tiny: bool) -> dict[str, Any]:
    """Both processes of a pair, to their end or to their deadline. Nothing of them is left on the GPU."""
    began = time.monotonic()
    until, problem = began + limit_s, ""
    tune, without = pair["tune"], pair["without"]
    try:
        tune.begin()
        tune.wait(until, tune.stepping)
        tune.hold()
        if not tiny:
            tune.wait(until, tune.tuned)
        time.sleep(SETTLE_S["tune"])
        tune.pause(until)
        without.begin()
        without.wait(until, without.stepping)
        without.hold()
        time.sleep(SETTLE_S["without"])
        without.pause(until)
        each_s = without.turn(FIRST_STEPS, until) / FIRST_STEPS
        steps = max(NOT_COUNTED + LEAST_STEPS, round(TURN_S / each_s))
        turning = time.monotonic()
        for number in range(min(max(round(TURNS_S / (2 * steps * each_s)), TURNS[0]), TURNS[1])):
            if number >= TURNS[0] and time.monotonic() > turning + 1.5 * TURNS_S:
                break  # its data loaders start slowly
            for way in order.sample(WAYS, len(WAYS)):
                pair[way].turn(steps, until)
        for process in pair.values():
            process.stop(min(until, time.monotonic() + 20))
    except EndedError as error:
        problem = str(error)
    found = {way: process.close() for way, process in pair.items()}
    problem = problem or next((f"{way}: {p.problem}" for way, p in pair.items() if p.problem), "")
    row: dict[str, Any] = {"program": tune.program.name, "ok": not problem, "problem": problem}
    row |= {"seconds": round(time.monotonic() - began, 1), "tuning": tune.tuning}
    for way, turns in found.items():
        times = [[round(1e3 * (b - a), 3) for a, b in itertools.pairwise(turn)] for turn in turns]
        row[way] = {"before": times[0] if times else [], "turns": times[2 if way == "without" else 1 :]}
    said = {way: pair[way].log[-1500:] for way in WAYS if problem or way == "tune"}
    row["said"] = {way: log.replace(f"{ROOT}/", "") for way, log in said.items()}
    return row


def rows(out: Path) -> list[dict[str, Any]]:
    """What earlier pairs showed."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan(out: Path, chosen: list[Program], repeats: int) -> list[Program]:
    """What is still to be run; what failed twice is not tried again."""
    known = rows(out)
    left = []
    for repeat in range(repeats):
        for program in chosen:
            done = sum(row["program"] == program.name and row["ok"] for row in known)
            failed = sum(row["program"] == program.name and not row["ok"] for row in known)
            if done <= repeat and failed < 2:
                left.append(program)
    return left


def measure(args: argparse.Namespace) -> None:
    """Run what is to be run, a pair at a time; the next one gets ready meanwhile."""
    until = time.monotonic() + args.budget
    chosen = [p for p in CATALOG.values() if any(fnmatch.fnmatch(p.name, only) for only in args.only)]
    if any(program.folder for program in chosen):
        prepare(args.public)
    programs = plan(args.out, chosen, args.repeats)
    order = random.Random(len(rows(args.out)))

    def ready(number: int) -> Pair | None:
        if number >= len(programs):
            return None
        return {way: start(programs[number], way, args.public, args.tiny) for way in WAYS}

    following = ready(0)
    for number in range(len(programs)):
        current, following = following, None
        left = until - time.monotonic()
        if current is None or left < args.least:
            print(f"out of time: {len(programs) - number} pairs left", flush=True)
            for process in (current or {}).values():
                process.close()
            break
        following = ready(number + 1)
        row = run(current, min(args.deadline, left), order, args.tiny)
        with (args.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)
        write_table(args.out)


def line_of(row: dict[str, Any]) -> str:
    """A pair in one line."""
    text = f"{row['program']:20} {row['seconds']:5.1f} s  "
    if not row["ok"]:
        said = " ".join(each[-400:] for each in row["said"].values())
        return f"{text}{row['problem']}: {said}"
    ratio, low, high = interval(ratios(row))
    return f"{text}{ratio:.3f} ({low:.3f} to {high:.3f})  {(row['tuning'] or {}).get('text', '')}"


# --- statistics --------------------------------------------------------------------------------------------


def turn_ms(row: dict[str, Any], way: str) -> list[float]:
    """Mean step of each turn, less the program's own pauses where it is known to make some."""
    found = []
    for turn in row[way]["turns"]:
        times = turn[NOT_COUNTED:] or turn
        limit = PAUSE * statistics.median(times) if CATALOG[row["program"]].pauses else math.inf
        found.append(statistics.fmean(ms for ms in times if ms <= limit))
    return found


def ratios(row: dict[str, Any]) -> list[float]:
    """Logarithms of the time under `--tune` over that without weft, a number for each two turns."""
    pairs = zip(turn_ms(row, "tune"), turn_ms(row, "without"), strict=True)
    return [math.log(tune / without) for tune, without in pairs]


def against_itself(found: list[dict[str, Any]]) -> float:
    """How far a program's ratio to itself may be from 1, in percent, by as many turns as were measured."""
    apart = []
    for row in found:
        times = [math.log(ms) for ms in turn_ms(row, "without")]
        apart += [b - a for a, b in itertools.pairwise(times)]
    return 100 * math.expm1(student(len(apart)) * statistics.pstdev(apart, 0.0) / math.sqrt(len(apart)))


def interval(logs: list[float]) -> tuple[float, float, float]:
    """Geometric mean with its 95% interval."""
    mean = statistics.fmean(logs)
    half = student(len(logs)) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 9.0))


def student(count: int) -> float:
    """The 97.5% point of Student's distribution for the mean of so many numbers (Cornish-Fisher)."""
    free = max(count - 1, 1)
    return 1.96 + 2.372 / free + 2.82 / free**2


def claims(found: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """What was claimed, each with the interval of its own turns, and whether all claims are inside theirs."""
    texts, inside = [], True
    for row in found:
        tuning = row["tuning"] or {}
        if not tuning.get("gain_pct"):
            continue
        _, low, high = interval(ratios(row))
        gain, (a, b) = tuning["gain_pct"], tuning["ci"]
        least, most = 100 * (1 - high), 100 * (1 - low)
        inside &= least <= gain <= most
        texts.append(f"{gain:.1f}% ({a:.1f} to {b:.1f}), measured {least:.1f} to {most:.1f}")
    return texts, inside


def write_table(out: Path) -> None:
    """A line for each program: its times, their ratio with its interval, the claims and whether they hold."""
    lines = [
        "| program | runs | without weft, ms | after `--tune`, ms | ratio (95%) | a program against itself "
        "| claimed | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for program in CATALOG.values():
        found = [row for row in rows(out) if row["program"] == program.name and row["ok"]]
        if not found:
            continue
        ratio, low, high = interval([log for row in found for log in ratios(row)])
        base, after = (
            statistics.fmean(ms for row in found for ms in turn_ms(row, way)) for way in ("without", "tune")
        )
        texts, inside = claims(found)
        told = "; ".join(texts) or "left alone"
        lines.append(
            f"| {program.name}: {program.about} | {len(found)} | {base:.2f} | {after:.2f} "
            f"| {ratio:.3f} ({low:.3f} to {high:.3f}) | ±{against_itself(found):.1f}% | {told} "
            f"| {'yes' if inside else 'no'} |"
        )
    (out / "table.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    default = ROOT / ".local" / "public"
    parser.add_argument("--public", type=Path, default=default, help="checkouts: see strangers/catalog.py")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of programs, * and ? allowed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=440.0, help="seconds after which no pair starts")
    parser.add_argument("--least", type=float, default=60.0, help="seconds that a pair must have left")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for a pair")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does everything work?")
    args = parser.parse_args()
    args.out, args.public = args.out.resolve(), args.public.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args)
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
