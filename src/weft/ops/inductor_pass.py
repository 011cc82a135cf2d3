"""Runs `weft.ops.fuse_graph` as an Inductor pass on every graph it compiles, forward and backward."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from weft.ops.promise import fits_graph, forced_schedule, graph_conditions
from weft.ops.replacements import Replacements

_log = logging.getLogger("weft.ops")
_DECIDING = ("ops", "sim", "gpu", "comm")
"""Packages whose code decides what is replaced: the pass, and the estimate of a transfer's time."""


class FusedCollectives(CustomGraphPass):  # type: ignore[misc,unused-ignore]
    """Inductor's `post_grad_custom_pre_pass`."""

    def __init__(self, before: Any = None, counted: Replacements | None = None) -> None:
        """`before`: the pass or passes that the program had set, which run first; None if there were none."""
        given = before if isinstance(before, (list, tuple)) else [before]
        self._before, self._counted = [each for each in given if each is not None], counted or Replacements()

    def __call__(self, graph: torch.fx.Graph) -> None:
        from weft.ops.fuse_graph import fuse_graph

        for each in self._before:
            each(graph)
        done = fuse_graph(graph, fits_graph, forced_schedule())
        self._counted.add(done.gathers, done.scatters, done.matmuls, len(done.skipped))
        _log.debug("graph: %s", done)

    def uuid(self) -> Any:
        """Part of the keys of Inductor's caches: everything that replacements depend on.

        None if a pass in `before` has no identifier; Inductor then does not cache.
        """
        import weft.ops.compiled  # noqa: F401  (a graph from the cache needs the operators too)

        before = tuple(getattr(each, "uuid", lambda: None)() for each in self._before)
        if None in before:
            return None
        return get_hash_for_files(_deciding_files()), graph_conditions(), before


@cache
def _deciding_files() -> tuple[str, ...]:
    root = Path(__file__).parents[1]
    found = (path for package in _DECIDING for path in (root / package).rglob("*"))
    return tuple(sorted(str(path) for path in found if path.suffix in {".py", ".json"}))
