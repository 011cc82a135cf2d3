"""The code map in docs/how-it-works.md: its packages and files exist, in the order of the imports."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from test_code_map import PACKAGES, ROOT, SOURCE, imports, modules

PAGE = (Path(__file__).parents[2] / "docs/how-it-works.md").read_text(encoding="utf-8")
MAP = PAGE.split("## Code map")[1]
PATHS = {
    title: re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)
    for title, text in re.findall(r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", MAP, re.MULTILINE | re.DOTALL)
}
TITLES = [
    "`weft run --tune`.",
    "A launch.",
    "A trace to the page.",
    "A fused op to its copies.",
    "`weft plan`.",
    "`weft tune` on the simulator.",
]
# torch loads these by name in the job's processes.
BY_NAME = {"integrations/autoload/weft_autoload.py", "tuning/live/job.py"}


def test_the_map_has_every_package_in_the_order_of_imports():
    block = MAP.split("```")[1]
    assert tuple(re.findall(r"^  (\w+)/ ", block, re.MULTILINE)) == PACKAGES
    words = set(re.findall(r"\w+", block.split("src/weft/")[1].split("gpu/")[0]))
    assert set(ROOT) <= words


def test_the_six_paths_are_there():
    assert list(PATHS) == TITLES


@pytest.mark.parametrize("title", PATHS)
def test_a_path_names_existing_files_once_each(title):
    files = PATHS[title]
    assert len(files) > 8
    assert [name for name in files if not (SOURCE / name).is_file()] == []
    assert len(set(files)) == len(files)
    numbers = re.findall(r"^(\d+)\. ", MAP.split(f"**{title}**")[1].split("\n**")[0], re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(files) + 1)]


@pytest.mark.parametrize("title", PATHS)
def test_each_module_of_a_path_imports_one_before_it_or_is_imported_by_it(title):
    """The import may go through modules that the path leaves out."""
    reach = reachable()
    files = [name for name in PATHS[title] if name.endswith(".py")]
    for place, name in enumerate(files[1:], 1):
        linked = any(name in reach[before] or before in reach[name] for before in files[:place])
        assert linked or name in BY_NAME, name


@cache
def reachable() -> dict[str, set[str]]:
    """For each module, every module that it loads, at once or later."""
    names = {".".join(("weft", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in modules()}
    names = {name.removesuffix(".__init__"): str(path.relative_to(SOURCE)) for name, path in names.items()}
    direct = {path: {names[n] for n in imports(SOURCE / path) if n in names} for path in names.values()}
    found = {path: set(uses) for path, uses in direct.items()}
    changed = True
    while changed:
        changed = False
        for uses in found.values():
            more = set().union(*(found[name] for name in uses)) - uses
            uses |= more
            changed = changed or bool(more)
    return found
