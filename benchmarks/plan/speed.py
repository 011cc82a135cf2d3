"""How long does a plan take, how much memory, and does it grow with the number of GPUs?

python benchmarks/plan/speed.py [--out benchmarks/results/plan]
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.plan.config import TrainingJob
from weft.plan.step import Prediction, predict
from weft.plan.sweep import room, sweep

ROOT = Path(__file__).resolve().parents[2]
FIRST = """
import time
start = time.perf_counter()
from weft.plan import TrainingJob, predict
job = TrainingJob(model="llama3-405b", gpu="h100", gpus=16384, tp=8, pp=16, recompute="full", policy="auto")
predict(job)
print(time.perf_counter() - start)
"""


def first_s() -> float:
    """One configuration at 16,384 GPUs in a fresh process, imports included."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout)


def by_gpus() -> dict[int, float]:
    """Milliseconds of a prediction, warm, by the number of GPUs."""
    found = {}
    for gpus in (128, 512, 2048, 8192, 16384, 131072):
        job = TrainingJob(
            model="llama3-405b", gpu="h100", gpus=gpus, tp=8, pp=16, recompute="full", policy="auto"
        )  # type: ignore[arg-type]
        predict(job)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            predict(job)
            times.append(time.perf_counter() - start)
        found[gpus] = round(1e3 * sorted(times)[10], 2)
    return found


def sweep_s() -> dict[str, Any]:
    """A sweep of 2,000 splits of DeepSeek-V3: all without controls, the fastest also with them."""
    start, busy = time.perf_counter(), time.process_time()
    options = {"model": "deepseek-v3", "gpu": "h100", "gpus": 1024, "global_batch": 4096}
    predicted = 0

    def run(job: TrainingJob) -> Prediction:
        nonlocal predicted
        predicted += 1
        return predict(job)

    found = sweep(options, fixed={"global_batch"}, limit=2000, run=run, fits=room())
    return {
        "splits": predicted - len(found.rows) // 2,
        "predictions": predicted,
        "rows": len(found.rows),
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(time.process_time() - busy, 2),
    }


def main() -> None:
    first = first_s()
    answer: dict[str, Any] = {
        "first_s": round(first, 3),
        "warm_ms_by_gpus": by_gpus(),
        "sweep": sweep_s(),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, shared with other work",
        "command": "python benchmarks/plan/speed.py --out benchmarks/results/plan",
    }
    print(json.dumps(answer, indent=1))
    if "--out" in sys.argv:
        folder = Path(sys.argv[sys.argv.index("--out") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "speed.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
