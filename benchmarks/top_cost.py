"""What does `weft top` cost? The CPU time of its process, against jobs of a fake driver.

    python benchmarks/top_cost.py [--seconds 30] [--out benchmarks/results/shim/top_cost.json]

A job of 4 ranks with 12 kernels each, and one of 64 ranks with 120. A rank launches each of its kernels once
and ends a step, four times a second. `weft top JOB` runs on a terminal (a pseudo-terminal of 120 by 50
characters), then with `--json`. The share of a core is the time that all its threads ran after startup (the
kernel's schedstat, in nanoseconds), over the seconds that passed. CPU time hardly depends on other load.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from shim_soak import build_fake, commit  # noqa: E402

JOBS = ((4, 12), (64, 120))
SETTLE_S = 4.0
RANK = """
import os, sys, time
from driver import kernel, launch
from weft.shim.step_times import StepWriter
names = ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"] + [f"gemm_{i}" for i in range(1, int(sys.argv[1]))]
kernels = [kernel(name) for name in names]
steps = StepWriter(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
while not os.path.exists("stop"):
    for each in kernels:
        launch(each)
    steps.step()
    time.sleep(0.25)
"""
LAUNCHER = """
import os, subprocess, sys
ranks, kernels = int(sys.argv[1]), sys.argv[2]
env = dict(os.environ, WORLD_SIZE=str(ranks))
command = [sys.executable, "rank.py", kernels]
all = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(ranks)]
sys.exit(max(process.wait() for process in all))
"""


def cpu_ns(pid: int) -> int:
    """The time in ns that the threads of a process ran."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def terminal() -> tuple[int, int]:
    """Both ends of a pseudo-terminal of 120 by 50 characters; a thread keeps reading its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))

    def drain() -> None:
        try:
            while os.read(ours, 65536):
                pass
        except OSError:  # closed
            return

    threading.Thread(target=drain, daemon=True).start()
    return ours, theirs


def watched(job: str, env: dict[str, str], seconds: float, *options: str) -> dict[str, Any]:
    """The share of a core that `weft top` takes."""
    ours, theirs = terminal()
    stdout = subprocess.DEVNULL if options else theirs
    command = [sys.executable, "-m", "weft", "top", job, *options]
    top = subprocess.Popen(command, env={**env, "TERM": "xterm"}, stdin=theirs, stdout=stdout)
    os.close(theirs)
    try:
        time.sleep(SETTLE_S)
        begin, before = time.monotonic(), cpu_ns(top.pid)
        time.sleep(seconds)
        used_ns, passed_s = cpu_ns(top.pid) - before, time.monotonic() - begin
    finally:
        top.terminate()
        top.wait()
        os.close(ours)
    return {
        "view": " ".join(options) or "terminal",
        "cpu_ms": round(used_ns / 1e6, 1),
        "seconds": round(passed_s, 1),
        "core_pct": round(100 * used_ns / 1e9 / passed_s, 2),
    }


def measured(ranks: int, kernels: int, seconds: float, fake: Path) -> list[dict[str, Any]]:
    """One job, watched in each view."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rank.py").write_text(RANK)
        (folder / "launcher.py").write_text(LAUNCHER)
        paths = f"{ROOT / 'src'}:{ROOT / 'tests/shim'}"
        env = {**os.environ, "TMPDIR": name, "PYTHONPATH": paths, "LD_LIBRARY_PATH": str(fake)}
        weft = [sys.executable, "-m", "weft", "run", "--", sys.executable]
        job = subprocess.Popen([*weft, "launcher.py", str(ranks), str(kernels)], cwd=folder, env=env)
        try:
            while len(list(folder.glob("weft-job-*/steps.*"))) < ranks:
                if job.poll() is not None:
                    raise SystemExit(f"the job ended early, exit code {job.returncode}")
                time.sleep(0.1)
            (job_name,) = [path.name.removeprefix("weft-job-") for path in folder.glob("weft-job-*")]
            views = [watched(job_name, env, seconds, *options) for options in ((), ("--json",))]
        finally:
            (folder / "stop").touch()
            job.wait()
    return [{"ranks": ranks, "kernels_per_rank": kernels, **view} for view in views]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        build_fake(Path(name))
        rows = [row for job in JOBS for row in measured(*job, args.seconds, Path(name))]
    command = " ".join(["python", "benchmarks/top_cost.py", *sys.argv[1:]])
    text = json.dumps({"command": command, "commit": commit(), "rows": rows}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
