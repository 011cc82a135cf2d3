"""The README's terminal picture: `python scripts/site/terminal.py` draws the output of `weft analyze`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/images/analyze.svg"
COMMAND = ("weft", "analyze", "tests/data/traces/h200_ddp_2ranks")
WIDTH = 80
LAST_HEADING = "What to try"
ADVICE_LINES = 2  # lines shown of the first piece of advice
THEME = TerminalTheme(
    (22, 24, 33),
    (222, 226, 235),
    [
        *((60, 63, 78), (240, 113, 120), (140, 200, 120), (240, 190, 110)),
        *((120, 170, 250), (200, 150, 240), (110, 200, 200), (222, 226, 235)),
    ],
)
# Rich's own template loads a font from another server; this one takes the reader's.
FORMAT = """<svg class="terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def printed() -> str:
    """What the command prints in a color terminal of 80 columns, up to its first piece of advice."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    env.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", *COMMAND], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    plain = [Text.from_ansi(line).plain for line in lines]
    end = plain.index(LAST_HEADING) + 1 + ADVICE_LINES
    return "\n".join([f"\033[1m$ {' '.join(COMMAND)}\033[0m", *lines[:end], "  …"])


def picture() -> str:
    """The picture as SVG; the same text always gives the same file."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="256")
    console.print(Text.from_ansi(printed()), no_wrap=True, crop=False)
    drawn = console.export_svg(
        title="", theme=THEME, code_format=FORMAT, unique_id="weft", font_aspect_ratio=0.61
    )
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
