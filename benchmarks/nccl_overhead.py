"""Overhead of the shim per NCCL call.

Runs tests/shim/nccl_hammer.c against the fake NCCL, directly and under the shim, interleaved, with 1 to 4
threads. Measures the CPU time of one all-reduce: the least of nine rounds, median over repeats; the cost is
the difference. Runs without rules for collectives, and with the maximum number of rules, of which only the
last one matches: by per-call configuration (NCCL 2.31 and newer), and by the tuner plugin, where the fake
NCCL plans every call.

    python benchmarks/nccl_overhead.py [--repeats 7] [--out benchmarks/results/nccl_overhead.json]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overhead_main import Rows, main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from weft.policy import MAX_COMM_RULES, Policy  # noqa: E402
from weft.rules import CommRule  # noqa: E402
from weft.shim.inject import Job  # noqa: E402

THREADS = (1, 2, 4)
CALLS = 200_000
RULES = Policy(
    comm_rules=(
        *(CommRule(min_bytes=1 << 30, ctas=number + 1) for number in range(MAX_COMM_RULES - 1)),
        CommRule(collective="all_reduce", ctas=8, algorithm="ring"),
    )
)
CASES: dict[str, tuple[Policy, int, tuple[str, ...]]] = {
    "no rules": (Policy(), 22800, ()),
    "rules by configuration": (RULES, 23200, ()),
    "rules by tuner plugin": (RULES, 22800, ("plan",)),
}


def build(folder: Path, version: int) -> Path:
    tests = ROOT / "tests/shim"
    folder.mkdir()
    cc = ["cc", "-std=gnu11", "-O2", f"-I{ROOT / 'src/weft/shim/csrc'}"]
    fake = ["-shared", "-fPIC", f"-DFAKE_VERSION={version}", "-Wl,-soname,libnccl.so.2"]
    libraries = [str(tests / "fake_nccl.c"), "-lpthread", "-ldl"]
    subprocess.run([*cc, *fake, *libraries, "-o", str(folder / "libnccl.so.2")], check=True)
    (folder / "libnccl.so").symlink_to("libnccl.so.2")
    program = folder / "hammer"
    hammer = [str(tests / "nccl_hammer.c"), f"-L{folder}", "-lnccl", "-ldl", "-lpthread"]
    subprocess.run([*cc, *hammer, "-o", str(program)], check=True)
    return program


def call_ns(program: Path, threads: int, env: dict[str, str], *more: str) -> float:
    command = [str(program), str(threads), str(CALLS), "time", *more]
    return float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def measure(repeats: int) -> Rows:
    rows: Rows = []
    with tempfile.TemporaryDirectory() as name:
        for case, (policy, version, more) in CASES.items():
            program = build(Path(name) / case.replace(" ", "_"), version)
            plain = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
            for threads in THREADS:
                direct, under = [], []
                for _ in range(repeats):
                    direct.append(call_ns(program, threads, plain, *more))
                    with Job(policy) as job:
                        under.append(call_ns(program, threads, job.environment(plain), *more))
                cost = statistics.median(under) - statistics.median(direct)
                rows.append(
                    {
                        "policy": case,
                        "threads": threads,
                        "cost_ns": round(cost, 1),
                        "direct_ns": direct,
                        "under_shim_ns": under,
                    }
                )
    return rows


if __name__ == "__main__":
    main(__doc__, "nccl_overhead.py", measure)
