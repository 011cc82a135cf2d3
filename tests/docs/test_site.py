"""The site: it builds without a warning, and what it shows comes from the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT
from site_building import build

sys.path.insert(0, str(ROOT / "scripts/site"))

import links
import pictures
import terminal
from rich.text import Text

from weft.cli.main import COMMANDS


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return build(tmp_path_factory)


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8"))


def test_every_page_is_on_the_site(site: Path):
    names = [links.site_path(page, ROOT) for page in PAGES]
    assert [name for name in names if not (site / name).with_suffix(".html").is_file()] == []


def test_the_home_page_is_the_readme(site: Path):
    assert "hides multi-GPU communication behind computation" in text_of(site / "index.html")


def test_files_outside_docs_that_pages_link_to_are_there(site: Path):
    assert (site / "benchmarks/results/lab/placed.jsonl").is_file()
    assert (site / "benchmarks/results/plan/index.html").is_file()


def test_the_command_line_is_made_from_the_program(site: Path):
    page = text_of(site / "reference/commands.html")
    assert [name for name in COMMANDS if f"weft {name}" not in page] == []
    assert "--tune-budget SHARE" in page


def test_python_is_made_from_docstrings(site: Path):
    page = text_of(site / "reference/python.html")
    assert "The defaults change nothing" in page


def test_no_page_asks_another_server(site: Path):
    loads = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    asked = {
        (page.name, found)
        for page in site.rglob("*.html")
        for found in loads.findall(page.read_text(encoding="utf-8"))
    }
    assert asked == set()


def test_a_broken_link_fails_the_build(tmp_path: Path, site: Path):
    copy = tmp_path / "docs"
    copy.mkdir()
    (copy / "page.md").write_text("# Page\n\n[gone](gone.md) [no place](page.md#nowhere)\n", encoding="utf-8")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    settings = re.sub("(?m)^(hooks|extra_css|extra_javascript):.*", "", settings)
    settings = settings.replace("docs_dir: docs", f"docs_dir: {copy}")
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "mkdocs.yml", "-d", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "gone.md" in done.stderr
    assert "nowhere" in done.stderr


def test_the_picture_shows_what_the_command_prints():
    drawn = terminal.PICTURE.read_text(encoding="utf-8")
    rows = re.findall(r"<text [^>]*y=\"([\d.]+)\"[^>]*>([^<]*)</text>", drawn)
    shown: dict[str, str] = {}
    for y, text in rows:
        shown[y] = shown.get(y, "") + text.replace("&#160;", "").strip()
    printed = [Text.from_ansi(line).plain for line in terminal.printed().splitlines()]
    expected = [re.sub(r"\s", "", line) for line in printed if line.strip()]
    lines = [text for text in shown.values() if text.strip()]
    assert lines == expected, "run scripts/site/pictures.py"
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda picture: picture.name)
def test_a_picture_of_a_page_is_not_old(picture: pictures.Picture):
    assert pictures.described(picture.path.read_bytes()) == pictures.headline(picture), (
        "run scripts/site/pictures.py"
    )


def test_lists_have_a_blank_line_before_them():
    """GitHub accepts a list right after a paragraph; the site's Markdown does not."""
    begun = re.compile(r"^(?![-*#|>\d<\s`]).*\n(?:[-*]|1\.) .*", re.MULTILINE)
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    texts = {page.name: code.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name: begun.findall(text) for name, text in texts.items() if begun.search(text)} == {}


def test_links_are_rewritten_outside_code_only():
    text = "[a](../benchmarks/results/README.md#x) `[b](../benchmarks/results/README.md)` [c](https://d.example/)\n"
    made = links.rewritten(text, ROOT / "docs", "", ROOT)
    assert made == text.replace("(../benchmarks/results/README.md#x)", "(benchmarks/results/README.md#x)")
    assert links.rewritten("[r](../README.md)", ROOT / "docs", "", ROOT) == "[r](index.md)"
    assert links.rewritten("[r](../../README.md)", ROOT / "docs/how-to", "how-to", ROOT) == "[r](../index.md)"
