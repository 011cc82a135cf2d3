"""CachedMemory: GPU memory that trials made torch's allocator keep, such as that of DDP buckets."""

from __future__ import annotations

import time
from typing import Any

NOTABLE = 0.02  # share by which trials must have raised what the allocator keeps
HELD_S = 0.15  # NCCL's watchdog, which looks every 0.1 s, holds the tensors of collectives until then


class CachedMemory:
    """Gives it back to the driver. `before` comes before such trials, `give_back` between two steps.

    The allocator keeps what is free for later tensors, so that other libraries and processes find less memory
    than without weft. All that is free goes back, the program's own part, too.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def before(self) -> None:
        """Note how much the allocator has, unless that is noted already."""
        if self._before is None:
            self._before = _reserved()

    def give_back(self) -> None:
        """Empty the allocator's cache, if trials have raised it notably."""
        before, self._before = self._before, None
        if before is None or _reserved() <= before * (1 + NOTABLE):
            return
        import torch

        time.sleep(HELD_S)
        torch.cuda.empty_cache()


def allocator_stats() -> dict[str, Any]:
    """What torch's allocator counts on this GPU; nothing where it does not count, as a pluggable one."""
    import torch

    try:
        return dict(torch.cuda.memory_stats()) if torch.cuda.is_initialized() else {}
    except RuntimeError:
        return {}


def _reserved() -> int:
    return int(allocator_stats().get("reserved_bytes.all.current", 0))
