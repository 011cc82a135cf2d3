"""Loads the names of a package on first use, so that importing the package stays cheap."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing would take most of the time of `import weft`
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names come from the modules in `homes`, or are those modules."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return load
