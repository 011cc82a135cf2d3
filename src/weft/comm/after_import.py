"""Patch a module when the program imports it, which it may never do; an early import would be slow."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_log = logging.getLogger("weft.comm")


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a callback once a module has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def install(self) -> None:
        """Act on modules that are already loaded, and on each other one when it is imported."""
        for name in [name for name in self._actions if name in sys.modules]:
            self._act(name, sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._act(fullname, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _act(self, name: str, module: ModuleType) -> None:
        """Run the module's action once. An error is reported and does not reach the program."""
        action = self._actions.pop(name, None)
        try:
            if action is not None:
                action(module)
        except Exception as error:
            _log.debug("%s is left unchanged", name, exc_info=True)
            sys.stderr.write(f"weft: {name} is left unchanged: {type(error).__name__}: {error}\n")
