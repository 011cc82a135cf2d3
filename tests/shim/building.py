"""Compiles C programs and libraries for the tests of the shim."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "src/weft/shim/csrc"
WARNINGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")


def sanitizer_flags(sanitizer: str) -> tuple[str, ...]:
    return (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")


def compile_c(output: Path, *arguments: str) -> Path:
    """Compile with the shim's headers on the include path; any warning fails the test."""
    subprocess.run(["cc", *WARNINGS, "-O2", "-g", f"-I{CSRC}", "-o", str(output), *arguments], check=True)
    return output
