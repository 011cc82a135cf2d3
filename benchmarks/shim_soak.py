"""A long run of the shim against the fake driver: are all launches counted, is memory flat?

Threads launch 512 kernels of a changing set while the policy changes every 20 ms, modules are unloaded and
children are forked (tests/shim/soak.c). Counts must be exact; memory may grow by 50 MB. `--sanitizer` builds
program and shim with that sanitizer, and fails if it finds anything.

    python benchmarks/shim_soak.py --launches 1e9 --threads 16
    python benchmarks/shim_soak.py --launches 1e7 --sanitizer thread      # or address, undefined
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from hatch_build import LINK, build_shim  # noqa: E402

from weft.policy import Policy  # noqa: E402
from weft.rules import Rule  # noqa: E402
from weft.shim.inject import Job  # noqa: E402

POLICIES = (
    Policy(),
    Policy(residency=3, priority="high"),
    Policy(residency=2, when="overlap", head_start_us=5, rules=(Rule("gemm_3*", 1), Rule("gemm_4*", None))),
    Policy(priority="high", head_start_us=1),
)
GROWTH_KIB = 50_000


TESTS = ROOT / "tests/shim"
CC = ["cc", "-std=gnu11", "-O2", "-g", f"-I{ROOT / 'src/weft/shim/csrc'}"]


def build_fake(folder: Path) -> None:
    """Build the fake driver under the names that programs and linkers look for."""
    fake = [
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic,-soname,libcuda.so.1",
        *(str(TESTS / name) for name in ("fake_cuda.c", "fake_cuda_events.c")),
        "-lpthread",
    ]
    subprocess.run([*CC, *fake, "-o", str(folder / "libcuda.so.1")], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def build(folder: Path, sanitizer: str | None, library: Path | None) -> Path:
    build_fake(folder)
    link = [f"-L{folder}", "-lcuda", "-lpthread"]
    if sanitizer:
        flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
        library = library or build_shim(ROOT, folder / "libweft_shim.so", flags)
        link = [*flags, "-rdynamic", str(library), *link, *LINK, f"-Wl,-rpath,{library.parent}"]
    program = folder / "soak"
    subprocess.run([*CC, str(TESTS / "soak.c"), "-o", str(program), *link], check=True)
    return program


def soak(launches: int, threads: int, sanitizer: str | None, library: Path | None = None) -> dict[str, Any]:
    """One run, as a row; `clean` if everything is as it must be. `library`: a shim with that sanitizer."""
    with tempfile.TemporaryDirectory() as name:
        program = build(Path(name), sanitizer, library)
        start = time.monotonic()
        with Job(POLICIES[0]) as job:
            env = job.environment({**os.environ, "LD_LIBRARY_PATH": name})
            if sanitizer:
                del env["LD_PRELOAD"]
            running = subprocess.Popen(
                [program, str(threads), str(launches)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            changes = 0
            for policy in itertools.cycle(POLICIES):
                job.set_policy(policy)
                changes += 1
                try:
                    out, problems = running.communicate(timeout=0.02)
                    break
                except subprocess.TimeoutExpired:
                    continue
            counted = job.collect()
    made, failed, growth_kib = map(int, out.split() or (0, 1, 0))
    kernels = sum(kernel["launches"] for kernel in counted["kernels"] if kernel["kind"] != "weft")
    clean = not failed and not problems and running.returncode == 0 and kernels == made
    return {
        "launches": made,
        "counted": kernels,
        "failed": failed,
        "threads": threads,
        "sanitizer": sanitizer,
        "growth_kib": growth_kib,
        "policy_changes": changes,
        "processes": len(counted["processes"]),
        "seconds": round(time.monotonic() - start, 1),
        "problems": problems[-2000:],
        "clean": clean and (sanitizer is not None or growth_kib < GROWTH_KIB),
    }


def commit() -> str:
    """The commit that was run, with a + if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--launches", type=lambda text: int(float(text)), default=1_000_000_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--sanitizer", choices=("address", "undefined", "thread"))
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add this row to")
    args = parser.parse_args()
    row = soak(args.launches, args.threads, args.sanitizer)
    print(json.dumps(row))
    if args.out:
        command = " ".join(["python", "benchmarks/shim_soak.py", *sys.argv[1:]])
        with args.out.open("a") as file:
            file.write(json.dumps({"command": command, "commit": commit(), **row}) + "\n")
    return 0 if row["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
