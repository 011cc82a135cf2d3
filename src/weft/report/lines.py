"""Prints text and tables, at most 80 columns wide. Names from files are never interpreted as markup."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

TERMINAL_WIDTH = 80


def print_line(console: Console, said: str, *, style: str = "", indent: int = 0) -> None:
    """Print a paragraph, wrapped and indented."""
    width = min(console.width, TERMINAL_WIDTH) - indent
    for line in Text(said, style=style).wrap(console, width):
        console.print(Text(" " * indent).append_text(line), soft_wrap=True)


def plain_table(*columns: tuple[str, str], edge: bool = True) -> Table:
    """A table without lines between rows. Columns are (label, `left`, `right` or `fold` for wrapped text)."""
    padding = (0, 1) if edge else (0, 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=edge)
    for label, justify in columns:
        table.add_column(
            label,
            justify="right" if justify == "right" else "left",
            no_wrap=justify != "fold",
            overflow="fold" if justify == "fold" else "ellipsis",
        )
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table; columns are truncated if it would be too wide."""
    console.print(table, width=min(console.width, TERMINAL_WIDTH))
