# ruff: noqa: E501
"""Does any input make a reader crash, hang or use too much memory?

    python benchmarks/fuzz_reader.py --seconds 1200 [--seed 0]

Mutates small traces of every format (Kineto JSON plain and packed, Nsight Systems SQLite, XLA profiles,
rocprofv3 tables) and analyzes them, in a child process per slice of time with an address-space limit. A fault
is an exception other than WeftError, a signal, an input that takes more than 20 s, or more than 2 GB. Faults
are kept in --keep.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "tests/trace"))

MEMORY_BYTES = 2 << 30
INPUT_S = 20
SLICE_S = 30
TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"null", b"NaN", b"-1", b"1e999", b"0.5", b"true",
    b'"kernel"', b'"ts"', b'"args"', b"\xff", b"\x00", b"\x0a\x80\x80\x80\x80\x10", b"9223372036854775807", b"\xef\xbb\xbf",
)  # fmt: skip


def seeds() -> list[tuple[str, bytes]]:
    """Small traces, each with a file name for its format."""
    from test_formats import GEMM, NCCL, ROCPROF, as_nsys, as_rocprof_json, xspace
    from trace_programs import comm, compute, run, wait

    step = [compute(100_000), comm(150_000), wait()]
    traces = run([step * 2, step * 2], [0, 0])
    text = traces[0].text().encode()
    with tempfile.TemporaryDirectory() as folder:
        base = as_nsys(Path(folder) / "r.sqlite", traces).read_bytes()
    lines = [("Stream #1", [(GEMM, 0, 900)]), ("Stream #2", [(NCCL, 500, 2_000)])]
    operations = [
        ("%while.1 = (s32[]) while((s32[]) %tuple), body=%body", 0, 3_000),
        ("%fusion.2 = f32[8]{0:T(256)} fusion(f32[8]{0} %p), calls=%fused", 0, 900),
        ("%all-reduce = f32[8]{0:T(256)} all-reduce(f32[8]{0} %fusion.2), to_apply=%add", 900, 2_000),
        ("%copy-done.3 = f32[8]{0:S(5)} copy-done((f32[8]{0:S(5)}, u32[]) %copy-start.3)", 2_000, 3_000),
    ]
    return [
        ("rank0.json", text),
        ("rank0.json", json.dumps(json.loads(text)["traceEvents"]).encode()),
        ("rank0.json.gz", gzip.compress(text, 1)),
        ("r.sqlite", base),
        ("h.xplane.pb", xspace("/device:GPU:0", lines, [GEMM, NCCL])),
        (
            "h.xplane.pb",
            xspace("/device:TPU:0", [("XLA Ops", operations)], [name for name, _, _ in operations]),
        ),
        ("h.xplane.pb", (ROOT / "tests/data/traces/mi300x_jax.xplane.pb").read_bytes()[:20_000]),
        ("1_kernel_trace.csv", ROCPROF.encode()),
        ("1_results.json", as_rocprof_json(ROCPROF).encode()),
    ]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The data with a few changes: flipped, cut, repeated, inserted tokens."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(out) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(out):
            out[at] = draw.randrange(256)
        elif kind == 1:
            del out[at : at + draw.randrange(1, 200)]
        elif kind == 2:
            out[at:at] = draw.choice(TOKENS)
        elif kind == 3:
            out[at:at] = out[at : at + draw.randrange(1, 400)]
        elif kind == 4 and draw.random() < 0.2:
            del out[at:]
        elif at + 8 < len(out):
            out[at : at + 8] = draw.randbytes(8)
    return bytes(out)


def one_input(path: Path) -> None:
    """Analyze one file; raises whatever a user would see instead of a clear error."""
    from weft.errors import WeftError
    from weft.trace import formats
    from weft.trace.analysis import analyze_traces

    try:
        analysis = analyze_traces(formats.read(path))
    except WeftError:
        return
    json.dumps(analysis.to_json(), allow_nan=False)
    for rank in analysis.ranks:
        if sum(rank.attribution.totals().values()) != rank.figures.exposed_ns:
            raise AssertionError("the causes do not add up")


def child(seed: int, seconds: float, keep: Path) -> None:
    """Run inputs until the time is over; if the process dies, the current input stays in `keep`."""
    from weft.trace import files, scan

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES + (1 << 30), MEMORY_BYTES + (1 << 30)))
    faulthandler.enable()
    scan.CHUNK_BYTES, scan.MAX_EVENT_BYTES = 512, 1 << 16
    files.BLOCK_BYTES, files.FREE_BYTES = 1 << 12, 1 << 20
    draw, pool = random.Random(seed), seeds()
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        name, data = draw.choice(pool)
        path = keep / f"{seed}-{name}"
        path.write_bytes(
            gzip.compress(mutated(gzip.decompress(data), draw), 1)
            if name.endswith("gz") and count % 2
            else mutated(data, draw)
        )
        signal.alarm(INPUT_S)
        one_input(path)
        signal.alarm(0)
        path.unlink()
        count += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"inputs": count, "peak_mb": peak // 1000}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "weft-fuzz")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.child is not None:
        child(args.child, args.seconds, args.keep)
        return
    until, seed, inputs, peak, faults = time.monotonic() + args.seconds, args.seed, 0, 0, 0
    while time.monotonic() < until:
        command = [
            sys.executable,
            __file__,
            "--child",
            str(seed),
            "--seconds",
            str(SLICE_S),
            "--keep",
            str(args.keep),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            faults += 1
            print(f"seed {seed} ended with {done.returncode}: {done.stderr[-2000:]}", file=sys.stderr)
        else:
            result = json.loads(done.stdout.splitlines()[-1])
            inputs, peak = inputs + result["inputs"], max(peak, result["peak_mb"])
        seed += 1
    print(json.dumps({"seconds": args.seconds, "inputs": inputs, "peak_mb": peak, "faults": faults}))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
