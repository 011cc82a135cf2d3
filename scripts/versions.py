"""Which levers work on which NCCL and torch, from the symbols of real wheels and from what ran on a GPU.

The wheels are large, so this does not run in CI; tests/unit/test_versions.py checks its result. It reads
wheels that are on disk (`pip download --no-deps nvidia-nccl-cu13==2.32.3`, `… torch==2.15.0`), needs `nm`,
keeps the symbols of wheels that are not given, and writes the data and the page: after a function was added
to the table of hooks, run it without a wheel. What ran on a GPU (`ran` in the data) is entered by hand, from
benchmarks/results/gpu.

    python scripts/versions.py [WHEEL…]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks/results/versions.json"
PAGE = ROOT / "docs/versions.md"
HOOKS = ROOT / "src/weft/shim/csrc/nccl_hooks.def"
FSDP = (
    "set_reshard_after_forward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_separate_reduce_scatter_group",
    "set_reduce_scatter_max_input_buffers",
)
IGNORED = re.compile(
    r"ncclGet|ncclMem|ncclRedOp|ncclParam|ncclReset|ncclComm(Count|UserRank|CuDevice|Get|Query|Mem)"
)
"""Functions that only ask, allocate or describe: nothing to intercept."""


PAGE_TEXT = """\
# Versions

Which controls work on which NCCL and torch. Made by `python scripts/versions.py WHEEL…` from the symbols of
the wheels on the package index. CI compares it with the shim's table of intercepted functions. The columns
*run* are entered by hand (`ran` in benchmarks/results/versions.json), from benchmarks/results/gpu.

## NCCL

| NCCL | call configuration | tuner plugin | protocol | chunk | cluster, CTA policy | siblings | run |
| --- | --- | --- | --- | --- | --- | --- | --- |
{nccl}

With a configuration of each call, CTAs and algorithm of a [rule](policy.md#rules-for-collectives) come from
it, protocol and chunk from the plugin; without one, all of them come from the plugin. Siblings
(`ncclCommSplit`) are needed for more CTAs than a communicator has. Plugin interfaces v4 and v5 were only run
against a fake NCCL: an NCCL before 2.30 cannot place several ranks on one GPU, and there was one. NCCL before
2.24 takes neither a configuration nor the plugin: rules are then counted as not applied (`rules_unapplied` in
the statistics).

## torch

| torch | CUDA | pins NCCL | process groups | intercepted calls | other calls | FSDP2 | run |
| --- | --- | --- | --- | --- | --- | --- | --- |
{torch}

{not_read}*Other calls*: NCCL functions that it calls and weft does not intercept; those that only ask,
allocate or describe are not listed. *FSDP2*: how many of {fsdp} it has.

## HIP and RCCL

Tested against fakes only. Applied: residency, and priority by torch's high-priority stream. Not applied, and
counted or said: head starts, `compute.sm_reserve` (cuBLAS), a configuration of each call (RCCL has none).
Rules for collectives reach an RCCL that asks weft's tuner plugin; for any other, each call that a rule names
is counted in `rules_unapplied`.
"""


def hook_names() -> list[str]:
    """The NCCL functions that the shim intercepts, in the order of its table."""
    return re.findall(r"^HOOK(?:_WITHOUT)?\((nccl\w+)", HOOKS.read_text(), re.MULTILINE)


def dynamic_symbols(library: Path) -> tuple[set[str], set[str]]:
    """The nccl functions that a library defines, and those that it wants."""
    text = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in text.splitlines()]
    named = [(row[-2], row[-1].partition("@")[0]) for row in rows if len(row) >= 2]
    defined = {name for kind, name in named if kind in "TW" and re.match(r"nccl[A-Z]", name)}
    wanted = {name for kind, name in named if kind == "U" and re.match(r"nccl[A-Z]", name)}
    return defined, wanted


def extracted(wheel: zipfile.ZipFile, pattern: str, folder: Path) -> Path:
    (member,) = [name for name in wheel.namelist() if re.search(pattern, name)]
    return Path(wheel.extract(member, folder))


def nccl_row(path: Path) -> dict[str, Any]:
    """What an NCCL wheel has of what weft uses."""
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        library = extracted(wheel, r"libnccl\.so\.2$", Path(folder))
        defined, _ = dynamic_symbols(library)
        image = library.read_bytes()
    return {
        "wheel": path.name,
        "hooks": [name for name in hook_names() if name in defined],
        "tuners": [version for version in range(2, 9) if f"ncclTunerPlugin_v{version}".encode() in image],
        "static_plugin": b"STATIC_PLUGIN" in image,
        "not_intercepted": sorted(name for name in defined - set(hook_names()) if not IGNORED.match(name)),
    }


def torch_row(path: Path) -> dict[str, Any]:
    """What a torch wheel calls of NCCL, and which controls its FSDP2 has."""
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        library = extracted(wheel, r"/libtorch_cuda\.so$", Path(folder))
        _, wanted = dynamic_symbols(library)
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        requires = wheel.read(metadata).decode()
        fsdp = wheel.read("torch/distributed/fsdp/_fully_shard/_fully_shard.py").decode()
        facts = wheel.read("torch/version.py").decode()
        second = "class ProcessGroupNCCL2(" in wheel.read("torch/_C/_distributed_c10d.pyi").decode()
    pinned = re.search(r"nvidia-nccl-cu\d+==([\d.]+)", requires)
    cuda = re.search(r"^cuda.*?= '([\d.]+)'", facts, re.MULTILINE)
    return {
        "wheel": path.name,
        "cuda": cuda[1] if cuda else None,
        "nccl": pinned[1] if pinned else None,
        "calls": [name for name in hook_names() if name in wanted],
        "not_intercepted": sorted(name for name in wanted - set(hook_names()) if not IGNORED.match(name)),
        "process_group_nccl2": second,
        "fsdp": [name for name in FSDP if f"def {name}(" in fsdp],
    }


def split_again(row: dict[str, Any], kept: str) -> dict[str, Any]:
    """The same symbols by today's table of hooks: `kept` names those that weft intercepts."""
    symbols = {*row[kept], *row["not_intercepted"]}
    hooks = hook_names()
    return row | {
        kept: [name for name in hooks if name in symbols],
        "not_intercepted": sorted(symbols - set(hooks)),
    }


def way(row: dict[str, Any]) -> str:
    """How rules for collectives reach this NCCL, by its symbols alone."""
    known = [version for version in row["tuners"] if 4 <= version <= 6]
    if "ncclAllReduceConfig" in row["hooks"]:
        return "config"
    return "tuner" if known and row["static_plugin"] else "none"


def _nccl_line(version: str, row: dict[str, Any], ran: list[dict[str, Any]]) -> str:
    tuner = max((found for found in row["tuners"] if 4 <= found <= 6), default=None)
    configs = [name for name in row["hooks"] if name.endswith("Config") and not name.startswith("ncclComm")]
    seen = "; ".join(run["what"] for run in ran if run.get("nccl") == version)
    cells = (
        version,
        f"yes ({len(configs)} functions)" if configs else "no",
        f"v{tuner}" if tuner else "no",
        "yes" if tuner else "no",
        "yes" if tuner and tuner >= 6 else "no",
        "yes" if configs else "no",
        "yes" if "ncclCommSplit" in row["hooks"] else "no",
        seen or "not run",
    )
    return f"| {' | '.join(cells)} |"


def _torch_line(version: str, row: dict[str, Any], ran: list[dict[str, Any]]) -> str:
    seen = "; ".join(run["what"] for run in ran if run.get("torch") == version)
    group = "NCCL, NCCL2" if row["process_group_nccl2"] else "NCCL"
    cells = (
        version,
        row["cuda"] or "",
        row["nccl"] or "",
        group,
        str(len(row["calls"])),
        ", ".join(f"`{name}`" for name in row["not_intercepted"]) or "none",
        f"{len(row['fsdp'])} of {len(FSDP)}",
        seen or "not run",
    )
    return f"| {' | '.join(cells)} |"


def page(data: dict[str, Any]) -> str:
    """The documentation page."""
    nccl, torch, ran = data["nccl"], data["torch"], data["ran"]
    return PAGE_TEXT.format(
        nccl="\n".join(_nccl_line(version, row, ran) for version, row in nccl.items()),
        torch="\n".join(_torch_line(version, row, ran) for version, row in torch.items()),
        not_read=f"Not read: {', '.join(data['not_read'])}. " if data["not_read"] else "",
        fsdp=", ".join(f"`{name}`" for name in FSDP),
    )


def _sorted(rows: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(rows.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def main(wheels: list[str]) -> None:
    empty: dict[str, Any] = {"nccl": {}, "torch": {}, "ran": [], "not_read": []}
    data = json.loads(DATA.read_text()) if DATA.exists() else empty
    for path in map(Path, wheels):
        kind, read = ("torch", torch_row) if path.name.startswith("torch-") else ("nccl", nccl_row)
        version = path.name.split("-")[1].partition("+")[0]
        data[kind][version] = read(path)
        print(path.name)
    for kind, kept in (("nccl", "hooks"), ("torch", "calls")):
        data[kind] = _sorted({version: split_again(row, kept) for version, row in data[kind].items()})
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))


if __name__ == "__main__":
    main(sys.argv[1:])
