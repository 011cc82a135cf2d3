"""Build hook: compiles the launch shim, the simulator's core, the trace scanner and the NCCL API of paced
collectives with plain `cc`.

No CUDA toolkit is needed. On Linux a failed compile fails the build. Set WEFT_NO_SHIM=1 to build without the
shim and the paced collectives: `weft run` and live tuning then do not work, and the simulator's core and the
trace scanner are compiled only if possible. On macOS, which cannot preload the shim, the build always works
this way; on Windows nothing is compiled. Run it by hand to build in place: `python hatch_build.py`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
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
PACED = Path("src/weft/comm")
PACED_LIBRARY = "libweft_paced.so"
PACED_FLAGS = ("-std=gnu11", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
OPT_OUT = "WEFT_NO_SHIM"


class CompileError(RuntimeError):
    """The C sources could not be compiled; the message says how to build without the shim."""


def build(root: Path, platform: str = sys.platform, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Compile what this platform can use into the package; returns the libraries, relative to `root`."""
    if platform == "linux" and env.get(OPT_OUT, "") in ("", "0"):
        build_shim(root)
        build_sim(root)
        build_scan(root)
        build_paced(root)
        return [SHIM / LIBRARY, SIM / SIM_LIBRARY, SCAN / SCAN_LIBRARY, PACED / PACED_LIBRARY]
    if platform == "win32":  # the binding of the simulator is not tested with its compilers' libraries
        return []
    built = []
    for compile_it, library in ((build_sim, SIM / SIM_LIBRARY), (build_scan, SCAN / SCAN_LIBRARY)):
        try:
            compile_it(root)
            built.append(library)
        except CompileError as error:
            print(f"weft: built without {library.name}: {error}", file=sys.stderr)
    return built


def build_shim(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Compile the shim into the package, or to `output`."""
    target = output or root / SHIM / LIBRARY
    return _compile("the launch shim", root / SHIM / "csrc", target, (*FLAGS, *extra), LINK)


def build_sim(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Compile the simulator's core into the package, or to `output`."""
    target = output or root / SIM / SIM_LIBRARY
    return _compile("the simulator's core", root / SIM / "csrc", target, (*SIM_FLAGS, *extra), SIM_LINK)


def build_scan(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Compile the trace scanner; without it, traces are read by Python alone."""
    target = output or root / SCAN / SCAN_LIBRARY
    return _compile("the trace scanner", root / SCAN / "csrc", target, (*SCAN_FLAGS, *extra), ())


def build_paced(root: Path, output: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Compile the NCCL API of paced collectives; without it, ghost ranks of a node are not available."""
    target = output or root / PACED / PACED_LIBRARY
    return _compile("the paced collectives", root / PACED / "csrc", target, (*PACED_FLAGS, *extra), ())


def _compile(what: str, folder: Path, target: Path, flags: tuple[str, ...], link: tuple[str, ...]) -> Path:
    sources = sorted(str(path) for path in folder.glob("*.c"))
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    command = [*_compiler(what), *flags, "-o", str(partial), *sources, *link]
    try:
        subprocess.run(command, check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise CompileError(
            f"{what} does not compile ({error}); {OPT_OUT}=1 builds weft without the shim"
        ) from None
    partial.replace(target)
    return target


def _compiler(what: str) -> list[str]:
    """The C compiler and its own arguments: $CC, or the first usual name that exists."""
    given = shlex.split(os.environ.get("CC", ""))
    names = given[:1] or ["cc", "gcc", "clang"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise CompileError(
            f"no C compiler found for {what} (tried {', '.join(names)}); install one, for example gcc, or "
            f"set {OPT_OUT}=1 to build weft without the shim"
        )
    return [found, *given[1:]]


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg, unused-ignore]
    """Adds the compiled libraries to the wheel and tags the wheel with this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        libraries = build(Path(self.root))
        if not libraries:
            return
        build_data["artifacts"].extend(map(str, libraries))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """The platform that the libraries were compiled for."""
    if sys.platform == "linux":  # auditwheel determines the manylinux tag
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    from packaging.tags import platform_tags

    return next(iter(platform_tags()))


if __name__ == "__main__":
    try:
        build(Path(__file__).parent)
    except CompileError as error:
        sys.exit(f"weft: {error}")
