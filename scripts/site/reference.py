"""Reference text made from the code: a page has `<!-- generated: NAME -->` where it belongs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import schemas
import typer

from weft.cli.main import COMMANDS, build_app
from weft.report.documents import SCHEMAS

_MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def filled_in(markdown: str) -> str:
    """The page with every mark replaced; an unknown name is an error."""
    return _MARK.sub(lambda match: _PARTS[match[1]](), markdown)


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    group: Any = typer.main.get_command(build_app())
    return "\n\n".join(_command(name, group.commands[name]) for name in COMMANDS)


def _command(name: str, command: Any) -> str:
    context = command.make_context(f"weft {name}", [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    paragraphs = [_paragraph(text) for text in (command.help or "").split("\n\n")]
    rows = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    table = ["| option | meaning |", "| --- | --- |"]
    table += [f"| `{' '.join(row[0].split())}` | {schemas.cell_text(row[1])} |" for row in rows if row]
    return "\n\n".join([f"## weft {name}", f"```text\n{usage}\n```", *paragraphs, "\n".join(table)])


def _paragraph(text: str) -> str:
    """Turn command lines of a help text into a code block; other text stays prose."""
    return f"```text\n{text.strip()}\n```" if text.lstrip().startswith("weft ") else " ".join(text.split())


def policy() -> str:
    """Every key of a policy file."""
    return schemas.table("policy")


def results() -> str:
    """Every key of every result."""
    names = [name for name in SCHEMAS if name != "policy"]
    shown: dict[str, str] = {}
    return "\n\n".join(f"## {name}\n\n{schemas.table(name, shown)}" for name in names)


_PARTS: dict[str, Callable[[], str]] = {"commands": commands, "policy": policy, "results": results}
