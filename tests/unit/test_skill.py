"""The skill file for coding agents names only commands, options and keys that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import contract
import pytest

from weft.report.documents import SCHEMAS, json_schema

SKILL = (Path(__file__).parents[2] / "skills/weft/SKILL.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`]+)`", SKILL.split("---", 2)[2])
COMMANDS = sorted({code for code in CODE if re.match(r"weft [a-z]", code)})
KEYS = re.findall(r"^- `([a-z-]+)`: (.*?)(?=^- |^## )", SKILL, re.MULTILINE | re.DOTALL)


@cache
def helps() -> dict[str, str]:
    return contract.help_texts()


@pytest.mark.parametrize("code", COMMANDS)
def test_every_command_and_option_exists(code):
    words = code.split(" -- ")[0].split()
    assert words[1] in helps()
    known = contract.options_of(helps()[words[1]])
    assert [word for word in words[2:] if re.match(r"--[a-z]", word) and word not in known] == []


def test_every_command_for_users_is_mentioned():
    named = {code.split()[1] for code in COMMANDS}
    assert named >= {"doctor", "analyze", "run", "top", "tune", "plan", "explore", "schema"}


def resolve(schema: dict[str, Any], path: str) -> bool:
    """Whether a document of this schema can have a key path such as `advice[].gain_us`."""
    places = [schema]
    for part in path.split("."):
        name = part.removesuffix("[]")
        found = []
        for place in places:
            found += _follow(schema, place.get("properties", {}).get(name, {}))
            if isinstance(place.get("additionalProperties"), dict):
                found += _follow(schema, place["additionalProperties"])
        if part.endswith("[]"):
            found = [item for place in found for item in _follow(schema, place.get("items", {}))]
        places = found
    return bool(places)


def _follow(root: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in part:
        return _follow(root, root["$defs"][part["$ref"].rpartition("/")[2]])
    if "anyOf" in part:
        return [found for option in part["anyOf"] for found in _follow(root, option)]
    return [part] if part else []


PATHS = [
    (name, path)
    for name, text in KEYS
    for path in re.findall(r"`([a-z_]+(?:\[\])?(?:\.[a-z_]+(?:\[\])?)*)`", text)
    if not re.fullmatch(r"ok|warn|fail|skip|kept|stopped|apply", path)
]
PATHS += [("analyze", f"summary.attribution.{key}") for key in re.findall(r"`([a-z_]+_us)` leads", SKILL)]


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_every_key_is_one_of_the_schemas(name, path):
    schema = json_schema(name)
    inside = ("status", "fix") if name == "doctor" else ()
    assert resolve(schema, f"checks[].{path}" if path in inside else path)


def test_the_check_itself_finds_what_is_not_there():
    assert len(PATHS) > 20
    assert {name for name, _ in KEYS} <= SCHEMAS.keys()
    assert not resolve(json_schema("run"), "tuning.nonsense")
    assert not resolve(json_schema("analyze"), "advice.gain_us")
    assert resolve(json_schema("analyze"), "advice[].gain_us")


def test_every_schema_in_the_table_exists():
    rows = re.findall(r"^\|.*\| `([a-z-]+)` \|$", SKILL, re.MULTILINE)
    assert len(rows) >= 8
    assert set(rows) <= SCHEMAS.keys()
