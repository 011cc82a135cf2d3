"""Build hook: compiles the launch shim with plain `cc`. No CUDA toolkit and no headers are needed.

A machine without a compiler still gets a working package; `weft doctor` then says that the shim is missing.
Run it by hand to build in place: `python hatch_build.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand on a machine without hatchling
    BuildHookInterface = object  # type: ignore[assignment, misc]

SHIM = Path("src/weft/shim")
LIBRARY = "libweft_shim.so"
FLAGS = (
    "-std=c11",
    "-O2",
    "-g1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ftls-model=initial-exec",
    "-Wl,-Bsymbolic",
    "-Wall",
    "-Wextra",
)
LINK = ("-ldl", "-lpthread")
SIM = Path("src/weft/sim")
SIM_LIBRARY = "libweft_sim.so"
# No fused multiply-add: a simulation gives the same digits on every machine.
SIM_FLAGS = (
    "-std=c11",
    "-O2",
    "-g1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)
SIM_LINK = ("-lm",)
SCAN = Path("src/weft/trace")
SCAN_LIBRARY = "libweft_scan.so"
SCAN_FLAGS = ("-std=gnu11", "-O3", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def build_shim(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path | None:
    """Compile the shim into the package, or to `output`; None, and a line on stderr, where it cannot be."""
    target = output or root / SHIM / LIBRARY
    return _compile("the launch shim", root / SHIM / "csrc", target, (*FLAGS, *extra), LINK)


def build_sim(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path | None:
    """Compile the simulator's core in the same way."""
    target = output or root / SIM / SIM_LIBRARY
    return _compile("the simulator's core", root / SIM / "csrc", target, (*SIM_FLAGS, *extra), SIM_LINK)


def build_scan(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path | None:
    """Compile the trace scanner in the same way; without it, traces are read by Python alone."""
    target = output or root / SCAN / SCAN_LIBRARY
    return _compile("the trace scanner", root / SCAN / "csrc", target, (*SCAN_FLAGS, *extra), ())


def _compile(
    what: str, folder: Path, target: Path, flags: tuple[str, ...], link: tuple[str, ...]
) -> Path | None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print(f"weft: no C compiler found, {what} is not built", file=sys.stderr)
        return None
    sources = sorted(str(path) for path in folder.glob("*.c"))
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *flags, "-o", str(partial), *sources, *link]
    try:
        subprocess.run(command, check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"weft: {what} is not built: {error}", file=sys.stderr)
        partial.unlink(missing_ok=True)
        return None
    partial.replace(target)
    return target


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg, unused-ignore]
    """Adds what was compiled to the wheel and tags the wheel with this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        built = {
            SHIM / LIBRARY: build_shim(root),
            SIM / SIM_LIBRARY: build_sim(root),
            SCAN / SCAN_LIBRARY: build_scan(root),
        }
        found = [str(path) for path, library in built.items() if library is not None]
        if not found:
            return
        build_data["artifacts"].extend(found)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"


def _platform_tag() -> str:
    from packaging.tags import sys_tags

    return next(tag.platform for tag in sys_tags())


if __name__ == "__main__":
    ROOT = Path(__file__).parent
    sys.exit(0 if all([build_shim(ROOT), build_sim(ROOT), build_scan(ROOT)]) else 1)
