"""The rendezvous store of the program, as far as live tuning uses it."""

from __future__ import annotations

import os
from typing import Any


def own_keys(store: Any, rank: int, world: int) -> Any:
    """The store, with keys that no earlier start of the job has used.

    The store may outlive the ranks: torchrun keeps it over restarts, and does not count those after which the
    job has more or fewer nodes. So each rank counts how often it has come here. A rank that was not there the
    last time finds keys of that start, which has decided nothing but to abandon: decisions need all ranks.
    """
    import torch.distributed as dist

    start = f"weft/tune/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world}"
    return dist.PrefixStore(f"{start}/{store.add(f'{start}/starts of {rank}', 1)}", store)


def within_process(store: Any) -> bool:
    """Whether nobody else can see this store, as with ghost ranks: then this process is the only one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__ in ("HashStore", "FakeStore")
