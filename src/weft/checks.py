"""Checks of the values in a document; each error names the key and the values that are valid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from weft.errors import UsageError


def check_keys(where: str, mapping: Mapping[str, Any], known: Any) -> None:
    for key in mapping:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `object_pairs_hook`. Rejects duplicate keys, of which json would keep the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"duplicate key {key!r}; remove one")
        found[key] = value
    return found


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise UsageError(f"{name} {value!r} is not known; {use_one_of(value, choices)}")


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for a name that is not among the choices."""
    return UsageError(f"no {kind} named {name!r}; {use_one_of(name, choices)}")


def use_one_of(value: Any, choices: Iterable[str]) -> str:
    """Lists all choices, after a suggestion if `value` resembles one of them."""
    import difflib  # only an error needs it

    known = list(choices)
    near = difflib.get_close_matches(str(value).lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}use one of {', '.join(known)}"


def check_int(name: str, value: Any, low: int, high: int, *, optional: bool = True, why: str = "") -> None:
    """`why`: the origin of the limits, for the error message."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        reason = f" ({why})" if why else ""
        raise UsageError(f"{name} {value!r} is not valid; use an integer from {low} to {high}{reason}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UsageError(f"{name} {value!r} is not valid; use a number from {low:g} to {high:g}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} {value!r} is not valid; use true or false")
