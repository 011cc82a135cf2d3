"""Rewrites links between Markdown files of the repository for the site."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

# Fenced blocks and inline code match first, so that apparent links inside them stay unchanged.
_LINK = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)|`[^`\n]*`)|(?P<text>\]\()(?P<target>[^)\s]+)(?P<end>\))",
    re.MULTILINE | re.DOTALL,
)
_ELSEWHERE = re.compile(r"^([a-z][a-z0-9+.-]*:|#|//)", re.IGNORECASE)


def site_path(path: Path, root: Path) -> str:
    """The path of a repository file on the site: docs/ is the root, README.md the home page."""
    inside = path.relative_to(root).as_posix()
    if inside == "README.md":
        return "index.md"
    return inside.removeprefix("docs/")


def targets(markdown: str, folder: Path) -> list[Path]:
    """The files that a page in `folder` links to."""
    found = [match["target"] for match in _LINK.finditer(markdown) if match["target"]]
    local = [target.partition("#")[0] for target in found if not _ELSEWHERE.match(target)]
    return [Path(os.path.normpath(folder / target)) for target in local]


def rewritten(markdown: str, folder: Path, site_folder: str, root: Path) -> str:
    """The page with each link to an existing file turned into a link between pages of the site."""

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        if match["code"] or _ELSEWHERE.match(target):
            return match[0]
        name, mark, place = target.partition("#")
        path = Path(os.path.normpath(folder / name))
        if not path.is_file() or not path.is_relative_to(root):
            return match[0]  # leave it for MkDocs to report
        return f"{match['text']}{posixpath.relpath(site_path(path, root), site_folder or '.')}{mark}{place})"

    return _LINK.sub(replace, markdown)
