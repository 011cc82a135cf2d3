"""Tuning: which policy is best, and whether the gain is real.

The package can be called: `weft.tune(fn)` finds the policy under which a Python callable takes least time.
See `weft.tune.callable.tune`.
"""

from __future__ import annotations

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package and a function share the name `weft.tune`, so the package is both."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from weft.tune.callable import tune

        return tune(*args, **options)

    @property
    def __signature__(self) -> Signature:
        from weft.tune.callable import tune

        return signature(tune)


sys.modules[__name__].__class__ = _Callable
