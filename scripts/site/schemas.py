"""Tables of the keys of a JSON document, from its JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.report.documents import json_schema

Schema = dict[str, Any]


def table(name: str) -> str:
    """A Markdown table of every key that `weft schema NAME` describes; nested: `a.b`, in a list: `a[].b`."""
    schema = json_schema(name)
    rows = ["| key | values | meaning |", "| --- | --- | --- |"]
    for key, part in _keys(schema, schema.get("$defs", {}), "", ()):
        rows.append(f"| `{key}` | {_values(part, schema)} | {cell_text(part.get('description', ''))} |")
    return "\n".join(rows)


def cell_text(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "&#124;")


def _keys(
    part: Schema, definitions: Schema, prefix: str, inside: tuple[str, ...]
) -> Iterator[tuple[str, Schema]]:
    for key, value in part.get("properties", {}).items():
        yield prefix + key, value
        for mark, below in _objects(value, definitions, inside):
            names = (*inside, below.get("title", ""))
            yield from _keys(below, definitions, f"{prefix}{key}{mark}.", names)


def _objects(part: Schema, definitions: Schema, inside: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    """The objects that a value may be or hold, with `[]` for lists; an object inside itself is left out."""
    if "$ref" in part:
        found = definitions[part["$ref"].rpartition("/")[2]]
        if found.get("title", "") not in inside:
            yield "", found
    elif part.get("properties"):
        yield "", part
    for choice in part.get("anyOf", ()):
        yield from _objects(choice, definitions, inside)
    if isinstance(part.get("items"), dict):
        yield from ((f"[]{mark}", below) for mark, below in _objects(part["items"], definitions, inside))


def _values(part: Schema, schema: Schema) -> str:
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return " ".join(f"`{value}`" if value is not None else "null" for value in part["enum"])
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_values(choice, schema) for choice in part["anyOf"]))
    if "$ref" in part:
        return _values(schema["$defs"][part["$ref"].rpartition("/")[2]], schema)
    kind = part.get("type", "any")
    kinds = kind if isinstance(kind, list) else [kind]
    limits = [
        f"{word} {part[name]:,.10g}"
        for name, word in (("minimum", "from"), ("maximum", "to"))
        if name in part
    ]
    return " ".join([" or ".join({"array": "list"}.get(name, name) for name in kinds), *limits])
