"""Locates the libraries that a torch program would load, without importing or loading them."""

from __future__ import annotations

import ast
import ctypes.util
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Torch:
    """An installed torch, read from its files because importing it takes seconds."""

    version: str
    cuda: str | None
    """CUDA version it was built for, such as `12.8`; None for a CPU or ROCm build."""
    hip: str | None
    folder: Path


def find_torch() -> Torch | None:
    """The torch that `import torch` would find; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return read_torch(Path(spec.origin).parent)


def read_torch(folder: Path) -> Torch:
    """The torch in this folder, read from its files."""
    facts = _constants(folder / "version.py")
    return Torch(facts.get("__version__") or _metadata_version(), facts.get("cuda"), facts.get("hip"), folder)


def _metadata_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _constants(path: Path) -> dict[str, str | None]:
    """The module-level names of a file that are assigned a string or None."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    found: dict[str, str | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, str)):
            found |= {t.id: value.value for t in targets if isinstance(t, ast.Name)}
    return found


def find_nccl(torch: Torch | None) -> Path | None:
    """The NCCL or RCCL that torch would load: preloaded, bundled, from a wheel, or the system's; or None."""
    preloaded = (Path(p) for p in os.environ.get("LD_PRELOAD", "").replace(":", " ").split())
    candidates = [p for p in preloaded if p.name.startswith(("libnccl.", "librccl."))]
    if torch is not None:
        for folder in (torch.folder / "lib", torch.folder.parent / "nvidia" / "nccl" / "lib"):
            candidates += [*sorted(folder.glob("libnccl.so*")), *sorted(folder.glob("librccl.so*"))]
    found = next((path for path in candidates if path.exists()), None)
    system = None if found else ctypes.util.find_library("nccl") or ctypes.util.find_library("rccl")
    return Path(system) if system else found


def find_shim() -> Path:
    """The compiled launch shim. Raises UnavailableError if it was not built."""
    from weft.shim import inject

    return inject.library_path()


def try_preload(env: Mapping[str, str]) -> None:
    """Start a process with this environment to test LD_PRELOAD.

    Raises UnavailableError if the shim does not load, UsageError if another library does not.
    """
    from weft.shim import inject

    inject.check_preload(env)
