"""Tables of the keys of a JSON document, from its JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.report.documents import json_schema

Schema = dict[str, Any]


def table(name: str, shown: dict[str, str] | None = None) -> str:
    """A Markdown table of every key that `weft schema NAME` describes; nested: `a.b`, in a list: `a[].b`.

    `shown` maps objects of earlier tables on the page to their key there; they are not listed again.
    """
    schema = json_schema(name)
    rows = ["| key | values | meaning |", "| --- | --- | --- |"]
    for key, part, same in _keys(schema, schema.get("$defs", {}), "", {} if shown is None else shown, name):
        meaning = " ".join(filter(None, (cell_text(part.get("description", "")), same)))
        rows.append(f"| `{key}` | {_values(part, schema)} | {meaning} |")
    return "\n".join(rows)


def cell_text(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "&#124;")


def _keys(
    part: Schema, definitions: Schema, prefix: str, shown: dict[str, str], name: str
) -> Iterator[tuple[str, Schema, str]]:
    """Each key with its schema, and where its object was listed before."""
    for key, value in part.get("properties", {}).items():
        objects = list(_objects(value, definitions))
        before = [shown[title] for title, _, _ in objects if title in shown]
        yield prefix + key, value, "".join(f"As {place}." for place in before)
        for title, mark, below in objects:
            if title not in shown:
                if title:
                    shown[title] = f"`{prefix}{key}` of {name}"
                yield from _keys(below, definitions, f"{prefix}{key}{mark}.", shown, name)


def _objects(part: Schema, definitions: Schema) -> Iterator[tuple[str, str, Schema]]:
    """The objects that a value may be or hold: title, `[]` for each list around it, schema."""
    if "$ref" in part:
        title = part["$ref"].rpartition("/")[2]
        if definitions[title].get("properties"):
            yield title, "", definitions[title]
    elif part.get("properties"):
        yield "", "", part
    for choice in part.get("anyOf", ()):
        yield from _objects(choice, definitions)
    if isinstance(part.get("items"), dict):
        yield from (
            (title, f"[]{mark}", below) for title, mark, below in _objects(part["items"], definitions)
        )


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
