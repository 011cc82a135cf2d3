"""Random programs, natively and under weft: does any call return something else or reach the library twice?

Programs are drawn from a seed (fuzz_nccl_program.py, fuzz_driver_program.py) and run against the fake NCCL,
in versions from 2.19 to 2.33, and the fake driver of tests/shim. Under each policy every call must return
what it returns natively, and reach the library exactly once. Programs run in batches, one process each; a
difference is printed with the seed of its batch, which repeats it.

    python benchmarks/shim/fuzz.py --minutes 10 --seed 1 [--what nccl|driver] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = ROOT / "tests/shim"
sys.path[:0] = [str(path) for path in (ROOT / "src", ROOT, ROOT / "benchmarks")]

from shim_soak import CC, build_fake, commit  # noqa: E402

from weft.policy import Policy  # noqa: E402
from weft.rules import CommRule, Rule  # noqa: E402
from weft.shim.inject import Job  # noqa: E402

NCCL_VERSIONS = (21900, 22400, 22800, 23000, 23100, 23300)
NCCL_POLICIES = {
    "none": Policy(),
    "rules": Policy(
        comm_rules=(
            CommRule(collective="all_reduce", max_bytes=4096, ctas=2, algorithm="tree", protocol="ll"),
            CommRule(min_bytes=4097, ctas=8, cluster=2),
        ),
        max_ctas=16,
    ),
    "dma": Policy(engine="dma"),
}
DRIVER_POLICIES = {
    "none": Policy(),
    "always": Policy(residency=2, priority="high"),
    "overlap": Policy(residency=2, priority="high", when="overlap", head_start_us=5),
    "placed": Policy(priority="high", head_start="placed"),
    "reserve": Policy(sm_reserve=16, head_start="placed", rules=(Rule("gemm*", 1),)),
}
NCCL_BATCH, DRIVER_BATCH = 50, 10  # programs per process; the fake driver has 512 streams
INVALID_ARGUMENT = 4
TIMEOUT_S = 300
Programs = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Batch:
    """Consecutive seeds, run by one process."""

    what: str
    seed: int
    count: int
    base: dict[str, str]
    """Environment of the native run."""
    label: str
    runs: tuple[tuple[str, Policy, tuple[str, ...]], ...]
    """The runs under weft: a name, a policy, and arguments of the program."""


@dataclass
class Tally:
    """What a run of the fuzzer has seen so far."""

    programs: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of all programs, natively; each policy repeats them."""
    compared: int = 0
    """Runs of a program under weft."""
    differences: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            "programs": dict(self.programs),
            "calls": dict(self.calls),
            "compared": self.compared,
            "differences": len(self.differences),
        }


# --- what must be equal -----------------------------------------------------------------------------------


def first_difference(native: list[Any], under: list[Any]) -> str:
    pairs = enumerate(zip(native, under, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(native), len(under)))
    return f"at {place}: {native[max(0, place - 6) : place + 1]} and {under[place : place + 1]}"


def compare_nccl(native: dict[str, Any], under: dict[str, Any], traced: bool) -> str | None:
    """The first difference under weft, or None.

    A call that the library refused as invalid may have reached it twice: first as weft makes it.
    """
    if native["results"] != under["results"]:
        return "results " + first_difference(native["results"], under["results"])
    refused: Counter[str] = Counter()
    for name, result, _ in native["results"]:
        if result == INVALID_ARGUMENT:
            own = name.removesuffix("Config").replace("ncclBcast", "ncclBroadcast")
            refused["ncclCommInit" if name.startswith("init") else own] += 1
    expected, found = native["reached"], under["reached"]
    for name in {*expected, *found}:
        times, least = found.get(name, 0), expected.get(name, 0)
        most = least + refused["ncclCommInit" if name.startswith("ncclCommInit") else name]
        if not least <= times <= most:
            return f"{name} reached the library {times} times and natively {least}"
    return None


def compare_driver(native: dict[str, Any], under: dict[str, Any], traced: bool) -> str | None:
    """The first difference under weft, or None. A trace may come between two dependent launches."""
    for key in ("results", "launches"):
        if native[key] != under[key]:
            return f"{key} {first_difference(native[key], under[key])}"
    for key in ("unsafe calls", "calls of a dead context"):
        if native[key] != under[key]:
            return f"{key}: {native[key]} and {under[key]}"
    key = "broken programmatic"
    if not traced and under[key] > native[key]:
        return f"{key}: {native[key]} and {under[key]}"
    return None


COMPARE: dict[str, Callable[[dict[str, Any], dict[str, Any], bool], str | None]] = {
    "nccl": compare_nccl,
    "driver": compare_driver,
}


# --- running ----------------------------------------------------------------------------------------------


def build_nccl(folder: Path, version: int) -> Path:
    """The folder of a fake NCCL of this version, which is built on first use."""
    library = folder / str(version) / "libnccl.so.2"
    if not library.exists():
        library.parent.mkdir()
        flags = ["-shared", "-fPIC", f"-DFAKE_VERSION={version}", "-Wl,-soname,libnccl.so.2"]
        sources = [str(TESTS / "fake_nccl.c"), "-lpthread", "-ldl"]
        subprocess.run([*CC, *flags, *sources, "-o", str(library)], check=True)
    return library.parent


def environment(*folders: Path) -> dict[str, str]:
    libraries = ":".join(map(str, folders))
    return {**os.environ, "LD_LIBRARY_PATH": libraries, "PYTHONPATH": f"{ROOT / 'src'}:{TESTS}"}


def nccl_batch(folder: Path, driver: Path, seed: int, count: int = NCCL_BATCH) -> Batch:
    """A batch of NCCL programs. The version, and whether live tuning may run, also come from the seed."""
    choose = random.Random(seed)
    version, live = choose.choice(NCCL_VERSIONS), choose.random() < 0.5
    base = environment(build_nccl(folder, version), driver)
    base |= {"WEFT_LIVE": "1", "NCCL_MAX_CTAS": "32"} if live else {}
    runs = tuple((name, policy, ()) for name, policy in NCCL_POLICIES.items())
    return Batch("nccl", seed, count, base, f"NCCL {version}{', live' if live else ''}", runs)


def driver_batch(driver: Path, seed: int, count: int = DRIVER_BATCH) -> Batch:
    plain = tuple((name, policy, ()) for name, policy in DRIVER_POLICIES.items())
    traced = tuple((f"{name}, traced", policy, ("trace",)) for name, policy in DRIVER_POLICIES.items())
    return Batch("driver", seed, count, environment(driver), "driver", (*plain, *traced))


def run_programs(batch: Batch, env: dict[str, str], arguments: tuple[str, ...]) -> Programs | str:
    """What the programs of a batch did, or, if their process failed, how it ended."""
    program = str(HERE / f"fuzz_{batch.what}_program.py")
    command = [sys.executable, program, str(batch.seed), str(batch.count), *arguments]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {TIMEOUT_S} s"
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr[-1500:]}"
    programs: Programs = json.loads(done.stdout)
    return programs


def differences(batch: Batch, native: Programs) -> Iterator[str]:
    for name, policy, arguments in batch.runs:
        with Job(policy) as job:
            under = run_programs(batch, job.environment(batch.base), arguments)
        if isinstance(under, str):
            yield f"{batch.label}, policy {name}: {under}"
            continue
        for seed, expected in native.items():
            difference = COMPARE[batch.what](expected, under[seed], bool(arguments))
            if difference:
                yield f"{batch.label}, policy {name}, program {seed}: {difference}"


def fuzz(batch: Batch, tally: Tally) -> None:
    """Run a batch natively and under every policy, and add what was found."""
    native = run_programs(batch, batch.base, ())
    if isinstance(native, str):
        raise RuntimeError(f"a native batch of {batch.label}, seed {batch.seed}, {native}")
    tally.programs[batch.what] += len(native)
    tally.calls[batch.what] += sum(len(program["results"]) for program in native.values())
    tally.compared += len(native) * len(batch.runs)
    repeat = f"python benchmarks/shim/fuzz.py --what {batch.what} --seed {batch.seed} --minutes 0"
    for difference in differences(batch, native):
        tally.differences.append(difference)
        print(f"{difference}\n  repeat: {repeat}", file=sys.stderr, flush=True)


def run(minutes: float, seed: int, whats: tuple[str, ...]) -> Tally:
    """At least one batch of each kind, then more until the time is over."""
    tally, until = Tally(), time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_fake(folder)
        while True:
            if "nccl" in whats:
                fuzz(nccl_batch(folder, folder, seed), tally)
            if "driver" in whats:
                fuzz(driver_batch(folder, seed), tally)
            seed += max(NCCL_BATCH, DRIVER_BATCH)
            if time.monotonic() >= until:
                return tally


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=10, help="0: one batch of each kind")
    parser.add_argument("--seed", type=int, help="of the first program; random unless given")
    parser.add_argument("--what", choices=tuple(COMPARE), help="both unless given")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add this run to")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    tally = run(args.minutes, seed, (args.what,) if args.what else tuple(COMPARE))
    row = {"seed": seed, "minutes": args.minutes, **tally.row()}
    print(json.dumps(row))
    if args.out:
        command = f"python benchmarks/shim/fuzz.py --minutes {args.minutes:g} --seed {seed}"
        command += f" --what {args.what}" if args.what else ""
        about = {
            "command": command,
            "commit": commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        with args.out.open("a") as file:
            file.write(json.dumps({**about, **row}) + "\n")
    return 1 if tally.differences else 0


if __name__ == "__main__":
    sys.exit(main())
