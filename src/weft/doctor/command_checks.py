"""Checks a command without running it: its interpreter and torch, its environment, and its script's settings.

Only the command's Python interpreter is run, to find out where torch is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.doctor.check import Check
from weft.doctor.environment import RULES, check_environment
from weft.doctor.libraries import Torch, read_torch
from weft.doctor.machine import GpuFacts, Machine
from weft.doctor.torch_checks import flag_in_program

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SET_IN_PYTHON = re.compile(
    r"os\.environ(?:\.setdefault\(\s*|\[)\s*['\"](?P<name>\w+)['\"]\s*(?:\]\s*=|,)\s*(?:str\()?"
    r"['\"]?(?P<value>[\w.]+)"
)
_SET_IN_SHELL = re.compile(r"^\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=['\"]?(?P<value>[\w.]+)", re.MULTILINE)
_FRAMEWORKS = {
    "Megatron": r"\bmegatron\b|--tensor-model-parallel-size",
    "DeepSpeed": r"\bdeepspeed\b",
    "FSDP": r"fully_shard|FullyShardedDataParallel|torchtitan|--fsdp",
    "DDP": r"DistributedDataParallel",
}
_WANTS_ONE = "Megatron"
BLACKWELL = 100
"""Compute capability times 10, from which on Megatron no longer asks for one connection."""
MOST_SOURCE_BYTES = 4 << 20


@dataclass(frozen=True)
class Started:
    """A command line, analyzed."""

    words: tuple[str, ...]
    env: dict[str, str]
    """The environment, including assignments in front of the program (`env NAME=VALUE …`)."""
    script: Path | None
    source: str
    """Source text of the script; empty if it cannot be read."""

    @property
    def frameworks(self) -> list[str]:
        """Frameworks that the command line or the script names."""
        text = f"{' '.join(self.words)}\n{self.source}"
        return [name for name, pattern in _FRAMEWORKS.items() if re.search(pattern, text, re.IGNORECASE)]


def understand(command: Sequence[str], env: Mapping[str, str]) -> Started:
    """Environment, program and script of a command line."""
    words, given = list(command), dict(env)
    if words and Path(words[0]).name == "env":
        words = _after_env(words[1:], given)
    script = next((Path(word) for word in words if word.endswith((".py", ".sh"))), None)
    source = ""
    if script is not None:
        try:
            if script.is_file() and script.stat().st_size <= MOST_SOURCE_BYTES:
                source = script.read_text(encoding="utf-8", errors="replace")
        except OSError:
            source = ""
    return Started(tuple(words), given, script, source)


def _after_env(words: list[str], given: dict[str, str]) -> list[str]:
    """The program and its arguments after `env`; applies env's options and assignments to `given`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, joined, value = (
            word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        )
        if found := _ASSIGNMENT.fullmatch(word):
            given[found[1]] = found[2]
        elif word == "-" or option in ("-i", "--ignore-environment"):
            given.clear()
        elif option in ("-u", "--unset"):
            given.pop(value if joined else rest.pop(0) if rest else "", None)
        elif option in ("-C", "--chdir") and not joined:
            del rest[:1]
        elif not word.startswith("-"):
            return [word, *rest]
    return []


def command_checks(command: Sequence[str], machine: Machine, facts: GpuFacts) -> list[Check]:
    """All findings about a command."""
    started = understand(command, machine.env)
    if not started.words:
        return [
            Check("command", "fail", "there is no program after `--`", "weft doctor -- torchrun train.py")
        ]
    program = machine.which(started.words[0])
    if program is None:
        name = started.words[0]
        if "/" in name:
            detail, fix = f"{name} is not a program that can be run here", "check the path, and chmod +x"
        else:
            detail, fix = f"{name or repr(name)} is not on PATH", "check the name and your PATH"
        return [Check("command", "fail", detail, fix)]
    found = _script(started)
    torch, about = _torch_of(program, started, machine)
    found += about
    found += _environment(started, machine, facts)
    found += flag_in_program(torch or machine.torch(), started.source, str(started.script))
    found += _settings(started)
    if not any(check.status in ("warn", "fail") for check in found):
        named = f", {' and '.join(started.frameworks)}" if started.frameworks else ""
        found.append(
            Check("command", "ok", f"{shlex.join(started.words[:4])} …: nothing disables overlap{named}")
        )
    return found


def _script(started: Started) -> list[Check]:
    if started.script is not None and not started.script.is_file():
        fix = "run weft doctor in the folder that the command is started from"
        return [Check("command", "fail", f"{started.script} does not exist here", fix)]
    return []


def _torch_of(program: str, started: Started, machine: Machine) -> tuple[Torch | None, list[Check]]:
    """The torch that the command's own interpreter would import (None if unknown), and findings about it."""
    python = _interpreter(program)
    if python is None:
        return None, []
    code = "import importlib.util as u; s = u.find_spec('torch'); print('torch at', s.origin if s else '')"
    status, out, error = machine.run([python, "-c", code], "", started.env)
    origin = next((line[9:] for line in out.splitlines() if line.startswith("torch at ")), None)
    if status != 0 or origin is None:
        why = (error.strip().splitlines() or [f"exit code {status}"])[-1]
        return None, [
            Check("command", "warn", f"{python} does not run: {why}", "activate its environment first")
        ]
    if not origin:
        return None, [
            Check("command", "warn", f"{python} has no torch", "activate the job's environment first")
        ]
    torch, here = read_torch(Path(origin).parent), machine.torch()
    if here is not None and here.version == torch.version:
        return torch, []
    other = f"weft itself sees torch {here.version}" if here else "weft itself sees none"
    detail = (
        f"{python} has torch {torch.version}; {other}: findings about torch and NCCL above are not the job's"
    )
    fix = f"`{python} -m pip install .` in a checkout of weft, and run weft doctor from there"
    return torch, [Check("command", "warn", detail, fix)]


def _interpreter(program: str) -> str | None:
    """The Python interpreter that a program is, or that its first line names; None if there is none."""
    if re.fullmatch(r"python[\d.]*", Path(program).name):
        return program
    try:
        with Path(program).open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return next(
        (word for word in words if re.fullmatch(r"python[\d.]*", Path(word).name) and "/" in word), None
    )


def _environment(started: Started, machine: Machine, facts: GpuFacts) -> list[Check]:
    """Findings about the environment that the program would have, by the same rules as for this shell's."""
    sets = _SET_IN_SHELL if started.script and started.script.suffix == ".sh" else _SET_IN_PYTHON
    inside = {found["name"]: found["value"] for found in sets.finditer(started.source)}
    changed = {
        name: value
        for name, value in (started.env | inside).items()
        if name in RULES and machine.env.get(name) != value
    }
    found = [
        replace(
            check,
            detail=f"{'the script sets ' if check.name[4:] in inside else 'the command has '}{check.detail}",
        )
        for check in check_environment(changed)
        if check.name.startswith("env:")
    ]
    if started.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        detail = (
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading weft: `weft run --tune` cannot tune"
        )
        found.append(Check("command", "warn", detail, "unset TORCH_DEVICE_BACKEND_AUTOLOAD"))
    value = (started.env | inside).get("CUDA_DEVICE_MAX_CONNECTIONS")
    return _connections(value, started.frameworks, facts) + [
        check for check in found if check.name != "env:CUDA_DEVICE_MAX_CONNECTIONS" or not started.frameworks
    ]


def _connections(value: str | None, frameworks: Sequence[str], facts: GpuFacts) -> list[Check]:
    """CUDA_DEVICE_MAX_CONNECTIONS for the framework that the command uses."""
    name = "env:CUDA_DEVICE_MAX_CONNECTIONS"
    older = any(_capability(gpu["arch"]) < BLACKWELL for gpu in facts.gpus) or not facts.gpus
    if _WANTS_ONE in frameworks and "FSDP" not in frameworks:
        if value != "1" and older:
            detail = (
                f"CUDA_DEVICE_MAX_CONNECTIONS={value or 'unset'}: Megatron's tensor and context parallelism "
                "ask for 1 before Blackwell, so that collectives start before GEMMs (Megatron-LM issues 533, "
                "5105)"
            )
            return [
                Check(name, "warn", detail, "export CUDA_DEVICE_MAX_CONNECTIONS=1 where tp or cp is above 1")
            ]
        return []
    if value == "1" and frameworks:
        detail = (
            f"CUDA_DEVICE_MAX_CONNECTIONS=1 with {' and '.join(frameworks)}: all streams share one queue, "
            "and prefetched collectives run in line with compute (torchtitan issue 1147, verl PR 6976)"
        )
        fix = "unset CUDA_DEVICE_MAX_CONNECTIONS, or 16 or 32 with FSDP2 and torch's own tensor parallelism"
        return [Check(name, "warn", detail, fix)]
    return []


def _capability(arch: str) -> int:
    digits = re.fullmatch(r"sm_(\d+)a?", str(arch))
    return int(digits[1]) if digits else 0


def _settings(started: Started) -> list[Check]:
    """Bucket and prefetch settings that the script passes."""
    found = []
    bucket = re.search(r"bucket_cap_mb\s*=\s*(\d+(?:\.\d*)?|\.\d+)", started.source)
    if bucket and float(bucket[1]) < 10:
        detail = f"{started.script} sets bucket_cap_mb={bucket[1]}: small buckets are many small all-reduces"
        found.append(Check("buckets", "warn", detail, "leave it at 25, or compare 25, 50 and 100"))
    for pattern, meaning, fix in (
        (
            r"forward_prefetch\s*=\s*False",
            "forward_prefetch=False: the next all-gather waits for compute",
            "forward_prefetch=True where the forward order is the same every step",
        ),
        (
            r"backward_prefetch\s*=\s*None",
            "backward_prefetch=None: all-gathers of the backward pass are not prefetched",
            "BackwardPrefetch.BACKWARD_PRE",
        ),
    ):
        if re.search(pattern, started.source):
            found.append(Check("prefetch", "warn", f"{started.script} sets {meaning}", fix))
    return found
