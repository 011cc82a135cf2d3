"""Every embedded PTX text is accepted by NVIDIA's assembler, for Ampere, Hopper and Blackwell, without a GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from building import compile_c

from weft.comm.paced_kernel import ELEMENT_BYTES, MOST_REGISTERS, kernel_name, kernel_text
from weft.gpu.priority import SPIN_PTX

THREADS = 544
PACED = {80: ("sum_bf16", "sum_f16"), 90: tuple(ELEMENT_BYTES), 100: ("sum_bf16", "copy8")}
"""Operations to assemble, by compute capability: those with instructions of some GPUs only; all for 9.0."""
IN_C = {"cuda_headstart.c": "WAIT_PTX", "tracer_stamp.c": "stamp_ptx()"}


def assemblers() -> list[str]:
    """The ptxas binaries of Triton: one for GPUs before Blackwell, one for newer ones."""
    triton = importlib.util.find_spec("triton")
    folders = [Path(triton.origin).parent / "backends/nvidia/bin"] if triton and triton.origin else []
    found = [str(path) for folder in folders for path in sorted(folder.glob("ptxas*"))]
    return found or [path for path in [shutil.which("ptxas")] if path]


def assemble(text: str, architecture: str, folder: Path) -> str:
    """The assembler's report on the kernels; skips if no assembler knows the architecture."""
    source = folder / f"{architecture}.ptx"
    source.write_text(text, encoding="ascii")
    for program in assemblers():
        command = [program, "-v", "-arch", architecture, str(source), "-o", str(folder / "out.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if f"'{architecture}' is not defined" not in done.stderr:
            assert done.returncode == 0, done.stderr[:2000]
            return done.stderr
    return pytest.skip(f"no ptxas for {architecture}")


@pytest.mark.parametrize("capability", PACED)
def test_paced_kernels_assemble_with_the_registers_of_nccls(capability, tmp_path):
    texts = []
    for operation in PACED[capability]:
        kind = "all_reduce" if operation.startswith("sum_") else operation
        texts.append(kernel_text(kernel_name(kind, operation), operation, THREADS, capability))
    head, _, _ = texts[0].partition(".visible")
    said = assemble(head + "".join(text.removeprefix(head) for text in texts), f"sm_{capability}", tmp_path)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == len(PACED[capability])
    assert MOST_REGISTERS - 8 <= min(registers) <= max(registers) <= MOST_REGISTERS
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


@pytest.fixture(scope="module")
def texts_in_c(tmp_path_factory) -> list[str]:
    """The PTX that C files of the shim embed or build; nothing else of those files is run or linked."""
    folder, found = tmp_path_factory.mktemp("texts"), []
    alone = (
        "-Wno-unused-function",
        "-Wno-unused-variable",
        "-ffunction-sections",
        "-fdata-sections",
        "-Wl,--gc-sections",
    )
    for source, expression in IN_C.items():
        program = folder / f"print_{source}"
        program.write_text(
            f'#include "{source}"\n#include <stdio.h>\nint main(void) {{ return puts({expression}) < 0; }}\n'
        )
        built = compile_c(program.with_suffix(""), str(program), *alone, "-lpthread")
        found.append(subprocess.run([built], capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernels_of_the_shim_and_of_the_doctor_assemble(architecture, texts_in_c, tmp_path):
    for text in (SPIN_PTX, *texts_in_c):
        assert "Used" in assemble(text, architecture, tmp_path)
