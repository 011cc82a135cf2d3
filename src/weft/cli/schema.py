"""`weft schema`: JSON Schema of policies and of the commands' JSON documents."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="policy, or a command: analyze, tune, plan, run, top …"),
    ] = None,
) -> None:
    """Print the JSON Schema of a policy or of a command's JSON.

    The schemas follow draft 2020-12. Without NAME, their names are listed.

    weft schema policy > policy.schema.json
    """
    from weft.report.documents import SCHEMAS, json_schema

    if name is not None:
        print(json.dumps(json_schema(name), indent=2))
        return
    for known, kind in SCHEMAS.items():
        first = (kind.__doc__ or "").strip().partition("\n")[0]  # `python -OO` has no docstrings
        print(f"{known:16} {first}".rstrip())
