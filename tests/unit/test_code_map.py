"""The code map: which package may import which, and what weft exports."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
# Every package and module of weft, each importing only those before it. Modules at the root import each other
# but no package.
ROOT = (
    *("checks", "errors", "files", "kernels", "lazy", "logs"),
    *("policy", "ranks", "rules", "timeline", "workload"),
)
PACKAGES = (
    "gpu",
    "shim",
    "comm",
    "sim",
    "execute",
    "trace",
    "measure",
    "tuning",
    "monitor",
    "bench",
    "ops",
    "plan",
    "reproduce",
    "report",
    "integrations",
    "doctor",
    "cli",
)
OPTIONAL = {
    "ops": {"reproduce", "report", "integrations", "cli"},
    "plan": {"report", "integrations", "cli"},
    "reproduce": {"report", "cli"},
}
"""Packages that the core never imports, and the packages that may import them."""
PUBLIC = {
    *("Policy", "Rule", "Timeline", "WeftError", "__version__"),
    *("analyze", "ops", "overlap", "restart", "tune"),
}
NEVER_TORCH = (
    "sim",
    "measure",
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


@cache
def imports(path: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def modules() -> list[Path]:
    return sorted(
        path
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE or path.stem not in ("__init__", "__main__")
    )


def home(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def edges() -> dict[tuple[str, str], set[str]]:
    """Every import between two packages of weft, with the files that make it."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in modules():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "weft" and len(parts) > 1 and parts[1] in ROOT + PACKAGES:
                found.setdefault((home(path), parts[1]), set()).add(str(path.relative_to(SOURCE)))
    return {edge: files for edge, files in found.items() if edge[0] != edge[1]}


def forbidden(found: dict[tuple[str, str], set[str]]) -> list[str]:
    """The edges that the code map does not allow."""
    order = {name: place for place, name in enumerate(PACKAGES)}
    wrong = []
    for (user, used), files in sorted(found.items()):
        downwards = used in ROOT or (user in order and order[used] < order[user])
        if not downwards or user not in OPTIONAL.get(used, {user}):
            wrong.append(f"{user} imports {used} in {', '.join(sorted(files))}")
    return wrong


def test_every_module_is_on_the_code_map():
    assert {home(path) for path in modules()} == {*ROOT, *PACKAGES}


def test_packages_import_only_packages_before_them():
    assert forbidden(edges()) == []


@pytest.mark.parametrize(
    "edge", [("gpu", "shim"), ("sim", "execute"), ("policy", "gpu"), ("tuning", "ops"), ("trace", "cli")]
)
def test_a_new_edge_against_the_order_is_found(edge):
    assert len(forbidden({**edges(), edge: {"somewhere.py"}})) == 1


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


def test_the_public_names_are_there_each_with_a_docstring():
    assert set(weft.__all__) >= PUBLIC
    for name in PUBLIC - {"__version__"}:
        value = getattr(weft, name)
        assert value.__name__.removeprefix("weft.") == name
        assert len(inspect.getdoc(value) or "") > 20
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = weft.nonsense


@pytest.mark.parametrize("name", ["analyze", "overlap", "tune"])
def test_help_of_a_public_function_shows_its_parameters(name):
    function = getattr(weft, name)
    assert inspect.isfunction(function) or inspect.isclass(function)
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert kinds - {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
