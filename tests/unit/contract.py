"""The command-line contract: the help of every command, and the JSON that commands write.

Run it to write the golden files of the weft on PYTHONPATH: `python tests/unit/contract.py tests/golden`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import weft
from weft.cli.output import versioned

ROOT = Path(__file__).parents[2]
SOURCE = Path(weft.__file__).parents[1]
TRACES = ROOT / "tests/data/traces"
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}


# --- help ---------------------------------------------------------------------------------------------------


def run_weft(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `weft WORDS` away from any GPU, terminal and earlier verdicts."""
    surroundings = {
        **os.environ,
        "PYTHONPATH": f"{SOURCE}:{ROOT / 'tests/shim'}",
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",
        **env,
    }
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(command, cwd=cwd, env=surroundings, capture_output=True, text=True, timeout=100)


def help_texts() -> dict[str, str]:
    """The help of `weft` and of each of its commands, by command name."""
    root = _help()
    return {"weft": root, **{name: _help(name) for name in commands_of(root)}}


def _help(*words: str) -> str:
    done = run_weft(*words, "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands_of(root_help: str) -> list[str]:
    """The commands that the help of `weft` lists."""
    return re.findall(r"^  ([a-z]\w*)\s", _section(root_help, "Commands"), re.MULTILINE)


def options_of(text: str) -> dict[str, bool]:
    """Every spelling of every option in a command's help, and whether it takes a value."""
    found = {}
    for line in _section(text, "Options").splitlines():
        if re.match(r"  -", line):
            declaration = re.split(r"\s{2,}", line.strip())[0]
            spellings = re.findall(r"(?<![\w-])--?[a-z][\w-]*", declaration)
            rest = re.sub(r"(?<![\w-])--?[a-z][\w-]*|[,/\s]", "", declaration)
            found.update({spelling: bool(rest) for spelling in spellings})
    return found


def arguments_of(text: str) -> list[str]:
    """The arguments in the usage line: `[WORKLOAD]` is optional, `TRACE...` is not."""
    usage = " ".join(text.split("\n\n")[0].split())
    # Brackets hold one argument, even with a space in it: `[[-- CMD…]]...`.
    return re.findall(r"\[[^\]]*\]+\S*|\S+", usage.partition("[OPTIONS]")[2])


def _section(text: str, title: str) -> str:
    after = re.search(rf"^{title}:\n((?:[ ]{{2}}.*\n|\n)*)", text, re.MULTILINE)
    return after[1] if after else ""


# --- JSON ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One document that a command writes, and the parts of it whose keys are data."""

    make: Callable[[Path], Any]
    maps: tuple[str, ...] = ()
    """Paths of objects whose keys are names; all their values share one description."""
    policies: bool = False
    """Whether to describe the keys of policies. Otherwise a policy is one value: its keys are a result."""


def printed(*words: str, codes: tuple[int, ...] = (0,)) -> Callable[[Path], Any]:
    """The document that `weft WORDS` prints; `{folder}` in a word is the folder of the case."""

    def make(folder: Path) -> Any:
        done = run_weft(*(word.format(folder=folder) for word in words), cwd=folder, WEFT_STORE=f"{folder}/s")
        assert done.returncode in codes, done.stderr
        return json.loads(done.stdout)

    return make


def written(name: str, *words: str) -> Callable[[Path], Any]:
    """The document, or the rows, in a file that `weft WORDS` writes."""

    def make(folder: Path) -> Any:
        printed(*words)(folder)
        text = (folder / name).read_text()
        return (
            [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)
        )

    return make


def counted(*options: str) -> Callable[[Path], Any]:
    """The statistics of a program that launches kernels and collectives on the fake driver."""

    def make(folder: Path) -> Any:
        (folder / "policy.json").write_text(json.dumps(POLICY))
        sources, library = sorted((ROOT / "tests/shim").glob("fake_cuda*.c")), folder / "libcuda.so.1"
        flags = ("-std=gnu11", "-shared", "-fPIC", "-Wl,-Bsymbolic,-soname,libcuda.so.1")
        headers = f"-I{SOURCE / 'weft/shim/csrc'}"
        subprocess.run(
            ["cc", *flags, headers, "-o", str(library), *map(str, sources), "-lpthread"],
            check=True,
            cwd=folder,
        )
        program = textwrap.dedent("""
            from driver import *
            launch(kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), stream=7)
            for _ in range(3):
                launch(kernel("gemm"))
        """)
        words = ("run", "--stats", "stats.json", *options, "--", sys.executable, "-c", program)
        done = run_weft(*words, cwd=folder, LD_LIBRARY_PATH=str(folder), HOME=str(folder))
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "stats.json").read_text())

    return make


def stored(*words: str) -> Callable[[Path], Any]:
    """What `weft store WORDS` prints of a store with one verdict, imported from an export of version 1."""

    def make(folder: Path) -> Any:
        entry = {
            **{
                "gpu": "NVIDIA H200",
                "driver": "580.65",
                "nccl": "2.28.3",
                "torch": "2.11.0",
                "workload": "w",
            },
            **{"policy": {"version": 1}, "verdict": {"verdict": {"text": "leave it alone", "gain_pct": 0.0}}},
            **{"made": 1_790_000_000.0, "weft": "0.1.0"},
        }
        document = {"kind": "weft verdicts", "version": 1, "entries": [entry]}
        (folder / "verdicts.json").write_text(json.dumps(document))
        imported = printed("store", "import", "verdicts.json", "--json")(folder)
        return printed("store", *words, "--json")(folder) if words else imported

    return make


def exported(folder: Path) -> Any:
    """The file that `weft store export` writes."""
    stored("export", "again.json")(folder)
    return json.loads((folder / "again.json").read_text())


def reproduced(paper: str) -> Callable[[Path], Any]:
    """The document of `weft reproduce PAPER` for a few cells; all cells take a minute."""

    def make(folder: Path) -> Any:
        from weft.reproduce import claims, concurrent_collectives, finer_grain, resource_aware, time_ratio
        from weft.reproduce.figure import no_progress

        every = time_ratio.published_tables()
        keep = [every.grid.index(n) for n in (8, 64)]
        tables = {gpu: [[t[j][i] for i in keep] for j in keep] for gpu, t in every.tables.items()}
        few = replace(every, grid=(8, 64), tables=tables)
        with ExitStack() as small:
            for module, name, value in (
                (time_ratio, "published_tables", lambda: few),
                (time_ratio, "CHOICES", (time_ratio.SharedFigures(),)),
                (claims, "published_tables", lambda: few),
                (claims, "OPTION_SIDES", (8,)),
                (finer_grain, "FICCO_SHAPES", finer_grain.FICCO_SHAPES[:2]),
                (concurrent_collectives, "SHAPES_C3", ((2048, 2048, 2048),)),
            ):
                small.enter_context(mock.patch.object(module, name, value))
            run = {
                resource_aware.PAPER: resource_aware.reproduce_overlap,
                finer_grain.PAPER_ID: finer_grain.reproduce_ficco,
            }
            return json.loads(json.dumps(versioned(run[paper](no_progress).to_dict())))

    return make


POLICY = {
    "version": 1,
    "comm": {"priority": "high", "head_start_us": 5.0, "max_ctas": 8, "engine": "dma"},
    "compute": {
        **{"residency": 2, "when": "overlap", "sm_reserve": 16},
        "rules": [{"kernel": "*gemm*", "residency": 3}, {"kernel": "*norm*", "residency": None}],
    },
    "schedule": "shard",
}
"""Every control of a policy, version 1."""


def tuned(folder: Path) -> Any:
    """The statistics of a DDP job of two ranks over gloo that live tuning made faster."""
    job = ROOT / "tests/jobs/live_job.py"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_weft(
        *("run", "--tune", "--stats", "stats.json", "--", *launcher, str(job)),
        cwd=folder,
        PYTHONPATH=f"{SOURCE}:{job.parent}",
        RECORD=str(folder),
        WEFT_STORE=str(folder / "store"),
        HOME=str(folder),
        OMP_NUM_THREADS="1",
        EFFECTS='{"ctas6": 1.8, "ctas16": 0.5, "ctas24": 0.8, "head5": 1.1, "priority": 1.1}',
        WEFT_TUNE_CONTROLS="live_job:FakeControls",
        STEPS="80",
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "stats.json").read_text())


GEMM = ("--gemm", "2048x2048x2048", "--dtype", "bf16", "--tile", "64x64x64", "--grid", "32x32")
WORKLOAD = (*GEMM, "--collective", "all_reduce", "--bytes", "64MiB", "--ranks", "2", "--iterations", "4")
TUNE = ("tune", *WORKLOAD, "--device", "sim:h200-ghost", "--json")
PLAN = ("plan", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "16", "--tp", "2", "--json")
EXPERTS = ("plan", "--model", "mixtral-8x7b", "--gpu", "h100", "--gpus", "32", "--ep", "8", "--json")
EXPLORE = ("explore", "--device", "sim:mi300x", "--json")
BENCH = ("bench", "quick", "--device", "sim:h100", "--out", "{folder}", "--only", "cb-ar*", "--json")

CASES = {
    "analyze": Case(printed("analyze", str(TRACES / "h200_ddp_2ranks"), "--json")),
    "analyze_8_ranks": Case(printed("analyze", str(TRACES / "v100_dlrm_8ranks"), "--json")),
    "analyze_compare": Case(
        printed("analyze", str(TRACES / "h200_ddp_2ranks"), str(TRACES / "h200_fsdp_2ranks"), "--json")
    ),
    "bench": Case(printed(*BENCH)),
    "bench_file": Case(written("quick.jsonl", *BENCH), maps=("[].machine.profile",)),
    "doctor": Case(printed("doctor", "--json", codes=(0, 1))),
    "explore": Case(printed(*EXPLORE, "--gemm", "32768x3584x4096")),
    "explore_characterize": Case(printed(*EXPLORE, "--characterize")),
    "plan": Case(printed(*PLAN)),
    "plan_calibrate": Case(
        printed(
            *("plan", "--layers", "8", "--hidden", "4096", "--heads", "32", "--vocab", "64", "--seq", "2048"),
            *("--gpu", "h200", "--gpus", "64", "--sharding", "none", "--json"),
            *("--calibrate", str(TRACES / "h200_ddp_2ranks/rank0.json.gz"), "--traced", "layers=4 gpus=2"),
        )
    ),
    "plan_experts": Case(printed(*EXPERTS)),
    "plan_scale": Case(printed(*PLAN[:5], "--tp", "2", "--scale", "8..64", "--json")),
    "plan_sweep": Case(printed(*PLAN, "--sweep", "--limit", "4")),
    "reproduce": Case(reproduced("2606.09200"), maps=(".summary.tables",)),
    "reproduce_ficco": Case(reproduced("2512.10236"), maps=(".summary.operations",)),
    "run_stats": Case(counted("--policy", "policy.json"), policies=True),
    "run_tune_stats": Case(counted("--tune")),
    "run_tune_stats_job": Case(tuned),
    "store": Case(stored("list")),
    "store_export": Case(exported),
    "store_forget": Case(stored("forget", "--all")),
    "store_import": Case(stored()),
    "tune": Case(printed(*TUNE)),
    "tune_policy": Case(written("policy.json", *TUNE, "--out", "{folder}/policy.json")),
}


def shape(case: Case, document: Any) -> dict[str, str]:
    """Every key path of a document with its value types, plus `optional` if some parents lack the key."""
    seen: dict[str, dict[str, int]] = {}
    _describe(case, document, "", seen)
    return {path: _types(path, counts, seen) for path, counts in sorted(seen.items())}


def _describe(case: Case, value: Any, path: str, seen: dict[str, dict[str, int]]) -> None:
    policy = isinstance(value, dict) and "version" in value and value.keys() <= {*POLICY, "framework"}
    kind = "null" if value is None else "policy" if policy else TYPES[type(value)]
    counts = seen.setdefault(path, {})
    counts[kind] = counts.get(kind, 0) + 1
    if isinstance(value, dict) and (not policy or case.policies):
        for key, part in value.items():
            _describe(case, part, f"{path}.{'*' if path in case.maps else key}", seen)
    elif isinstance(value, list):
        for part in value:
            _describe(case, part, f"{path}[]", seen)


def _types(path: str, counts: dict[str, int], seen: dict[str, dict[str, int]]) -> str:
    parents = {} if path.endswith("[]") else seen.get(path.rpartition(".")[0], {})
    always = sum(counts.values()) >= parents.get("object", 0) + parents.get("policy", 0)
    return ("" if always else "optional ") + " or ".join(sorted(counts))


def lost(golden: dict[str, str], now: dict[str, str]) -> list[str]:
    """Keys that the golden document has and the new one lacks, or has with another type."""
    problems = []
    for path, before in golden.items():
        if path not in now:
            problems.append(f"{path} is gone")
        elif before != "null" and not _words(now[path]) <= _words(before):
            problems.append(f"{path} was {before}, is {now[path]}")
    return problems


def _words(types: str) -> set[str]:
    return set(types.split()) - {"or"}


def main(target: Path) -> None:
    """Write the golden files."""
    (target / "help").mkdir(parents=True, exist_ok=True)
    (target / "json").mkdir(exist_ok=True)
    for name, text in help_texts().items():
        (target / "help" / f"{name}.txt").write_text(text)
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = shape(case, case.make(Path(folder)))
        (target / "json" / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
