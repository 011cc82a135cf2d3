# ruff: noqa: E501
"""Time and memory of `weft analyze` and of Holistic Trace Analysis, on generated traces.

    python benchmarks/analyze_vs_hta.py --hta-python VENV/bin/python --out benchmarks/results

`--hta-python` is a Python with `HolisticTraceAnalysis` and `pandas<3`. Every run is a separate process; the
two tools take turns; wall time and peak memory come from the operating system. `--scale` adds a trace of 10M
events for weft alone. The synthetic trace has the event mix of a training step on A100 (one kernel per ten
events), the text layout of PyTorch's exporter, and a true overlap that is known by construction.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE_US = 1_700_000_000_000_000
KERNEL_NS, GAP_NS, COMM_NS = 40_320, 1_216, 300_512
COMM_EVERY = 50

HTA = """
import sys, warnings; warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
files = {i: f for i, f in enumerate(sys.argv[1:])}
table = TraceAnalysis(trace_files=files, trace_dir="").get_comm_comp_overlap(visualize=False)
print(list(table["comp_comm_overlap_pctg"]))
"""


def us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03}"


def write_trace(path: Path, events: int, rank: int = 0) -> None:
    """A trace of about `events` events in PyTorch's layout. Ten events per kernel."""
    ops = events // 10
    steps = max(ops // 2000, 2)
    host, device = BASE_US * 1000, BASE_US * 1000 + 50_000
    with gzip.open(path, "wt", compresslevel=4) as out:
        out.write(
            '\n{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA A100-SXM4-80GB", '
        )
        out.write(
            '"totalGlobalMem": 84990623744, "computeMajor": 8, "computeMinor": 0, "numSms": 108\n    }\n  ],\n'
        )
        out.write(
            f'  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": 8, "pg_count": 1}},\n'
        )
        out.write('  "traceEvents": [\n')
        comm_free = 0
        for op in range(ops):
            if op % (ops // steps) == 0:
                length = (ops // steps) * (KERNEL_NS + GAP_NS)
                out.write(
                    f'  {{\n    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{op // (ops // steps)}", '
                    f'"pid": 77, "tid": 77,\n    "ts": {us(host)}, "dur": {us(length)},\n    "args": {{\n      '
                    f'"External id": {op * 10}, "Ev Idx": {op}\n    }}\n  }},\n'
                )
            for level in range(4):
                out.write(
                    f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "aten::operator_{op % 97}_{level}", "pid": 77, '
                    f'"tid": 77,\n    "ts": {us(host + level * 700)}, "dur": {us(20_000 - level * 1500)},\n    "args": '
                    f'{{\n      "External id": {op * 10 + level}, "Ev Idx": {op}, "Input Dims": [[8, 1024, 8816], [], '
                    f'[1024]], "Input type": ["float", "Scalar", "float"], "Fwd thread id": 0, "Sequence number": {op}'
                    "\n    }\n  },\n"
                )
            correlation = op + 1
            launch = host + 8_000
            out.write(
                f'  {{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaStreamIsCapturing", "pid": 77, "tid": 77,\n'
                f'    "ts": {us(host + 5_000)}, "dur": {us(900)},\n    "args": {{\n      "External id": {op * 10}, '
                f'"cbid": 317, "correlation": {ops + op}\n    }}\n  }},\n'
                f'  {{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 77, "tid": 77,\n'
                f'    "ts": {us(launch)}, "dur": {us(6_123)},\n    "args": {{\n      "External id": {op * 10}, '
                f'"cbid": 211, "correlation": {correlation}\n    }}\n  }},\n'
                f'  {{\n    "ph": "s", "id": {correlation}, "pid": 77, "tid": 77, "ts": {us(launch)},\n    "cat": "ac2g", '
                '"name": "ac2g"\n  },\n'
                f'  {{\n    "ph": "f", "id": {ops + op}, "pid": 77, "tid": 77, "ts": {us(host + 5_000)},\n    "cat": '
                '"ac2g", "name": "ac2g", "bp": "e"\n  },\n'
            )
            if op % COMM_EVERY == COMM_EVERY - 1:
                name, stream, length = (
                    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long)",
                    20,
                    COMM_NS,
                )
                begin = max(device, comm_free)
                comm_free = begin + length
                more = (
                    ', "Collective name": "allreduce", "In msg nelems": 6637568, "Out msg nelems": 6637568, "Group size": '
                    '8, "dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"'
                )
            else:
                name = f"void at::native::vectorized_elementwise_kernel_{op % 41}<4, at::native::FillFunctor<float>, at::detail::Array<char*, 1> >(int, at::native::FillFunctor<float>, at::detail::Array<char*, 1>)"
                stream, length, more = 7, KERNEL_NS - op % 13, ""
                begin = device
                # Compute pauses during every other collective, so that overlap is partial.
                device += (
                    KERNEL_NS + GAP_NS + (5 * COMM_NS // 4 if op % (2 * COMM_EVERY) == COMM_EVERY else 0)
                )
            out.write(
                f'  {{\n    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream},\n    "ts": '
                f'{us(begin)}, "dur": {us(length)},\n    "args": {{\n      "External id": {op * 10},\n      "queued": 0, '
                f'"device": 0, "context": 1,\n      "stream": {stream}, "correlation": {correlation},\n      "registers per '
                f'thread": 32,\n      "shared memory": 0,\n      "blocks per SM": 18.962963,\n      "warps per SM": '
                f'75.851852,\n      "grid": [2048, 1, 1],\n      "block": [128, 1, 1],\n      "est. achieved occupancy %": '
                f"100{more}\n    }}\n  }},\n"
                f'  {{\n    "ph": "f", "id": {correlation}, "pid": 0, "tid": {stream}, "ts": {us(begin)},\n    "cat": "ac2g",'
                ' "name": "ac2g", "bp": "e"\n  },\n'
            )
            host = max(host + 22_000, device - 3_000_000)
        out.write(
            f'  {{\n    "name": "process_name", "ph": "M", "ts": {us(host)}, "pid": 77, "tid": 0,\n    "args": {{\n'
        )
        out.write('      "name": "python"\n    }\n  }\n  ],\n  "traceName": "synthetic"\n}\n')


def measure(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Wall-clock seconds and peak resident memory of a command and its children, as counted by the kernel."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, env=env)
        peak = samples = 0
        while True:
            # High-water marks only grow, so even rare samples miss little.
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            if time.perf_counter() - began > 0.4 * (samples + 1):
                peak, samples = max(peak, resident(process.pid)), samples + 1
            time.sleep(0.01)
        wall = time.perf_counter() - began
        out.seek(0)
        text = out.read().decode()
    if status:
        raise SystemExit(f"{command[:4]} ended with {status}: {text[-500:]}")
    return {
        "wall_s": round(wall, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mb": round(max(peak, usage.ru_maxrss * 1024) / 1e6, 1),
        "out": text,
    }


def resident(pid: int) -> int:
    """Current resident bytes of a process and its descendants (for the process itself, its high-water mark)."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            total += resident(int(child))
    except (OSError, ValueError):
        pass
    return total


def compare(files: list[Path], repeat: int, hta_python: str | None, env: dict[str, str]) -> dict[str, Any]:
    names = [str(file) for file in files]
    commands = {"weft": [sys.executable, "-m", "weft", "analyze", "--json", *names]}
    if hta_python:
        commands["hta"] = [hta_python, "-c", HTA, *names]
    runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in commands}
    answers: dict[str, Any] = {}
    for tool, command in commands.items():
        if tool == "weft":
            measure(command, env)  # warm up: compile its modules, load its files into the page cache
    for _ in range(repeat):
        for tool, command in commands.items():
            run = {**measure(command, env), "load": round(os.getloadavg()[0], 1)}
            text = run.pop("out")
            answers[tool] = (
                [rank["overlap_pct"] for rank in json.loads(text)["ranks"]]
                if tool == "weft"
                else text.strip().splitlines()[-1]
            )
            runs[tool].append(run)
            print(
                f"  {tool:5} {run['wall_s']:8.2f} s {run['cpu_s']:8.2f} s of CPU {run['peak_mb']:9.1f} MB"
                f", load {run['load']}",
                file=sys.stderr,
            )
    out: dict[str, Any] = {
        "files": len(files),
        "bytes": sum(f.stat().st_size for f in files),
        "overlap_pct": answers,
    }
    for tool, measured in runs.items():
        out[tool] = {
            **{
                key: round(statistics.median(run[key] for run in measured), 3)
                for key in ("wall_s", "cpu_s", "peak_mb")
            },
            "runs": measured,
        }
    if "hta" in out:
        out["times_faster"] = round(out["hta"]["wall_s"] / out["weft"]["wall_s"], 1)
        out["times_less_cpu"] = round(out["hta"]["cpu_s"] / out["weft"]["cpu_s"], 1)
        out["memory_ratio"] = round(out["weft"]["peak_mb"] / out["hta"]["peak_mb"], 3)
    return out


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hta-python", help="Python with HolisticTraceAnalysis; without it only weft is measured"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="cases whose title has this text")
    parser.add_argument("--scale", action="store_true", help="also 10M events, weft alone")
    parser.add_argument("--out", type=Path, help="folder for analyze_vs_hta.json and .md")
    args = parser.parse_args()
    root = Path(__file__).parent.parent
    # With bytecode, like an installed package.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = str(root / "src")
    command = " ".join(["python", *sys.argv]).replace(
        args.hta_python or "", "VENV/bin/python" if args.hta_python else ""
    )
    results: dict[str, Any] = {"command": command, "machine": machine(), "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[str, int, int, str | None, bool]] = [
            ("one rank, 1M events, gz", 1, args.events, args.hta_python, False),
            ("one rank, 1M events, plain", 1, args.events, args.hta_python, True),
            ("8 ranks of 100k events, gz", 8, args.events // 10, args.hta_python, False),
        ]
        if args.scale:
            cases.append(("one rank, 10M events, gz", 1, args.events * 10, None, False))
        for title, ranks, events, hta, plain in cases:
            if args.only not in title:
                continue
            files = [Path(folder) / f"rank{rank}.json.gz" for rank in range(ranks)]
            for rank, file in enumerate(files):
                write_trace(file, events, rank)
            if plain:
                files = [unpacked(file) for file in files]
            print(title, file=sys.stderr)
            case = compare(files, args.repeat if hta else 1, hta, env)
            results["cases"][title] = {"commit": commit(root), **case}
            if args.out:
                save(args.out, results)
    print(json.dumps(results, indent=2))


def commit(root: Path) -> str:
    """The commit of weft that was measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False).stdout.strip()


def save(out: Path, results: dict[str, Any]) -> None:
    """Writes the cases measured so far; with --only, cases of an earlier run stay."""
    path = out / "analyze_vs_hta.json"
    known = json.loads(path.read_text())["cases"] if path.exists() else {}
    merged = {**results, "cases": {**known, **results["cases"]}}
    path.write_text(json.dumps(merged, indent=2) + "\n")
    (out / "analyze_vs_hta.md").write_text(table(merged))


def unpacked(file: Path) -> Path:
    """The same trace as plain JSON."""
    target = file.with_suffix("")
    with gzip.open(file) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    return target


def table(results: dict[str, Any]) -> str:
    lines = [
        "# weft analyze and Holistic Trace Analysis",
        "",
        f"`{results['command']}` on {results['machine']['cpu']}, {results['machine']['cores']} cores,"
        f" Python {results['machine']['python']}. Medians; the raw runs are in the JSON file next to this one,"
        " with the load of the machine at each.",
        "",
        "| trace | weft | HTA | times faster | times less CPU | weft peak | HTA peak | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for title, case in results["cases"].items():
        hta = case.get("hta", {"wall_s": "-", "peak_mb": "-"})
        lines.append(
            f"| {title} | {case['weft']['wall_s']} s | {hta['wall_s']} s | {case.get('times_faster', '-')} |"
            f" {case.get('times_less_cpu', '-')} |"
            f" {case['weft']['peak_mb']} MB | {hta['peak_mb']} MB | {case.get('memory_ratio', '-')} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
