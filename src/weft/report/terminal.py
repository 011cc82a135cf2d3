"""Results in the terminal: tables that fit 80 columns, the causes, and the next command."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def show_analysis(document: dict[str, Any], console: Console) -> None:
    """Print the document of `weft analyze`."""
    raise NotImplementedError


def show_comparison(document: dict[str, Any], console: Console) -> None:
    """Print a comparison of two analyses: `before`, `after` and `change`."""
    raise NotImplementedError
