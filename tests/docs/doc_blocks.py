"""Console blocks of the docs: the commands, the output shown, and what a block needs to run.

A block fenced as `console` is run. A comment in the line before the fence, `<!-- needs: GPUs -->`, says what a block
needs that a test machine does not have; a block that needs torch is run where torch is installed. Lines that begin
with `$ ` are commands; a trailing backslash continues one. The lines after a command are its output; a line `…`
stands for any number of lines.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.as_posix(),
)
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[^\n]+) -->\n)?^```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
ELLIPSIS = "…"


@dataclass(frozen=True)
class Command:
    """One command and the output that the page shows for it."""

    line: int
    text: str
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One console block; `needs` is empty where it runs on any machine."""

    page: Path
    needs: str
    commands: tuple[Command, ...]


def blocks(page: Path) -> list[Block]:
    """The console blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        first = text.count("\n", 0, match.start("body")) + 1
        found.append(Block(page, match["needs"] or "", tuple(_commands(match["body"], first))))
    return found


def runnable(page: Path) -> list[Command]:
    """The commands of a page that this machine can run, in order."""
    return [command for block in blocks(page) if block.needs in _here() for command in block.commands]


def _here() -> set[str]:
    return {"", "torch"} if importlib.util.find_spec("torch") else {""}


def _commands(body: str, first: int) -> list[Command]:
    found: list[Command] = []
    lines = iter(enumerate(body.splitlines(), first))
    for number, line in lines:
        if line.startswith("$ "):
            text = line[2:]
            while text.endswith("\\"):
                text += "\n" + next(lines)[1]
            found.append(Command(number, text, ()))
        elif found:
            last = found.pop()
            found.append(Command(last.line, last.text, (*last.shown, line)))
        else:
            raise ValueError(f"line {number}: a console block begins with a command ('$ …'), not {line!r}")
    return found


def matches(shown: tuple[str, ...], output: str) -> bool:
    """Whether the output matches the page, ignoring blank lines, trailing blanks and what `…` leaves out."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == ELLIPSIS else re.escape(line.rstrip()) + "\n"
        for line in shown
        if line.strip()
    )
    lines = [line.rstrip() + "\n" for line in output.splitlines() if line.strip()]
    return re.fullmatch(pattern, "".join(lines)) is not None
