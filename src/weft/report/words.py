"""Words and number formats shared by the terminal, the page and the export."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.errors import UsageError
from weft.policy import Policy
from weft.report.reading import clean, finite, shorten
from weft.trace.reasons import REASON_TABLE
from weft.trace.summary import duration as duration  # the one format of a time

NOTHING = "\N{EN DASH}"


CAUSE_TEXTS = tuple(replace(reason, key=f"{reason.key}_us") for reason in REASON_TABLE)
"""The reasons for exposure under their keys in a document."""


def cause_name(key: str) -> str:
    """The short name of a cause, even if this version does not know it."""
    known = {cause.key: cause.name for cause in CAUSE_TEXTS}
    return known.get(key) or clean(key.removesuffix("_us").replace("_", " "))


def brief_cause(key: str | None) -> str:
    """The name of a cause for a narrow column."""
    if key is None:
        return NOTHING
    return shorten(cause_name(key), 17)


def milliseconds(ms: float | None) -> str:
    """Milliseconds in a suitable unit."""
    return duration(None if ms is None else ms * 1e3)


def percent(value: float | None, digits: int = 1) -> str:
    """A percentage."""
    return NOTHING if value is None else f"{value:.{digits}f}%"


def ratio(value: float | None) -> str:
    """A plain number with three decimals."""
    return NOTHING if value is None else f"{value:.3f}"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None or count < 0:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return NOTHING


def bandwidth(gbps: float | None) -> str:
    """Bus bandwidth in GB/s, without the unit."""
    return NOTHING if gbps is None else f"{gbps:.4g}"


def share(part: float, whole: float) -> float:
    """A part in percent of the whole; 0 if the whole is 0."""
    return 100.0 * part / whole if whole > 0 else 0.0


def gain(low_high: tuple[float, float] | None) -> str:
    """A predicted gain as a range, from µs; empty if there is none."""
    if low_high is None or low_high[1] <= 0:
        return ""
    low, high = low_high
    return f"up to {duration(high)}" if low <= 0 else f"{duration(low)} to {duration(high)}"


def policy_name(policy: Any) -> str:
    """A policy in one line, from a name, a policy document or an object of controls."""
    if not isinstance(policy, dict):
        return NOTHING if policy is None else clean(policy)
    try:
        return clean(Policy.from_dict(policy))
    except UsageError:  # written by another version: show what it says
        return ", ".join(_controls(policy)) or "no control"


def _controls(section: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key, value in section.items():
        if isinstance(value, dict):
            found += _controls(value)
        elif key != "version" and value not in (None, []):
            found.append(f"{clean(key)} {_control(value)}")
    return found


def _control(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)}]"
    exact = finite(value)
    return f"{exact:g}" if exact is not None else clean(value)
