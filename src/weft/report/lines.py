"""Text and tables in the terminal, never wider than 80 columns. Names from files are never read as markup."""

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
    """A table without lines between rows; columns are (label, `left`, `right` or `fold`: wrapped text)."""
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
    """Print a table, which loses text at the ends of its columns where it would be too wide."""
    console.print(table, width=min(console.width, TERMINAL_WIDTH))
