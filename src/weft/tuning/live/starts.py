"""Starts: the collectives' CTAs of a job that cannot change them while it runs. One number a start.

Where communicators cannot have siblings, NCCL_MAX_CTAS still can be set before a job begins. So each start
under `weft run --tune` measures its step with one number of CTAs and keeps it; when all were tried, later
starts get the best. Steps of different runs are compared, which spread more than steps of one: the best must
be well ahead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import WeftError
from weft.gpu import nvml
from weft.policy import MAX_CTAS, Policy
from weft.tuning.store import Entry, Key, Store

_AHEAD = 0.03  # share of a step by which the best number must lead
OWN = 0  # stands for the number that the program starts with
NEVER_MS = 1e9  # of a start that has not ended yet: if it never does, it is not tried again
_STORE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Starts:
    """What earlier starts of a command have shown: by CTAs, milliseconds of a step."""

    ms: Mapping[int, float]
    choices: tuple[int, ...] = ()

    @property
    def untried(self) -> tuple[int, ...]:
        return tuple(count for count in self.choices if count not in self.ms)

    @property
    def best(self) -> int:
        """The number that is well ahead of the program's own, or the program's own."""
        first = min(self.ms, key=lambda count: self.ms[count], default=OWN)
        return first if self.ms.get(first, 0) < (1 - _AHEAD) * self.ms.get(OWN, 0) else OWN

    @property
    def next(self) -> int:
        """What the next start runs with. The program's own number comes first."""
        if OWN not in self.ms:
            return OWN
        return self.untried[0] if self.untried else self.best

    @property
    def text(self) -> str:
        """What the next start will do, in one sentence."""
        if self.untried:
            return f"the next start tries {self.next} CTAs"
        if self.best == OWN:
            return "no number of CTAs was clearly faster in earlier starts"
        gain = 100 * (1 - self.ms[self.best] / self.ms[OWN])
        return (
            f"{self.best} CTAs took {gain:.1f}% less time per step, one run each: later starts use them, "
            "through NCCL_MAX_CTAS"
        )

    def after(self, ctas: int, result: Mapping[str, Any]) -> Starts | None:
        """With what a start has shown by its result of live tuning; None where that says nothing."""
        facts = result.get("facts") or {}
        choices, ms = facts.get("cta_choices_at_start") or (), result.get("default_ms")
        if not choices or not ms:
            return None
        return Starts({**self.ms, ctas: float(ms)}, self.choices or tuple(map(int, choices)))


def gpu_and_driver() -> tuple[str, str] | None:
    """Of this machine; None where there is no NVIDIA GPU."""
    with nvml.session() as library:
        name = nvml.first_name(library)
        return (name, nvml.driver_release(library) or "unknown") if name else None


class Memory:
    """The starts of one command on this machine. A store that cannot be used costs a line, never the job."""

    def __init__(
        self, command: Sequence[str], machine: Callable[[], tuple[str, str] | None] = gpu_and_driver
    ) -> None:
        self.starts, self.problem = Starts({}), ""
        self._store: Store | None = None
        found = machine()
        if found is None:
            return
        self._key = key(command, *found)
        try:
            store = Store(timeout_s=_STORE_TIMEOUT_S)
            self.starts = read_starts(store.get(self._key))
            self._store = store
        except WeftError as error:
            self.problem = f"earlier starts are not used: {error}"

    def begin(self) -> int | None:
        """The CTAs that this start is to run with; None: as the program starts."""
        ctas = self.starts.next
        if ctas in self.starts.untried and self._store is not None:
            try:
                write_starts(
                    self._store, self._key, Starts({**self.starts.ms, ctas: NEVER_MS}, self.starts.choices)
                )
            except WeftError as error:
                self.problem, self._store = f"earlier starts are not used: {error}", None
                return None
        return ctas or None

    def learn(self, result: Mapping[str, Any]) -> str:
        """Keep what this start has shown; what to tell about the next, or nothing."""
        after = self.starts.after(self.starts.next, result)
        if after is None or self._store is None:
            return ""
        try:
            write_starts(self._store, self._key, after)
        except WeftError as error:
            return f"the result of this start is not saved for the next: {error}"
        return after.text


def key(command: Sequence[str], gpu: str, driver: str) -> Key:
    """Of a command on a GPU. NCCL and torch are the program's, and not known before it starts."""
    mark = hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()[:16]
    return Key(gpu, driver, "of the program", "of the program", f"starts of {command[0]}, {mark}")


def read_starts(entry: Entry | None) -> Starts:
    """From the store; what is stale or of another form is tried anew."""
    if entry is None or entry.stale:
        return Starts({})
    try:
        found = {int(count): float(ms) for count, ms in entry.verdict["starts"].items()}
        choices = tuple(int(count) for count in entry.verdict["choices"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return Starts({})
    if any(not 0 <= count <= MAX_CTAS for count in (*found, *choices)) or any(
        ms <= 0 for ms in found.values()
    ):
        return Starts({})
    return Starts(found, choices)


def write_starts(store: Store, where: Key, starts: Starts) -> None:
    """Keep them."""
    document = {
        "starts": {str(count): ms for count, ms in starts.ms.items()},
        "choices": list(starts.choices),
    }
    store.put(where, Policy(max_ctas=starts.best or None), {**document, "text": starts.text})
