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


def build_shim(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path | None:
    """Compile the shim into the package, or to `output`; None, and a line on stderr, where it cannot be."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("weft: no C compiler found, the launch shim is not built", file=sys.stderr)
        return None
    sources = sorted(str(path) for path in (root / SHIM / "csrc").glob("*.c"))
    target = output or root / SHIM / LIBRARY
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *FLAGS, *extra, "-o", str(partial), *sources, *LINK]
    try:
        subprocess.run(command, check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"weft: the launch shim is not built: {error}", file=sys.stderr)
        partial.unlink(missing_ok=True)
        return None
    partial.replace(target)
    return target


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg, unused-ignore]
    """Adds the compiled shim to the wheel and tags the wheel with this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = build_shim(Path(self.root))
        if library is None:
            return
        build_data["artifacts"].append(str(SHIM / LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"


def _platform_tag() -> str:
    from packaging.tags import sys_tags

    return next(tag.platform for tag in sys_tags())


if __name__ == "__main__":
    sys.exit(0 if build_shim(Path(__file__).parent) else 1)
