# ruff: noqa: E501
"""Fuzz the trace reader for crashes, hangs and memory growth; coverage-guided, runs until stopped.

    python benchmarks/fuzz_reader.py CORPUS_DIR -max_total_time=600 -rss_limit_mb=2048 -timeout=20

Needs `atheris` in addition to weft's dependencies. A fault is an exception other than WeftError, a run of more
than `-timeout` seconds, or more memory than `-rss_limit_mb`. Seeds are small traces that this file makes.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

with atheris.instrument_imports(include=["weft"]):
    from weft.errors import WeftError
    from weft.trace import files, scan
    from weft.trace.analysis import analyze_traces
    from weft.trace.kineto import read

# Small limits let the fuzzer reach the same code with small inputs.
scan.CHUNK_BYTES = 512
scan.MAX_EVENT_BYTES = 1 << 16
files.BLOCK_BYTES = 1 << 12
files.FREE_BYTES = 1 << 20

TARGET = Path(tempfile.mkdtemp()) / "rank0.json"


def one_input(data: bytes) -> None:
    """Read the bytes as a trace; the first byte decides whether they are compressed first."""
    if data[:1] == b"\x01":
        data = gzip.compress(data[1:], 1)
    TARGET.write_bytes(data)
    try:
        analysis = analyze_traces(read(TARGET))
    except WeftError:
        return
    json.dumps(analysis.to_json(), allow_nan=False)
    for rank in analysis.ranks:
        if sum(rank.attribution.totals().values()) != rank.figures.exposed_ns:
            raise AssertionError("the causes do not add up")


def seeds(folder: Path) -> None:
    """Traces that the fuzzer starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    kernel = {
        "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2,
        "args": {"device": 0, "stream": 7, "correlation": 3, "grid": [8, 1, 1], "block": [544, 1, 1],
                 "registers per thread": 96, "shared memory": 1024, "Collective name": "allreduce",
                 "dtype": "Float", "In msg nelems": 5, "Out msg nelems": 5, "Group size": 2, "Process Group Name": "0"},
    }  # fmt: skip
    launch = {
        **kernel,
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": 1,
        "args": {"correlation": 3},
    }
    other = {**kernel, "name": "gemm", "ts": 2, "args": {"device": 0, "stream": 8, "correlation": 4}}
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9, "tid": 1}
    copy = {
        **kernel,
        "cat": "gpu_memcpy",
        "name": "Memcpy PtoP",
        "args": {"bytes": 7, "device": 0, "stream": 9},
    }
    wait = {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "ts": 1, "dur": 0,
            "args": {"stream": 7, "wait_on_stream": 8, "wait_on_cuda_event_record_corr_id": 5}}  # fmt: skip
    events = [kernel, launch, other, step, copy, wait]
    document = {"distributedInfo": {"rank": 1, "world_size": 2}, "traceEvents": events, "traceName": "x"}
    (folder / "object").write_text(json.dumps(document))
    (folder / "list").write_text(json.dumps(events))
    (folder / "packed").write_bytes(b"\x01" + json.dumps(document).encode())
    (folder / "gzip").write_bytes(gzip.compress(json.dumps(document, indent=1).encode()))


def main() -> None:
    folders = [Path(a) for a in sys.argv[1:] if not a.startswith("-")]
    for folder in folders[:1]:
        seeds(folder)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
