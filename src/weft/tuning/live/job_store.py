"""How live tuning uses the program's rendezvous store."""

from __future__ import annotations

import os
from typing import Any


def own_keys(store: Any, rank: int, world: int) -> Any:
    """The store, with a key prefix that no earlier start of the job has used.

    The store may outlive the ranks: torchrun keeps it across restarts, and does not count restarts that
    change the number of nodes. So each rank counts its own starts. A rank that missed the last start finds
    that start's keys, whose only decision can be to abandon, because any other needs all ranks.
    """
    import torch.distributed as dist

    start = f"weft/tune/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world}"
    return dist.PrefixStore(f"{start}/{store.add(f'{start}/starts of {rank}', 1)}", store)


def within_process(store: Any) -> bool:
    """Whether only this process can see the store, as with ghost ranks: then it is the only process."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__ in ("HashStore", "FakeStore")
