"""Short, readable kernel names."""

from __future__ import annotations

import re

_ARGUMENTS = re.compile(r"\((?!anonymous)[^()]*(?:\([^()]*\)[^()]*)*\)\s*(?:const)?$")
_MAX_PARSED = 1 << 12  # the expression is quadratic on hostile names


def short_name(kernel: str) -> str:
    """A kernel's name without its return type and arguments."""
    plain = kernel.removeprefix("void ")
    return (_ARGUMENTS.sub("", plain) if len(plain) < _MAX_PARSED else plain) or kernel
