"""Is an unmodified program ever slower under `weft run --tune`, and do its claims hold outside?

    python benchmarks/live/strangers.py --out DIR [--public FOLDER] [--only NAME …] [--repeats 3] [--shim]
    python benchmarks/live/strangers.py --out DIR --node dgx-h100 --only NAME …

Each program of strangers/catalog.py runs in three processes at once, each as rank 0 of two with a ghost rank,
or with --node as rank 0 of that node: two without weft, one under `weft run --tune`. All make their first
steps; then the search has the GPU to itself. Then the three take turns of half a second or more, in random
order, until the ratio is known within 0.4% or its time is over: while one runs, the other two wait between
two of their steps, with an idle device. So all meet the same clocks, neighbors and disks. The two without
weft show how far apart equal processes are; with --shim a fourth one runs under `weft run` alone. A stopwatch
outside weft notes when each step ends (strangers/watched.py). The processes of the next run import their
libraries during the first steps, on separate cores, and are done before the search begins.

DIR/rows.jsonl gets a line for each run as soon as it ends; a rerun continues from there, so the table may
grow over several sessions. DIR/table.md is the table.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import random
import statistics
import sysconfig
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs import ROOT
from strangers.catalog import CATALOG, PAUSE, Program, prepare
from strangers.process import SHIM, WAYS, EndedError, Process, start

SETTLE_S = 1.5  # after the first steps, and after the search
SETTLE_KEPT_S = (
    8.0  # where the search has changed the policy: the watch first uses up the checks it begins with
)
ENOUGH = 0.004  # the turns end at this half-width of the ratio's interval
TURN_S, TURNS_S, TURNS = 0.5, 18.0, (6, 14)  # seconds per turn; seconds for all turns; turns per process
FIRST_STEPS = 6  # these set the number of steps per turn, which is at least this many
NOT_TURNS = 3  # earlier turns: first steps, search or settling, FIRST_STEPS
ENDING_S = 12.0  # for processes to end by themselves
DEADLINE_S = 120.0
LEAST_RUNS = 3  # runs needed for an interval of their means
Run = dict[str, Process]


def run(
    processes: Run, following: Run, limit_s: float, order: random.Random, tiny: bool, turns_s: float = TURNS_S
) -> dict[str, Any]:
    """Run these processes until they are told to end or their time is over; returns what happened when.

    `following`: the processes of the next run, which get ready meanwhile.
    """
    began = time.monotonic()
    until, spent, problem = began + limit_s, {}, ""
    tune, plain = processes["tune"], [p for way, p in processes.items() if way != "tune"]

    def note(what: str) -> None:
        spent[what] = round(time.monotonic() - began, 1)

    try:
        for process in processes.values():
            process.begin()
        for process in processes.values():
            process.made_first_steps(until)
            process.hold()
        note("first steps")
        for process in plain:
            process.go_on()
            time.sleep(SETTLE_S)
            process.pause(until)
        note("settled")
        for process in following.values():  # importing would disturb the search more than the turns
            process.wait(until, process.ready)
        note("next is ready")
        tune.go_on()
        if not tiny:
            tune.wait(until, tune.tuned)
            time.sleep(SETTLE_S)
            if tune.still_open():  # a nearly proven gain is measured in further steps
                time.sleep(SETTLE_KEPT_S)
        note("search")
        time.sleep(SETTLE_KEPT_S if tune.changed() else SETTLE_S)
        tune.pause(until)
        each_s = min(process.turn(FIRST_STEPS, until) for process in processes.values()) / FIRST_STEPS
        steps = max(FIRST_STEPS, round(TURN_S / each_s))
        note("turns begin")
        turning, logs = time.monotonic(), list[float]()
        most = round(TURNS[1] * max(1.0, turns_s / TURNS_S))
        for number in range(min(max(round(turns_s / (len(processes) * steps * each_s)), TURNS[0]), most)):
            if number >= TURNS[0] and time.monotonic() > turning + 1.3 * turns_s:
                break  # slow data loaders have used up the time
            if number >= TURNS[0] and math.log(interval(logs)[2] / interval(logs)[1]) < 2 * ENOUGH:
                break
            ways = order.sample(list(processes), len(processes))
            took = {way: processes[way].turn(steps, until) for way in ways}
            logs.append(math.log(took["tune"] / math.sqrt(took["without"] * took["again"])))
        note("turns end")
        for process in processes.values():
            process.stop()
    except EndedError as error:
        problem = str(error)
    return {"problem": problem, "until": spent}


def finish(processes: Run, happened: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of a run; it leaves nothing on the GPU."""
    until = time.monotonic() + (0.0 if happened["problem"] else ENDING_S)
    while time.monotonic() < until and not all(process.ended() for process in processes.values()):
        time.sleep(0.05)
    found = {way: process.close() for way, process in processes.items()}
    problem = happened["problem"]
    problem = problem or next((f"{way}: {p.problem}" for way, p in processes.items() if p.problem), "")
    tune = processes["tune"]
    row: dict[str, Any] = {"program": tune.program.name, "ok": not problem, "problem": problem}
    row |= {"until": happened["until"], "tuning": tune.tuning}
    for way, turns in found.items():
        times = [[round(1e3 * (b - a), 3) for a, b in itertools.pairwise(turn)] for turn in turns]
        row[way] = {"before": times[1] if len(times) > 1 else [], "turns": times[NOT_TURNS:]}
        row[way] |= processes[way].memory
    said = {way: _said(processes[way].log) for way in processes if problem or way == "tune"}
    installed = sysconfig.get_paths()["purelib"]
    row["said"] = {way: log.replace(f"{ROOT}/", "").replace(f"{installed}/", "") for way, log in said.items()}
    return row


def _said(log: str) -> str:
    """The end of a log, and what weft said before."""
    before, end = log[:-1500], log[-1500:]
    return "".join(line + "\n" for line in before.splitlines() if line.startswith("weft:")) + end


def rows(out: Path) -> list[dict[str, Any]]:
    """The rows of earlier runs."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan(out: Path, chosen: list[Program], repeats: int) -> list[Program]:
    """The programs still to be run; one that failed twice is not tried again."""
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
    """Run the planned programs one at a time, while the next one gets ready."""
    until = time.monotonic() + args.budget
    chosen = [p for p in CATALOG.values() if any(fnmatch.fnmatch(p.name, only) for only in args.only)]
    if any(program.folder for program in chosen):
        prepare(args.public)
    programs = plan(args.out, chosen, args.repeats)
    order = random.Random(len(rows(args.out)))

    def ready(number: int) -> Run | None:
        if number >= len(programs):
            return None
        ways = (*WAYS, SHIM) if args.shim else WAYS
        return {way: start(programs[number], way, args.public, args.tiny, args.node) for way in ways}

    def write(ending: Future[dict[str, Any]] | None) -> None:
        if ending is None:
            return
        row = ending.result()
        with (args.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)
        write_table(args.out)

    following, ending = ready(0), None
    with ThreadPoolExecutor(1) as executor:
        for number in range(len(programs)):
            current, following = following, None
            left = until - time.monotonic()
            if current is None or left < args.least:
                print(f"out of time: {len(programs) - number} runs left", flush=True)
                for process in (current or {}).values():
                    process.close()
                break
            following = ready(number + 1)
            write(ending)  # its processes have released their GPU memory
            limit_s = min(args.deadline, left)
            happened = run(current, following or {}, limit_s, order, args.tiny, args.seconds)
            ending = executor.submit(finish, current, happened)
        write(ending)


def line_of(row: dict[str, Any]) -> str:
    """A run in one line."""
    text = f"{row['program']:18} "
    if not row["ok"]:
        said = " ".join(each[-400:] for each in row["said"].values())
        return f"{text}{row['problem']}: {said}"
    ratio, null = (text_of(interval(logs)) for logs in (ratios(row), against_itself(row)))
    told = (row["tuning"] or {}).get("text", "")
    shim = f"; `weft run` alone {text_of(interval(ratios(row, SHIM)))}" if SHIM in row else ""
    return f"{text}{ratio}{shim}; without against without {null}  {told}  until {row['until']}"


# --- statistics --------------------------------------------------------------------------------------------


def turn_ms(row: dict[str, Any], way: str) -> list[float]:
    """Mean step of each turn, without the pauses that the program is known to make."""
    found = []
    for times in row[way]["turns"]:
        limit = PAUSE * statistics.median(times) if CATALOG[row["program"]].pauses else math.inf
        found.append(statistics.fmean(ms for ms in times if ms <= limit))
    return found


def ratios(row: dict[str, Any], way: str = "tune") -> list[float]:
    """Logarithms of the time under `--tune` over the time without weft, one for each round of turns."""
    rounds = zip(*(turn_ms(row, one) for one in (way, "without", "again")), strict=True)
    return [math.log(ms / math.sqrt(without * again)) for ms, without, again in rounds]


def against_itself(row: dict[str, Any]) -> list[float]:
    """The same for the two processes without weft, one over the other."""
    rounds = zip(turn_ms(row, "again"), turn_ms(row, "without"), strict=True)
    return [math.log(again / without) for again, without in rounds]


def text_of(found: tuple[float, float, float]) -> str:
    ratio, low, high = found
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def interval(logs: list[float]) -> tuple[float, float, float]:
    """Geometric mean with its 95% interval."""
    mean = statistics.fmean(logs)
    half = student(len(logs)) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 9.0))


def of_runs(logs: list[list[float]]) -> tuple[float, float, float]:
    """The same over several runs, which differ by more than one run's turns. Of two runs, by turns."""
    if len(logs) < LEAST_RUNS:
        return interval([log for run in logs for log in run])
    return interval([statistics.fmean(run) for run in logs])


def student(count: int) -> float:
    """The 97.5% point of Student's distribution for the mean of so many numbers (Cornish-Fisher)."""
    free = max(count - 1, 1)
    return 1.96 + 2.372 / free + 2.82 / free**2


def claims(found: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Each claim with the interval of its own turns, and whether all claims are inside their intervals."""
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
        "| program | runs | without weft, ms | after `--tune`, ms | ratio (95%) | ratio of each run "
        "| without weft against itself | claimed | holds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for program in CATALOG.values():
        found = [row for row in rows(out) if row["program"] == program.name and row["ok"]]
        if not found:
            continue
        ratio, null = (text_of(of_runs([logs(row) for row in found])) for logs in (ratios, against_itself))
        each = ", ".join(f"{interval(ratios(row))[0]:.3f}" for row in found)
        base, after = (
            statistics.fmean(ms for row in found for way in ways for ms in turn_ms(row, way))
            for ways in (("without", "again"), ("tune",))
        )
        texts, inside = claims(found)
        told = "; ".join(texts) or "left alone"
        if shim := [ratios(row, SHIM) for row in found if SHIM in row]:
            told += f"; `weft run` alone {text_of(of_runs(shim))} in {len(shim)} of the runs"
        lines.append(
            f"| {program.name}: {program.about} | {len(found)} | {base:.2f} | {after:.2f} | {ratio} | {each} "
            f"| {null} | {told} | {'yes' if inside else 'no'} |"
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
    parser.add_argument("--budget", type=float, default=440.0, help="seconds after which no run starts")
    parser.add_argument("--least", type=float, default=60.0, help="seconds that a run must have left")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for a run")
    parser.add_argument(
        "--seconds", type=float, default=TURNS_S, help="of the turns, of all processes together"
    )
    parser.add_argument("--node", help="a node profile: the programs are its rank 0")
    parser.add_argument("--shim", action="store_true", help="a process under `weft run` alone, too")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does everything work?")
    args = parser.parse_args()
    args.out, args.public = args.out.resolve(), args.public.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args)
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
