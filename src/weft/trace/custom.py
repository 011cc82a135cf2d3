"""Which kernels communicate: those in weft's table, and those that match the user's regular expression."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from weft.errors import UsageError
from weft.kernels import is_comm

IsComm = Callable[[list[str]], list[bool]]
"""Tells which kernel names communicate."""

MAX_MATCHED = 1 << 12
"""Characters of a name compared with the table: a hostile name could take quadratic time."""

MAX_PATTERN = 1000
TIMEOUT_S = 5

# The expression runs in a process of its own: a catastrophic one cannot be interrupted from within.
_CHILD = """
import json, re, sys
pattern, names = json.load(sys.stdin)
expression = re.compile(pattern)
json.dump([expression.search(name) is not None for name in names], sys.stdout)
"""


def kernel_table(names: list[str]) -> list[bool]:
    """Whether each name is in the table of communication kernels."""
    return [is_comm(name[:MAX_MATCHED]) for name in names]


def comm_matcher(pattern: str | None) -> IsComm:
    """A function that tells which kernels communicate: those in the table, and those that match `pattern`."""
    if pattern is None:
        return kernel_table
    if len(pattern) > MAX_PATTERN:
        raise UsageError(f"--comm: an expression of {len(pattern)} characters; the limit is {MAX_PATTERN}")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--comm {pattern!r} is not a regular expression: {error}") from error

    def matches(names: list[str]) -> list[bool]:
        extra = _search(pattern, names)
        return [known or more for known, more in zip(kernel_table(names), extra, strict=True)]

    return matches


def _search(pattern: str, names: list[str]) -> list[bool]:
    import subprocess  # few need it

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
