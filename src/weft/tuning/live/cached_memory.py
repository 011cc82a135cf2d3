"""CachedMemory: returns GPU memory that trials left in torch's allocator, such as that of DDP buckets."""

from __future__ import annotations

import time
from typing import Any

NOTABLE = 0.02  # growth of the allocator's reserved memory, as a share, that is worth giving back
HELD_S = 0.15  # NCCL's watchdog polls every 0.1 s and holds the tensors of collectives until then


class CachedMemory:
    """Gives cached memory back to the driver. Call `before` before trials that may take memory, `give_back`
    between two steps.

    The allocator keeps free memory for later tensors, so other libraries and processes would find less memory
    than without weft. All free memory is given back, including what the program itself left in the cache.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def before(self) -> None:
        """Record how much memory the allocator has reserved, if no trial was recorded before."""
        if self._before is None:
            self._before = _reserved()

    def give_back(self) -> None:
        """Empty the allocator's cache if its reserved memory has grown by more than NOTABLE."""
        before, self._before = self._before, None
        if before is None or _reserved() <= before * (1 + NOTABLE):
            return
        import torch

        time.sleep(HELD_S)
        torch.cuda.empty_cache()


def allocator_stats() -> dict[str, Any]:
    """The statistics of torch's allocator on this GPU; empty for a pluggable allocator, which has none."""
    import torch

    try:
        return dict(torch.cuda.memory_stats()) if torch.cuda.is_initialized() else {}
    except RuntimeError:
        return {}


def _reserved() -> int:
    return int(allocator_stats().get("reserved_bytes.all.current", 0))
