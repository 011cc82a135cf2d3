"""Exceptions that the program's signal handlers raise while weft's code runs: they belong to the program."""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType
from typing import Any


def of_the_program(error: BaseException) -> bool:
    """Whether an exception caught by weft is Ctrl-C, an exit, or was raised in a signal handler."""
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
    """The code of a handler in Python: a function, a method, a partial or a callable object."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if callable(handler) and not hasattr(function, "__code__"):
        function = type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
