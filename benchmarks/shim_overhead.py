"""Overhead of the shim per kernel launch.

Runs tests/shim/hammer.c against the fake driver, directly and under the shim, interleaved, with 1 to 8
threads, and with 100,000 loaded kernels of which 2,000 are launched. Measures the CPU time of one launch: the
least of nine rounds, median over repeats; the cost is the difference. In the rows named "cold", the thread
writes 3 MB before each launch, so that its core's caches hold nothing of the shim; their time is elapsed
time.

    python benchmarks/shim_overhead.py [--repeats 7] [--out benchmarks/results/shim_overhead.json]
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Load:
    """The launches: `hot` of the `kernels` loaded ones, in turn."""

    threads: int = 1
    kernels: int = 8
    hot: int = 8
    cold: bool = False

    @property
    def arguments(self) -> list[str]:
        launches, mode = (COLD_LAUNCHES, "cold") if self.cold else (LAUNCHES, "time")
        return [str(self.threads), str(launches), mode, str(self.kernels), str(self.hot)]


LOADS = (
    *(Load(threads) for threads in (1, 2, 4, 8)),
    Load(kernels=100_000, hot=2_000),
    Load(kernels=2_000, hot=2_000, cold=True),
)
LAUNCHES, COLD_LAUNCHES = 200_000, 800


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


def launch_ns(program: Path, load: Load, env: dict[str, str]) -> float:
    command = [str(program), *load.arguments]
    return float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def measure(repeats: int) -> Rows:
    samples: dict[tuple[str, Load], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        program = build(Path(name))
        plain = {**os.environ, "LD_LIBRARY_PATH": name}
        cases = [(label, load) for label in ("direct", *POLICIES) for load in LOADS]
        for _ in range(repeats):
            random.shuffle(cases)
            for label, load in cases:
                if label == "direct":
                    ns = launch_ns(program, load, plain)
                else:
                    with Job(POLICIES[label]) as job:
                        ns = launch_ns(program, load, job.environment(plain))
                samples.setdefault((label, load), []).append(ns)
    rows = []
    for label in POLICIES:
        for load in LOADS:
            direct, under = (statistics.median(samples[one, load]) for one in ("direct", label))
            rows.append(
                {
                    "policy": label,
                    **vars(load),
                    "direct_ns": round(direct, 1),
                    "under_shim_ns": round(under, 1),
                    "cost_ns": round(under - direct, 1),
                    "samples_ns": samples[label, load],
                }
            )
    return rows


if __name__ == "__main__":
    main(__doc__, "shim_overhead.py", measure)
