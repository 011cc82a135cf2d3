"""Makes all pictures of the docs from real runs: `python scripts/site/pictures.py` (needs Chromium).

Each picture of a page carries the page's headline as text, so that a test can tell when it is outdated.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import terminal

ROOT = terminal.ROOT
_KEYWORD = b"Description"


@dataclass(frozen=True)
class Picture:
    """A window on the page that a command writes with `--html`."""

    name: str
    command: tuple[str, ...]
    height: int
    pointer: tuple[int, int] | None = None
    """Where the pointer rests, in pixels."""

    @property
    def path(self) -> Path:
        """The picture's file."""
        return ROOT / "docs/images" / self.name


PICTURES = (
    Picture("report.png", ("analyze", "tests/data/traces/h200_ddp_2ranks"), 1040, (682, 516)),
    Picture(
        "plan.png",
        ("plan", "--model", "llama3-70b", "--gpu", "h100", "--gpus", "1024", "--tp", "8", "--pp", "4"),
        1000,
    ),
)


def headline(picture: Picture) -> str:
    """The first sentence that the command prints, which is the page's headline too."""
    printed = _run(picture.command)
    return " ".join(printed[: printed.index(".\n") + 1].split())


def described(png: bytes) -> str:
    """The headline that a picture carries."""
    place = png.index(b"tEXt" + _KEYWORD + b"\0")
    size = int.from_bytes(png[place - 4 : place], "big")
    return png[place + 4 + len(_KEYWORD) + 1 : place + 4 + size].decode("latin-1")


def _with_description(png: bytes, text: str) -> bytes:
    """The PNG with a text chunk after its header."""
    body = b"tEXt" + _KEYWORD + b"\0" + text.encode("latin-1", "replace")
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    end_of_header = 8 + 25
    return png[:end_of_header] + chunk + png[end_of_header:]


def _run(command: tuple[str, ...]) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "1000"}
    done = subprocess.run(
        [sys.executable, "-m", "weft", *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _draw(picture: Picture) -> None:
    sys.path.insert(0, str(ROOT / "tests/browser"))
    from devtools import Browser, find_chromium

    browser = Browser(find_chromium() or "chromium")
    try:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.html"
            _run((*picture.command, "--html", str(page)))
            shown = browser.open(page, height=picture.height)
            if picture.pointer:
                shown.mouse("mouseMoved", *picture.pointer)
            shown.settle()
            shown.screenshot(picture.path)
    finally:
        browser.close()
    picture.path.write_bytes(_with_description(picture.path.read_bytes(), headline(picture)))


if __name__ == "__main__":
    terminal.PICTURE.write_text(terminal.picture(), encoding="utf-8")
    for wanted in PICTURES:
        _draw(wanted)
