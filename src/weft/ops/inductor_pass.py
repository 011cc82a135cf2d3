"""`weft.ops.fuse_graph` as a pass that Inductor runs on every graph it compiles, forward and backward."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from weft.ops.promise import fits_graph, forced_schedule, replaces_all
from weft.ops.replacements import Replacements

_log = logging.getLogger("weft.ops")
_SOURCES = ("inductor_pass.py", "fuse_graph.py", "graph_patterns.py", "promise.py", "compiled.py", "call.py")


class FusedCollectives(CustomGraphPass):  # type: ignore[misc,unused-ignore]
    """Inductor's `post_grad_custom_pre_pass`. Keys of its graph cache hold the hash of the pass's sources."""

    def __init__(self, before: Any = None, counted: Replacements | None = None) -> None:
        """before: a pass that the program had set; it runs first."""
        self._before, self._counted = before, counted or Replacements()

    def __call__(self, graph: torch.fx.Graph) -> None:
        import weft.ops.compiled  # noqa: F401  (registers the operators)
        from weft.ops.fuse_graph import fuse_graph

        if self._before is not None:
            self._before(graph)
        done = fuse_graph(graph, fits_graph, forced_schedule())
        self._counted.add(done.gathers, done.scatters, done.matmuls, len(done.skipped))
        _log.debug("graph: %s", done)

    def uuid(self) -> Any:
        import weft.ops.compiled  # noqa: F401  (a graph from the cache needs the operators too)

        before = None if self._before is None else getattr(self._before, "uuid", lambda: None)()
        if self._before is not None and before is None:
            return None
        folder = Path(__file__).parent
        return get_hash_for_files(tuple(str(folder / name) for name in _SOURCES)), replaces_all(), before
