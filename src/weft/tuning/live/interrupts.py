"""Detects exceptions that the program's signal handlers raise in weft's code; they belong to the program."""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType
from typing import Any


def of_the_program(error: BaseException) -> bool:
    """Whether an exception that weft caught is Ctrl-C or an exit, or was raised by a signal handler."""
    if not isinstance(error, Exception):
        return True
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code in codes:
            return True
        frames = frames.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """The code object of a Python handler (function, method, partial or callable object), else None."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if callable(handler) and not hasattr(function, "__code__"):
        function = type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
