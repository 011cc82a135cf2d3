"""What was measured before and what sizes suggest: a verdict in the store goes before the pick."""

from __future__ import annotations

from typing import Any

from weft.errors import WeftError
from weft.ops.pick import Pick, pick
from weft.ops.simulate import ENGINES
from weft.policy import Policy
from weft.sim.fabric import default_topology
from weft.sim.profile import by_title
from weft.tune.store import Store, here

HOST, PEERS = "host", "peers"
"""Whether the others are pinned host memory or GPUs."""


def workload(operation: str, m: int, n: int, k: int, ranks: int, dtype: str, peers: str) -> str:
    """The name of a fused operation in the store."""
    return f"{operation} {m}x{n}x{k} {dtype} x{ranks} {peers}"


def remember(named: str, document: dict[str, Any], store: Store | None = None) -> None:
    """Keep what `weft explore` measured on this machine."""
    policy = Policy(schedule=document["best"], engine=document["best_engine"])
    rows = [{key: row[key] for key in ("name", "engine", "ms")} for row in document["schedules"]]
    (store or Store()).put(here(named), policy, {"text": document["reason"], "schedules": rows})


def measured(named: str, store: Store | None = None) -> Policy | None:
    """The policy that was measured best for an operation, if it still holds; a store that fails has none."""
    try:
        entry = (store or Store()).get(here(named))
    except WeftError:
        return None
    if entry is None or entry.stale or entry.policy.schedule is None:
        return None
    return entry.policy


def suggest(
    operation: str,
    sizes: tuple[int, int, int],
    ranks: int,
    dtype: str,
    title: str,
    peers: str = PEERS,
    engines: tuple[str, ...] = ENGINES,
) -> Pick | None:
    """What to run on the GPU that its driver calls `title`; None: weft knows nothing of it."""
    found = measured(workload(operation, *sizes, ranks, dtype, peers))
    if found is not None and found.schedule is not None and (found.engine or "sm") in engines:
        return Pick(found.schedule, found.engine or "sm", "measured on this machine by weft explore")
    try:
        gpu = by_title(title)
        topology = HOST if peers == HOST else default_topology(gpu.spec)
        return pick(operation, *sizes, ranks, dtype, gpu.name, topology, engines=engines)
    except WeftError:
        return None
