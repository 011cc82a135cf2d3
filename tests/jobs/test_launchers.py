"""Launch lines of other projects under `weft run --tune`, two CPU ranks each: the line of docs/how-to/launchers.md."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ports import held_port

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs/how-to/launchers.md"
NEEDS = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "megatron": "megatron.core",
}
# Accelerate and Megatron-Core start ranks by torchrun's agent, as jobs of test_live.py do; DeepSpeed starts them as
# processes of its own, as Lightning does.
SLOW = ("accelerate", "deepspeed", "megatron")
COMMANDS = {
    "python": "",
    "weft": "-m weft",
    "torchrun": "-m torch.distributed.run",
    "accelerate": "-m accelerate.commands.accelerate_cli",
    "deepspeed": "-m deepspeed.launcher.runner",
}


def lines() -> dict[str, str]:
    """The launch lines of the page, by the program that they start."""
    found = re.findall(r"^\$ (.*-- .*launch_(\w+)\.py)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: line for line, name in found}


def with_port(line: str, port: int) -> str:
    """The line with a port of its own, for launchers that take 29500 whatever else runs on the machine."""
    line = line.replace("accelerate launch", f"accelerate launch --main_process_port {port}")
    return line.replace("-- deepspeed", f"-- deepspeed --master_port {port}")


def test_the_page_has_a_line_for_each():
    assert set(lines()) == set(NEEDS)


def installed(module: str) -> bool:
    top, _, rest = module.partition(".")
    return importlib.util.find_spec(top) is not None and (
        not rest or importlib.util.find_spec(module) is not None
    )


def launch(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Type the page's line, where its programs are found by name."""
    for command, module in COMMANDS.items():
        program = folder / command
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{PROGRAMS}:{PROGRAMS.parent}",
        "OMP_NUM_THREADS": "1",
        "WEFT_STORE": str(folder / "verdicts.sqlite"),
        "HOME": str(folder),
    }
    with held_port() as port:
        return subprocess.run(
            ["bash", "-c", with_port(lines()[name], port)],
            cwd=ROOT,
            env={**env, "PET_MASTER_PORT": str(port)},  # torchrun's
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="the shim is for Linux")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NEEDS]
)
def test_a_launch_line_runs_under_weft(name: str, tmp_path: Path):
    if not installed(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed")
    done = launch(name, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for rank in range(2):
        assert f"{name}: rank {rank} of 2, shim True, learns True" in said, said
    assert "weft: " in done.stderr
