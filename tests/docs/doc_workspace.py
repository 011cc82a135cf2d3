"""A folder in which to type the commands of the docs: the repository and the files that the docs assume."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from doc_blocks import ROOT, Command

TRACES = ROOT / "tests/data/traces"
LLAMA = {  # the fields of meta-llama/Llama-2-7b-hf's config.json that describe its shape
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
"""
CLUSTER = 'gpu = "h100"\nnodes = 8\ngpus_per_node = 8\nrail_gbit = 400\n'
LIMIT_S = 280  # for all commands of a page


def make(folder: Path) -> Path:
    """Fill the folder with links to the repository's files, and with inputs named as in the docs."""
    for name in ("benchmarks", "docs", "examples", "scripts", "src", "tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("traces", "run", "before", "after"):
        shutil.copytree(TRACES / "h200_ddp_2ranks", folder / name)
    (folder / "results").mkdir()
    shutil.copy(ROOT / "benchmarks/results/lab/quick.jsonl", folder / "results")
    one = TRACES / "h200_ddp_2ranks/rank0.json.gz"
    shutil.copy(one, folder / "trace.json.gz")
    (folder / "trace.json").write_bytes(gzip.decompress(one.read_bytes()))
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (folder / "train.toml").write_text(TORCHTITAN, encoding="utf-8")
    (folder / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    programs = folder / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("weft", "-m weft"), ("torchrun", "-m torch.distributed.run")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    return folder


def environment(folder: Path, port: int) -> dict[str, str]:
    """A new user's environment and a terminal of 80 columns; only the search paths are the caller's.

    torchrun uses this port instead of 29500, since several pages run in parallel.
    """
    kept = {name: os.environ[name] for name in ("TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    return {
        **kept,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(folder),
        "WEFT_STORE": str(folder / "verdicts.sqlite"),
        "COLUMNS": "80",
        "LC_ALL": "C.UTF-8",
        "PET_MASTER_PORT": str(port),
    }


def typed(commands: list[Command], folder: Path, env: dict[str, str]) -> list[tuple[int, str]]:
    """Type the commands into one shell until one fails. Returns exit code and output of each that ran."""
    script = ["exec 2>&1"]
    for place, command in enumerate(commands):
        script += [f"echo; echo '<<{place}>>'", command.text, "code=$?"]
        script += [f'echo; echo "<<{place} code $code>>"', '[ "$code" = 0 ] || exit 0']
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
    results = []
    for place in range(len(commands)):
        _, begun, rest = done.stdout.partition(f"\n<<{place}>>\n")
        output, _, code = rest.partition(f"\n<<{place} code ")
        if not begun:
            break
        results.append((int(code.partition(">>")[0]), output))
    return results
