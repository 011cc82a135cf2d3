"""Hooks of MkDocs: README.md is the home page, links may leave docs/, reference text comes from the code."""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import links
import reference

ROOT = Path(__file__).resolve().parents[2]
EXTRA_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, and every file outside docs/ that a page links to."""
    waiting = [ROOT / name for name in EXTRA_PAGES]
    waiting += [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        path = waiting.pop()
        address = links.site_path(path, ROOT)
        if files.get_file_from_path(address) is None:
            files.append(File.generated(config, address, abs_src_path=str(path)))
        if path.suffix == ".md":
            found = links.targets(path.read_text(encoding="utf-8"), path.parent)
            waiting += [
                target
                for target in found
                if target.is_file()
                and target.is_relative_to(ROOT)
                and files.get_file_from_path(links.site_path(target, ROOT)) is None
            ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's addresses, and fill in the text made from the code."""
    if page.file.abs_src_path:
        here = posixpath.dirname(page.file.src_uri)
        markdown = links.rewritten(markdown, Path(page.file.abs_src_path).parent, here, ROOT)
    return reference.filled_in(markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make an empty corner of a table a plain cell: screen readers would announce it as a header."""
    return html.replace("<th></th>", "<td></td>")
