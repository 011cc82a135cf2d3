"""Names: a public name is defined in one module, and methods of one name return one kind."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import weft

SOURCE = Path(weft.__file__).parent
MOST_SHARED = 14
"""How many names may be defined in more than one module: mostly commands and the functions behind them."""


def trees() -> list[tuple[str, ast.Module]]:
    files = sorted(SOURCE.rglob("*.py"))
    return [(str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in files]


def defined(tree: ast.Module) -> set[str]:
    """Public functions, classes and constants of a module."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def shared(modules: list[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Public names that several modules define, with those modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules:
        for name in defined(tree):
            homes[name].append(module)
    return {name: where for name, where in homes.items() if len(where) > 1}


def test_few_public_names_are_defined_in_more_than_one_module():
    found = shared(trees())
    listed = "\n".join(f"{name}: {', '.join(where)}" for name, where in sorted(found.items()))
    assert len(found) <= MOST_SHARED, listed


def test_a_name_that_a_second_module_defines_is_found():
    trio = [("a.py", "X = 1\ndef f(): ..."), ("b.py", "def f(): ...\nY: int = 2"), ("c.py", "_X = X = 3")]
    assert shared([(name, ast.parse(code)) for name, code in trio]) == {
        "X": ["a.py", "c.py"],
        "f": ["a.py", "b.py"],
    }


def test_to_dict_and_to_json_return_a_dict_everywhere():
    returns = {
        f"{module}:{node.name}": ast.unparse(node.returns) if node.returns else ""
        for module, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("to_dict", "to_json")
    }
    assert len(returns) >= 5
    assert {name: kind for name, kind in returns.items() if not kind.startswith("dict[")} == {}
