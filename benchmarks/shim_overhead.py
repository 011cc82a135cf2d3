"""Overhead of the shim per kernel launch.

Runs tests/shim/hammer.c against the fake driver, directly and under the shim, interleaved, with 1 to
8 threads, and with 100,000 kernels loaded of which 2,000 are launched. CPU time of one launch, the least of
nine rounds, median over repeats; the cost is the difference.

    python benchmarks/shim_overhead.py [--repeats 7] [--out benchmarks/results/shim_overhead.json]
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overhead_main import Rows, main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from weft.policy import Policy  # noqa: E402
from weft.shim.inject import Job  # noqa: E402

POLICIES = {
    "no policy": Policy(),
    "residency and priority": Policy(residency=3, priority="high"),
    "residency while a collective is in flight, priority, head start": Policy(
        residency=3, priority="high", when="overlap", head_start_us=5
    ),
}
THREADS = (1, 2, 4, 8)
LAUNCHES = 200_000
FEW, MANY = (8, 8), (100_000, 2_000)
"""Kernels that are loaded, and how many of them are launched."""


def build(folder: Path) -> Path:
    shim, tests = ROOT / "src/weft/shim/csrc", ROOT / "tests/shim"
    cc = ["cc", "-std=gnu11", "-O2", f"-I{shim}"]
    sources = [str(tests / name) for name in ("fake_cuda.c", "fake_cuda_events.c")]
    fake = ["-shared", "-fPIC", "-Wl,-Bsymbolic,-soname,libcuda.so.1", *sources]
    subprocess.run([*cc, *fake, "-o", str(folder / "libcuda.so.1"), "-lpthread"], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    program = folder / "hammer"
    hammer = [str(tests / "hammer.c"), f"-L{folder}", "-lcuda", "-lpthread"]
    subprocess.run([*cc, *hammer, "-o", str(program)], check=True)
    return program


def launch_ns(program: Path, threads: int, kernels: tuple[int, int], env: dict[str, str]) -> float:
    command = [str(program), str(threads), str(LAUNCHES), "time", *map(str, kernels)]
    return float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def measure(repeats: int) -> Rows:
    samples: dict[tuple[str, int, tuple[int, int]], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        program = build(Path(name))
        plain = {**os.environ, "LD_LIBRARY_PATH": name}
        loads = [*((threads, FEW) for threads in THREADS), (1, MANY)]
        cases = [(label, *load) for label in ("direct", *POLICIES) for load in loads]
        for _ in range(repeats):
            random.shuffle(cases)
            for label, threads, kernels in cases:
                if label == "direct":
                    ns = launch_ns(program, threads, kernels, plain)
                else:
                    with Job(POLICIES[label]) as job:
                        ns = launch_ns(program, threads, kernels, job.environment(plain))
                samples.setdefault((label, threads, kernels), []).append(ns)
    rows = []
    for label in POLICIES:
        for threads, kernels in loads:
            direct = statistics.median(samples["direct", threads, kernels])
            under = statistics.median(samples[label, threads, kernels])
            rows.append(
                {
                    "policy": label,
                    "threads": threads,
                    "kernels": kernels[0],
                    "hot": kernels[1],
                    "direct_ns": round(direct, 1),
                    "under_shim_ns": round(under, 1),
                    "cost_ns": round(under - direct, 1),
                    "samples_ns": samples[label, threads, kernels],
                }
            )
    return rows


if __name__ == "__main__":
    main(__doc__, "shim_overhead.py", measure)
