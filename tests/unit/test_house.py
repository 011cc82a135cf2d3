"""The rules of the house: what may import what, and what the package exports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
# From the top to the ground: a package imports only from its own level or below.
LEVELS = (
    ("cli",),
    ("doctor", "report", "tune", "plan", "ops", "bench", "integrations"),
    ("execute", "sim", "trace", "comm", "shim"),
    ("workload", "policy", "timeline", "gpu", "errors", "kernels", "files"),
)
NEVER_TORCH = (
    "sim",
    "trace",
    "plan",
    "report",
    "gpu",
    "policy",
    "timeline",
    "kernels",
    "errors",
    "cli",
    "shim",
)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def modules() -> list[Path]:
    return sorted(
        path
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE or path.stem not in ("__init__", "__main__")
    )


def home(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def level(name: str) -> int:
    (found,) = [i for i, names in enumerate(LEVELS) if name in names]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path):
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "weft" and len(parts) > 1 and not parts[1].startswith("__"):
            assert level(parts[1]) >= level(home(path)), f"{path} must not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_torch_stays_where_it_belongs(path):
    if home(path) in NEVER_TORCH:
        assert not {name for name in imports(path) if name.split(".")[0] in ("torch", "triton")}


def test_only_the_binding_touches_the_shims_memory():
    users = {str(p.relative_to(SOURCE)) for p in modules() if "weft_shim_attach" in p.read_text()}
    assert users == {"shim/binding.py"}


def test_importing_weft_loads_neither_torch_nor_the_shim():
    code = "import sys, weft; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy') or 'shim' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert sorted(weft.__all__) == weft.__dir__()
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = weft.nonsense
