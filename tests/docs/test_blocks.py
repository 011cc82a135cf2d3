"""Typed line by line, the console blocks of README and docs do what they show."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import doc_workspace
import pytest
from doc_blocks import PAGES, ROOT, Block, Command, blocks, matches, runnable

sys.path.append(str(ROOT / "tests/jobs"))
from ports import held_port

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        sys.platform != "linux" or not shutil.which("bash"), reason="the pages show a Linux shell"
    ),
]
INSTALLING = ("quickstart.md", "README.md")  # test_new_user.py types these into its own clone
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def check(page: Path, commands: list[Command], results: list[tuple[int, str]]) -> None:
    for command, (code, output) in zip(commands, results, strict=False):
        where = f"{page.relative_to(ROOT)}:{command.line}: $ {command.text}\n{output}"
        assert code == 0, where
        assert not command.shown or matches(command.shown, output), where
    assert len(results) == len(commands)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in INSTALLING and runnable(page)],
    ids=lambda page: page.name,
)
def test_what_a_page_shows_is_what_happens(page: Path, tmp_path: Path):
    folder, commands = doc_workspace.make(tmp_path), runnable(page)
    with held_port() as port:
        check(page, commands, doc_workspace.typed(commands, folder, doc_workspace.environment(folder, port)))


def test_a_block_that_is_not_run_says_what_it_needs():
    reasons = {block.needs for page in PAGES for block in blocks(page) if block.needs}
    known = {"GPUs", "a GPU", "minutes", "a cluster", "another program", "torch"}
    assert reasons <= known


def test_commands_are_fenced_as_console():
    """No test would run a block of `weft …` lines without a language."""
    begun = re.compile(r"^```(?:|sh|bash|shell)\n(?:weft |\$ ).*", re.MULTILINE)
    stray = [
        (page.name, found) for page in PAGES for found in begun.findall(page.read_text(encoding="utf-8"))
    ]
    assert stray == []


def fenced(language: str) -> list[tuple[str, str]]:
    block = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page.name, text) for page in PAGES for text in block.findall(page.read_text(encoding="utf-8"))]


def test_other_blocks_are_what_their_fence_says():
    for _, text in fenced("python"):
        ast.parse(text)
    for _, text in fenced("json"):
        json.loads(text)
    assert {"kubernetes.md"} <= {name for name, _ in fenced("yaml")}


def missing_names(text: str) -> list[str]:
    """Names that a Python block imports from weft, or reads from a weft module, and that do not exist.

    Skips packages that import torch, which takes seconds.
    """
    tree, modules, missing = ast.parse(text), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(
            r"weft(?!\.ops|\.integrations)\b", node.module or ""
        ):
            for name in (alias.name for alias in node.names):
                try:
                    home = importlib.import_module(node.module or "")
                    found = getattr(home, name, None) or importlib.import_module(f"{node.module}.{name}")
                except ModuleNotFoundError as error:
                    if (error.name or "").startswith("weft"):
                        missing.append(f"{node.module}.{name}")
                else:
                    modules[name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = modules.get(node.value.id)
            if isinstance(home, types.ModuleType) and not hasattr(home, node.attr):
                missing.append(f"{home.__name__}.{node.attr}")
    return missing


def test_python_blocks_name_what_exists():
    assert [(page, name) for page, text in fenced("python") for name in missing_names(text)] == []
    wrong = "from weft.shim import spans, nothing\nspans.profile(1)\nspans.span_profile(1)\n"
    assert missing_names(wrong) == ["weft.shim.nothing", "weft.shim.spans.profile"]


def test_manifests_are_yaml():
    yaml = pytest.importorskip("yaml")
    for name, text in fenced("yaml"):
        assert isinstance(yaml.safe_load(text), dict), name


def test_scripts_of_the_pages_are_shell():
    for name, text in fenced("bash"):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr)


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [
        (("a", "b"), "a\n\nb  \n", True),
        (("a", "…", "c"), "a\nb\nb\nc\n", True),
        (("a", "…"), "a\n", True),
        (("a",), "a\nb\n", False),
        (("a", "…", "d"), "a\nb\n", False),
        (("1.0 ms",), "110 ms\n", False),
    ],
)
def test_output_is_compared_line_by_line(shown, output, same):
    assert matches(shown, output) is same


def test_blocks_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n<!-- needs: GPUs -->\n```console\n$ a \\\n  b\nout\n$ c\n```\n\n```console\n$ d\n```\n"
    )
    assert blocks(page) == [
        Block(page, "GPUs", (Command(5, "a \\\n  b", ("out",)), Command(8, "c", ()))),
        Block(page, "", (Command(12, "d", ()),)),
    ]
