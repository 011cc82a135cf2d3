"""Tables of a dataclass's fields: name, type, default and the docstring under each, read from the source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from typing import Any

_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "true or false", "None": "null"}


def table(kind: type[Any], names: dict[str, str]) -> str:
    """A Markdown table of the fields; `names` gives what each is called in the document."""
    texts = _docstrings(kind)
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(kind):
        default = "required" if field.default is MISSING else _value(field.default)
        cells = (f"`{names[field.name]}`", _json_type(str(field.type)), default, texts.get(field.name, ""))
        rows.append("| " + " | ".join(cell_text(cell) for cell in cells) + " |")
    return "\n".join(rows)


def _docstrings(kind: type[Any]) -> dict[str, str]:
    """The string that follows each annotated name in the body of the class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = getattr(getattr(after, "value", None), "value", None)
            if isinstance(after, ast.Expr) and isinstance(text, str):
                found[field.target.id] = text
    return found


def _value(default: Any) -> str:
    return "none" if default is None or default == () else f"`{default}`"


def _json_type(annotation: str) -> str:
    """`int | None` as it is in JSON: integer or null."""
    return " or ".join(_JSON_TYPES.get(part, "list") for part in annotation.split(" | "))


def cell_text(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "&#124;")
