"""Checks of the values in a document; each error names the key and the values that are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import UsageError


def check_keys(where: str, mapping: Mapping[str, Any], known: Any) -> None:
    for key in mapping:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} {value!r} is not known; use one of {', '.join(choices)}")


def check_int(name: str, value: Any, low: int, high: int, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} {value!r} is not valid; use an integer from {low} to {high}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UsageError(f"{name} {value!r} is not valid; use a number from {low:g} to {high:g}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} {value!r} is not valid; use true or false")
