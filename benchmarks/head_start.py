"""Does a head start help a persistent cuBLAS GEMM and an all-reduce share one GPU, through `weft run`?

    python benchmarks/head_start.py --nccl libnccl.so.2 [--ctas 4 8] [--repeats 3] [--out FILE]

Runs this file as an ordinary program (torch and NCCL, no weft), with and without options of `weft run`,
interleaved. The program is a pipeline of 8192³ bf16 GEMMs, each followed by an all-reduce of the same length
between two NCCL ranks on one GPU. It times compute alone, communication alone, the two in sequence, and the
two overlapped, and computes the fraction of ideal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS, ROUNDS = 6, 15
WAYS = {
    "plain overlap, without weft": None,
    "weft run": (),
    "weft run --head-start 5": ("--head-start", "5"),
    "weft run --priority high": ("--priority", "high"),
    "weft run --priority high --head-start 5": ("--priority", "high", "--head-start", "5"),
}


def program() -> None:
    """The unmodified program: prints its four medians in milliseconds and the fraction of ideal."""
    import torch

    sys.path.insert(0, str(ROOT / "tests/gpu/programs"))
    from nccl_ranks import Ranks

    torch.manual_seed(0)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    ranks, main = Ranks(2), torch.cuda.current_stream()

    def pipeline(buffers: list[torch.Tensor], compute: bool, communicate: bool, sequential: bool) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000)  # queue all launches before the first kernel starts
        start.record()
        ranks.wait_for(start)
        for _ in range(ITERATIONS):
            if compute:
                torch.mm(a, b, out=c)
                done = torch.cuda.Event()
                done.record()
                ranks.wait_for(done)
            if communicate:
                ranks.all_reduce(buffers)
            if sequential:
                ranks.joined_by(main)
        ranks.joined_by(main)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def median(buffers: list[torch.Tensor], *mode: bool) -> float:
        return statistics.median(pipeline(buffers, *mode) for _ in range(ROUNDS))

    def buffers_of(size: int) -> list[torch.Tensor]:
        return [torch.randn(size, device="cuda").bfloat16() for _ in ranks.streams]

    size = 64 << 20
    pipeline(buffers_of(size), True, True, False)
    for _ in range(3):  # until the all-reduce takes as long as the GEMM
        buffers = buffers_of(size)
        ratio = median(buffers, False, True, False) / median(buffers, True, False, False)
        if abs(ratio - 1) < 0.005:
            break
        size = int(size / ratio) // 4096 * 4096
    buffers = buffers_of(size)
    modes = {
        "compute": (True, False, False),
        "comm": (False, True, False),
        "sequential": (True, True, True),
        "overlapped": (True, True, False),
    }
    samples: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(ROUNDS + 2):
        for name in random.sample(list(modes), len(modes)):
            samples[name].append(pipeline(buffers, *modes[name]))
    ms = {name: statistics.median(values[2:]) for name, values in samples.items()}
    ideal = max(ms["compute"], ms["comm"]) + min(ms["compute"], ms["comm"]) / ITERATIONS
    fraction = (ms["sequential"] - ms["overlapped"]) / (ms["sequential"] - ideal)
    print(
        json.dumps(
            {**ms, "ideal": ideal, "fraction_of_ideal": fraction, "bytes": size * 2, "samples": samples}
        )
    )


def measure(way: str, ctas: int, nccl: str) -> dict[str, object]:
    command = [sys.executable, __file__, "--program"]
    options = WAYS[way]
    with tempfile.NamedTemporaryFile(suffix=".json") as stats:
        if options is not None:
            command = [sys.executable, "-m", "weft", "run", *options, "--stats", stats.name, "--", *command]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "WEFT_TEST_NCCL": nccl,
            "NCCL_MAX_CTAS": str(ctas),
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            return {"way": way, "ctas": ctas, "error": done.stderr[-500:]}
        row = {"way": way, "ctas": ctas, **json.loads(done.stdout.splitlines()[-1])}
        row["said"] = done.stderr.strip().splitlines()[-1:] if options is not None else []
        return row


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nccl", type=Path)
    parser.add_argument("--ctas", type=int, nargs="+", default=[8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.program:
        return program()
    rows = []
    for _ in range(args.repeats):
        for ctas in args.ctas:
            for way in random.sample(list(WAYS), len(WAYS)):
                row = measure(way, ctas, str(args.nccl.resolve()))
                rows.append(row)
                brief = {k: v for k, v in row.items() if k != "samples"}
                print(json.dumps(brief), flush=True)
    print(f"\n{'':<44}{'CTAs':>5}{'fraction of ideal':>20}")
    for ctas in args.ctas:
        for way in WAYS:
            found = [
                float(r["fraction_of_ideal"])
                for r in rows
                if r["way"] == way and r["ctas"] == ctas and "error" not in r
            ]
            if found:
                each = sorted(round(fraction, 3) for fraction in found)
                print(f"{way:<44}{ctas:>5}{statistics.median(found):>12.1%}   {each}")
    if args.out:
        args.out.write_text(json.dumps({"command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
