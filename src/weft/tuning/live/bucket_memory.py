"""BucketMemory: GPU memory of a trial's buckets, which goes back to the driver and not into torch's cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

_log = logging.getLogger("weft.live")
T = TypeVar("T")


class BucketMemory:
    """A pool of torch's allocator that serves no other tensors, on the GPU of these parameters.

    Without it, the cache of a program whose buckets were tried stays larger by all of their memory. Nothing
    happens on a CPU, or where torch has no such pools.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self._device = next((p.device for p in parameters if p.device.type == "cuda"), None)
        self._pool: Any = None

    def during(self, make: Callable[[], T]) -> T:
        """Call this; what it allocates, on this thread, is taken from a new pool.

        If it returns something, all buckets are there now, and the pool before is given back.
        """
        pool = self._new_pool()
        if pool is None:
            return make()
        import torch

        with torch.cuda.use_mem_pool(pool, self._device):
            made = make()
        if made:
            self._pool = pool
        return made

    def _new_pool(self) -> Any:
        import torch

        if self._device is None or not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):
            return None  # torch before 2.6 would also take what other threads allocate
        try:
            return torch.cuda.MemPool()
        except Exception:  # such as with another allocator than torch's own
            _log.debug("no pool for buckets", exc_info=True)
            return None
