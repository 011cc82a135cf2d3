"""Communication kernels that the user names with a regular expression, in addition to those of the table."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from weft.errors import UsageError
from weft.trace.record import IsComm, table

MAX_PATTERN = 1000
TIMEOUT_S = 5

# The expression runs in a process of its own: a catastrophic one cannot be interrupted from within.
_CHILD = """
import json, re, sys
pattern, names = json.load(sys.stdin)
expression = re.compile(pattern)
json.dump([expression.search(name) is not None for name in names], sys.stdout)
"""


def comm_matcher(pattern: str | None) -> IsComm:
    """Says which kernels communicate: those of the table, and those in whose name `pattern` is found."""
    if pattern is None:
        return table
    if len(pattern) > MAX_PATTERN:
        raise UsageError(f"--comm: an expression of {len(pattern)} characters; the limit is {MAX_PATTERN}")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--comm {pattern!r} is not a regular expression: {error}") from error

    def matches(names: list[str]) -> list[bool]:
        extra = _search(pattern, names)
        return [known or more for known, more in zip(table(names), extra, strict=True)]

    return matches


def _search(pattern: str, names: list[str]) -> list[bool]:
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    data = json.dumps([pattern, names])
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        found: list[bool] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"--comm {pattern!r} takes more than {TIMEOUT_S} s on this trace's names; avoid nested repeats"
        ) from None
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        raise UsageError(f"--comm {pattern!r} cannot be tried on this trace's names: {error}") from error
    return found
