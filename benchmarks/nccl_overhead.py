"""Overhead of the shim per NCCL call.

Runs tests/shim/nccl_hammer.c against the fake NCCL, directly and under the shim, interleaved, with 1 to 4
threads. CPU time of one all-reduce, least of nine rounds, median over repeats; the cost is the difference.

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

from weft.shim.inject import Job  # noqa: E402

THREADS = (1, 2, 4)
CALLS = 200_000


def build(folder: Path) -> Path:
    tests = ROOT / "tests/shim"
    cc = ["cc", "-std=gnu11", "-O2", f"-I{ROOT / 'src/weft/shim/csrc'}"]
    fake = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", str(tests / "fake_nccl.c"), "-lpthread"]
    subprocess.run([*cc, *fake, "-o", str(folder / "libnccl.so.2")], check=True)
    (folder / "libnccl.so").symlink_to("libnccl.so.2")
    program = folder / "hammer"
    hammer = [str(tests / "nccl_hammer.c"), f"-L{folder}", "-lnccl", "-ldl", "-lpthread"]
    subprocess.run([*cc, *hammer, "-o", str(program)], check=True)
    return program


def call_ns(program: Path, threads: int, env: dict[str, str]) -> float:
    command = [str(program), str(threads), str(CALLS), "time"]
    return float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def measure(repeats: int) -> Rows:
    rows: Rows = []
    with tempfile.TemporaryDirectory() as name:
        program = build(Path(name))
        plain = {**os.environ, "LD_LIBRARY_PATH": name}
        for threads in THREADS:
            direct, under = [], []
            for _ in range(repeats):
                direct.append(call_ns(program, threads, plain))
                with Job() as job:
                    under.append(call_ns(program, threads, job.environment(plain)))
            cost = statistics.median(under) - statistics.median(direct)
            rows.append(
                {"threads": threads, "cost_ns": round(cost, 1), "direct_ns": direct, "under_shim_ns": under}
            )
    return rows


if __name__ == "__main__":
    main(__doc__, "nccl_overhead.py", measure)
