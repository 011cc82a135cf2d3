"""`weft.tune(fn)`: which policy makes a Python callable fastest, on the GPU of this process."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import UsageError, WeftError
from weft.measure.race import ROUNDS, Entry, Result, race, ratio_ci
from weft.policy import Policy
from weft.tuning.callable_runner import Stage, Team
from weft.tuning.candidates import Candidate, label

if TYPE_CHECKING:
    from weft.tuning import store

AS_IS = Candidate("as it is")
MOST_POLICIES = 160

Measure = Callable[[Policy], float]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found for one callable. Times are medians of one call, of the slowest rank, in ms."""

    policy: Policy
    """What to apply, with `weft.overlap(tuned.policy)`; the neutral policy where nothing helps."""
    chosen: str
    gain_pct: float
    """Percent less time than as it is; 0 for "leave it alone"."""
    gain_ci_pct: tuple[float, float]
    best_ms: float
    plain_ms: float
    reason: str = ""
    """Why it is left alone; empty where a policy is to be applied."""
    stored: bool = False
    """Whether it was measured another time, and comes from the store."""
    measurements: int = 0
    entries: tuple[Entry[Candidate], ...] = dataclasses.field(default=(), repr=False)

    @property
    def leave(self) -> bool:
        """Whether nothing was seen to help."""
        return self.policy.is_neutral

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        if self.leave:
            return f"Leave it alone: {self.reason}."
        low, high = self.gain_ci_pct
        return f"{self.chosen}: {self.gain_pct:.1f}% (95%: {low:.1f} to {high:.1f}) less time than as it is."

    def to_dict(self) -> dict[str, Any]:
        """All of it but the measurements, as JSON."""
        fields = ("chosen", "gain_pct", "best_ms", "plain_ms", "reason", "measurements")
        found = {name: getattr(self, name) for name in fields}
        return {
            **found,
            "text": self.text,
            "gain_ci_pct": list(self.gain_ci_pct),
            "policy": self.policy.to_dict(),
        }


def tune(
    fn: Callable[[], object],
    *,
    candidates: Iterable[Policy] | None = None,
    setup: Callable[[], object] | None = None,
    measure: Measure | None = None,
    device: str = "cuda",
    name: str = "",
    rounds: int = ROUNDS,
    budget_s: float = 60.0,
    seed: int = 0,
) -> Tuned:
    """Find the policy under which `fn()` takes least time; nothing is applied when this returns.

    `fn` is called many times, `setup` before each measurement and outside of it. In a job of several ranks
    all of them call this together; the slowest rank counts. `candidates`: policies to try; default: what the
    kernels and collectives of `fn` allow. `name` keeps the verdict in the store, where the next call with
    the same name finds it. After `budget_s` no new round begins.

    Needs a process started by `weft run` and a GPU. `device="cpu"` measures by the clock without either.
    `measure(policy)` replaces the measurement (ms of one call): `fn` is not called then.
    """
    if not callable(fn):
        raise UsageError(
            f"weft.tune takes a function, not {type(fn).__name__}: weft.tune(lambda: step(batch))"
        )
    if device not in ("cuda", "cpu"):
        raise UsageError(f"device {device!r} is not known; use cuda or cpu")
    if budget_s <= 0 or rounds < 1:
        raise UsageError("budget_s and rounds must be greater than zero")
    given = None if candidates is None else list(candidates)
    if measure is not None:
        return _decide(measure, given or [], rounds, budget_s, seed, time.monotonic)
    team = Team()
    stage = Stage(fn, setup, device, team)
    kept = _Kept(name, device, team)
    found = kept.get()
    if found is not None:
        return found
    with stage:
        policies = stage.options() if given is None else given
        tried = stage.prepared([*policies, *kept.before])
        tuned = _decide(stage.measure, tried, rounds, budget_s, seed, team.clock)
    kept.put(tuned)
    return tuned


def _decide(
    measure: Measure,
    policies: Sequence[Policy],
    rounds: int,
    budget_s: float,
    seed: int,
    clock: Callable[[], float],
) -> Tuned:
    """Race the policies against the process as it is."""
    if len(policies) > MOST_POLICIES:
        raise UsageError(f"{len(policies)} candidates are too many; give at most {MOST_POLICIES}")
    distinct = [p for p in dict.fromkeys(policies) if not p.is_neutral]
    result = race(
        [AS_IS, *(Candidate(label(p), p) for p in distinct)],
        lambda candidate: measure(candidate.policy),
        baselines=(0,),
        rounds=rounds,
        seed=seed,
        deadline_s=budget_s,
        clock=clock,
    )
    return _tuned(result)


def _tuned(result: Result[Candidate]) -> Tuned:
    plain, chosen = result.entries[0], result.chosen
    if plain.error is not None:
        raise plain.error
    assert chosen is not None
    best, reason = result.entries[chosen], ""
    middle, low, high = 1.0, 1.0, 1.0
    if chosen == 0:
        reason = _why(result)
    else:
        middle, low, high = ratio_ci(best.again or best.samples, plain.again or plain.samples)
        if high >= 1.0:
            reason = f"{best.candidate.label} was ahead, but not when measured again"
            best, middle, low, high = plain, 1.0, 1.0, 1.0
    return Tuned(
        policy=best.candidate.policy,
        chosen=best.candidate.label,
        gain_pct=100 * (1 - middle),
        gain_ci_pct=(100 * (1 - high), 100 * (1 - low)),
        best_ms=best.ms,
        plain_ms=plain.ms,
        reason=reason,
        measurements=result.measurements,
        entries=tuple(result.entries),
    )


def _why(result: Result[Candidate]) -> str:
    plain, others = result.entries[0], result.entries[1:]
    measured = [entry for entry in others if entry.samples and not entry.failed]
    if not others:
        return "it has no control that can matter (no collective, or no kernel beside one)"
    if not measured:
        return f"no candidate can run here ({others[0].problem})"
    first = min(measured, key=lambda entry: entry.ms)
    change = 100 * (first.ms / plain.ms - 1)
    return f"no candidate is faster beyond doubt (nearest: {first.candidate.label}, {change:+.1f}%)"


class _Kept:
    """The verdict of a named callable, in the store; its troubles are warnings."""

    def __init__(self, name: str, device: str, team: Team) -> None:
        self.name, self.device, self.team = name, device, team
        self.before: list[Policy] = []
        """The winner of another time, to be raced again."""

    def get(self) -> Tuned | None:
        """A verdict that need not be measured again; rank 0's, on every rank."""
        if not self.name:
            return None
        entry = None
        with _told():
            entry = self._store().get(self._key())
        told = None if entry is None else (entry.policy.to_dict(), dict(entry.verdict), entry.stale)
        found = self.team.first(told)
        if found is None:
            return None
        policy, verdict, stale = Policy.from_dict(found[0]), found[1], found[2]
        if not stale:
            with _told():
                return _from_store(policy, verdict)
        self.before = [policy]
        return None

    def put(self, tuned: Tuned) -> None:
        """Keep what a GPU said."""
        if self.name and self.device == "cuda" and self.team.leads:
            with _told():
                self._store().put(self._key(), tuned.policy, tuned.to_dict())

    def _key(self) -> store.Key:
        from weft.tuning import store

        return store.here(f"callable {self.name}, {self.team.size} ranks")

    @staticmethod
    def _store() -> store.Store:
        from weft.tuning import store

        return store.Store()


@contextmanager
def _told() -> Iterator[None]:
    """Weft's errors as warnings."""
    try:
        yield
    except WeftError as error:
        warnings.warn(f"weft: {error}", stacklevel=4)


def _from_store(policy: Policy, verdict: Mapping[str, Any]) -> Tuned:
    try:
        low, high = map(float, verdict["gain_ci_pct"])
        return Tuned(
            policy=policy,
            chosen=str(verdict["chosen"]),
            gain_pct=float(verdict["gain_pct"]),
            gain_ci_pct=(low, high),
            best_ms=float(verdict["best_ms"]),
            plain_ms=float(verdict["plain_ms"]),
            reason=str(verdict["reason"]),
            stored=True,
        )
    except (KeyError, TypeError, ValueError):
        raise UsageError("the stored verdict of this name is not one of weft.tune; measured again") from None
