"""Where the libraries are that a torch program would load. Nothing is imported or loaded here."""

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
    """An installed torch, read from its files: importing it takes seconds."""

    version: str
    cuda: str | None
    """CUDA that it was built for, as in `12.8`; None for a CPU or ROCm build."""
    hip: str | None
    folder: Path


def find_torch() -> Torch | None:
    """The torch that `import torch` would find; None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
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
    """The NCCL (or RCCL) that torch would load: a preloaded one, its own, the wheel's, the system's."""
    preloaded = (Path(p) for p in os.environ.get("LD_PRELOAD", "").replace(":", " ").split())
    candidates = [p for p in preloaded if p.name.startswith(("libnccl.", "librccl."))]
    if torch is not None:
        for folder in (torch.folder / "lib", torch.folder.parent / "nvidia" / "nccl" / "lib"):
            candidates += [*sorted(folder.glob("libnccl.so*")), *sorted(folder.glob("librccl.so*"))]
    found = next((path for path in candidates if path.exists()), None)
    system = None if found else ctypes.util.find_library("nccl") or ctypes.util.find_library("rccl")
    return Path(system) if system else found


def find_shim() -> Path:
    """The compiled launch shim; UnavailableError where it was not built."""
    from weft.shim import inject

    return inject.library_path()


def check_preload(env: Mapping[str, str]) -> None:
    """Try it on a process: UnavailableError if the shim does not load, UsageError if another library."""
    from weft.shim import inject

    inject.check_preload(env)
