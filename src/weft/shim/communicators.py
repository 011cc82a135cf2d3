"""Lists the communicators of the running process and changes the CTAs of their collectives while it runs.

NCCL fixes the CTAs of a communicator when it is created. Under `weft run`, the shim sees every communicator
that the program creates. Fewer CTAs need no second communicator if NCCL takes a configuration with each call
(2.31 and newer) or asks weft's tuner plugin: `route` then limits the calls themselves, and `prepare` has
nothing to do. Otherwise, and for more CTAs, `prepare` makes a sibling of each communicator with another limit
(`ncclCommSplit`: same ranks, same order), and `route` sends the program's collectives to those siblings from
the next call on. The program is not changed and sees one communicator; when it aborts, finalizes or destroys
that one, the siblings end with it.

`prepare`, `route` and `release` affect all ranks: every rank must call them between the same two collectives,
and `prepare` with the GPU idle, because it allocates the siblings' memory. The sequence of collectives on a
communicator is the same on all of its ranks, so `Communicator.collectives` is a clock that all of them share.

NCCL_MAX_CTAS and NCCL_MIN_CTAS in the environment or in nccl.conf outrank a communicator's own limit, and
NCCL reads them only once. If `LIVE_VARIABLE` is 1 when the job starts, the shim hides them from NCCL and sets
them as every communicator's own limits. The effect is the same, but the limits can be changed.
"""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from weft.errors import UnavailableError, UsageError
from weft.shim import layout, nccl_binding

LIVE_VARIABLE = "WEFT_LIVE"
"""Environment variable: 1 keeps NCCL_MAX_CTAS and NCCL_MIN_CTAS changeable. `weft run --tune` sets it."""
_CALL_CONFIG_CODE = 23100  # the first NCCL version that takes a configuration with each collective call
TUNERS = ((23000, 6), (22800, 5), (22400, 4))
"""The first NCCL version with each tuner plugin interface that weft implements, newest first."""
MOST_CTAS = 64
"""The maximum number of channels in NCCL."""


@dataclass(frozen=True)
class Communicator:
    """One communicator of the program."""

    key: str
    """The same on all ranks of the communicator and different for any other one; empty if unknown."""
    rank: int
    """-1 if not known yet."""
    size: int
    """-1 if not known yet."""
    device: int | None
    max_ctas: int | None
    """The program's own limit, from its configuration or the environment; None if NCCL chooses."""
    order: int
    collectives: int
    """Collective calls so far, routed or not; a clock that all ranks share."""
    point_to_point: int
    """Send and recv calls so far."""
    bytes: dict[str, int]
    """Keyed by operation: the counts passed to the calls, times the element size."""
    routed_to: int | None
    """The CTA limit that `route` sets for its next collective; None if unchanged."""
    prepared: tuple[int, ...]
    """The limits that `route` can choose from."""
    why_not: str | None
    """Why it cannot be routed; None if it can."""
    path: str
    """How rules for collectives reach its NCCL: one of `layout.NCCL_PATHS`; `path_reason` says why."""
    nccl: str
    """The version of its NCCL."""
    tuner: int | None
    """The version of the tuner plugin interface by which its NCCL asks weft; None if it does not."""


@dataclass(frozen=True)
class CommunicatorCall:
    """One collective call of the program."""

    number: int
    """Counted over all communicators of the process."""
    key: str
    operation: str
    bytes: int
    host_ns: int
    """CLOCK_MONOTONIC, like `time.monotonic_ns()`."""
    routed: bool


def available() -> bool:
    """Whether the shim is in this process and the program has used NCCL."""
    return nccl_binding.nccl_seen()


def communicators() -> list[Communicator]:
    """Every live communicator of the program, in creation order."""
    return [
        Communicator(
            key=f"{found.key:016x}" if found.key else "",
            rank=found.rank,
            size=found.size,
            device=found.device if found.device >= 0 else None,
            max_ctas=found.max_ctas if found.max_ctas > 0 else None,
            order=found.order,
            collectives=found.collectives,
            point_to_point=found.point_to_point,
            bytes={
                name: amount
                for name, amount in zip(layout.NCCL_OPERATIONS, found.bytes, strict=True)
                if amount
            },
            routed_to=found.routed_to if found.routed_to > 0 else None,
            prepared=tuple(sorted(ctas for ctas in found.prepared if ctas)),
            why_not=found.why_not.decode(errors="replace") or None,
            path=layout.NCCL_PATHS[found.path],
            nccl=nccl_version(found.version),
            tuner=found.tuner or None,
        )
        for found in nccl_binding.nccl_list()
    ]


def nccl_version(code: int) -> str:
    """NCCL's version code in dotted form: 22803 is 2.28.3, and the older 2708 is 2.7.8."""
    parts = (10000, 100) if code >= 10000 else (1000, 100)
    return f"{code // parts[0]}.{code % parts[0] // parts[1]}.{code % parts[1]}"


def path_reason(path: str, version: str, tuner: int | None) -> str:
    """Why rules for collectives reach NCCL by this path, or not at all."""
    asked = f"asks weft's tuner plugin (interface v{tuner})" if tuner else "does not ask weft's tuner plugin"
    if path == "config":
        rest = "protocol and chunk by the tuner plugin" if tuner else "protocol and chunk cannot be set"
        return f"NCCL {version} takes a configuration with each call; it {asked}: {rest}"
    if path == "tuner":
        chunk = "" if tuner and tuner >= 6 else "; it takes no chunk size (v6, NCCL 2.30 and newer)"
        config = "takes no configuration with a call (2.31 and newer do)"
        if tuple(map(int, version.split(".")[:2])) >= (2, 31):
            config = "refused the configuration of a call, or WEFT_NO_CALL_CONFIG is set,"
        return f"NCCL {version} {config} and {asked}{chunk}"
    if path == "refused":
        return f"NCCL {version} refused a configuration that weft knows to be valid, and {asked}"
    return (
        f"NCCL {version} takes no configuration with a call (2.31 and newer do) and {asked} "
        "(2.24 and newer do, where the policy has rules when `weft run` starts the program)"
    )


def expected_path(code: int, environment: Mapping[str, str]) -> tuple[str, int | None]:
    """How rules would reach an NCCL with this version code, and the tuner interface by which it would ask."""
    tuner = next((version for since, version in TUNERS if code >= since), None)
    with_config = code >= _CALL_CONFIG_CODE and environment.get("WEFT_NO_CALL_CONFIG", "0") in ("", "0")
    return ("config" if with_config else "tuner" if tuner else "none"), tuner


def follow_policy() -> None:
    """Apply the rules of this process's policy from its next collective on.

    Like `route`, this affects all ranks. Raises UnavailableError with the reason if that is not possible.
    """
    reason = nccl_binding.nccl_follow_policy()
    if reason:
        raise UnavailableError(f"comm.rules cannot be applied in this run: {reason}")


def why_no_rules() -> str:
    """Why rules for collectives cannot be applied on this rank; empty if they can."""
    found = communicators()
    if not found:
        return nccl_binding.NO_COMMUNICATOR
    without = next((c for c in found if c.path not in ("config", "tuner")), None)
    return path_reason(without.path, without.nccl, without.tuner) if without else ""


def preparable() -> list[tuple[str, int]]:
    """The key and size of each communicator that `prepare` can make a sibling of on this rank."""
    return [(c.key, c.size) for c in communicators() if c.key and c.collectives and not c.why_not]


def agreed(of_ranks: Iterable[Iterable[tuple[str, int]]]) -> list[str]:
    """The keys of the communicators that all of their ranks can prepare, from each rank's `preparable()`."""
    able = Counter((key, size) for found in of_ranks for key, size in found)
    return sorted(key for (key, size), count in able.items() if count == size)


def prepare(ctas: int, timeout_s: float, keys: Collection[str] | None = None) -> None:
    """Make a sibling with at most `ctas` CTAs of every communicator that has carried collectives.

    All ranks must call it. `keys` selects the communicators, as `agreed` returns them; if it is None, a rank
    that can split a communicator waits until the deadline for a rank that cannot. Raises UnavailableError
    with the reason; the program's communicators then stay in use. If any rank fails, no rank may `route` to
    this limit, so the ranks must exchange their results first.
    """
    _check(ctas)
    numbers = None if keys is None else [int(key, 16) for key in keys]
    reason = nccl_binding.nccl_prepare(ctas, timeout_s, numbers)
    if reason:
        raise UnavailableError(f"the collectives' CTAs cannot be changed in this run: {reason}")


def route(ctas: int | None) -> None:
    """From the next collective on, use the siblings with this limit; None: the program's own communicators.

    Takes effect between groups, never inside one. Point-to-point calls and captured calls are not routed: a
    group that also has such calls uses the sibling for its collectives and the original communicator for
    them, on every rank. The first collective on a sibling takes longer, because it connects the sibling.
    """
    if ctas is not None:
        _check(ctas)
    reason = nccl_binding.nccl_route(ctas or 0)
    if reason:
        raise UnavailableError(reason)


def release() -> None:
    """Destroy the siblings that `route` does not use now, on every rank. Nothing may be running on them."""
    reason = nccl_binding.nccl_release()
    if reason:
        raise UnavailableError(reason)


def calls() -> list[CommunicatorCall]:
    """The latest collective calls, oldest first (up to 4096).

    If several ranks of a communicator live in this process, only the calls of the first are listed.
    """
    return [
        CommunicatorCall(
            number=found.number,
            key=f"{found.key:016x}" if found.key else "",
            operation=layout.NCCL_OPERATIONS[found.operation],
            bytes=found.bytes,
            host_ns=found.host_ns,
            routed=bool(found.routed),
        )
        for found in nccl_binding.nccl_calls()
    ]


def on_call(callback: Callable[[str, int], None] | None, key: str | None = None, every: int = 1) -> None:
    """Run `callback(key, collectives)` on the calling thread, after `every` collectives of one communicator.

    It never runs inside an NCCL group or a capture, but at the next boundary instead. If `key` is None, it
    follows the first communicator that has carried a collective. Its exceptions are logged and do not reach
    the program. There is one callback at a time; None removes it.
    """
    if every < 1:
        raise UsageError(f"every {every} is not valid; use 1 or more")
    number = int(key, 16) if key else 0
    nccl_binding.nccl_on_call((lambda k, n: callback(f"{k:016x}", n)) if callback else None, number, every)


def _check(ctas: int) -> None:
    if not 1 <= ctas <= MOST_CTAS:
        raise UsageError(f"{ctas} CTAs are not valid; use 1 to {MOST_CTAS}")


atexit.register(nccl_binding.nccl_on_call, None, 0, 1)
