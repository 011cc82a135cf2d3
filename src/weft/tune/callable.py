"""`weft.tune(fn)`: which policy makes a Python callable fastest, on the GPU of this process."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import UnavailableError, UsageError, WeftError
from weft.policy import Policy
from weft.tune.race import ROUNDS, Entry, Result, race, ratio_ci
from weft.tune.space import Candidate, label

if TYPE_CHECKING:
    from weft.tune import store
    from weft.tune.options import Facts

AS_IS = Candidate("as it is")
LEARNT_CALLS = 3  # under observation, before anything is tried
SAMPLE_MS = 20.0  # a shorter callable is called several times for one measurement
MOST_CALLS = 100
MOST_CANDIDATES = 40

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
    team = _Team()
    stage = _Stage(fn, setup, device, team)
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
    if len(policies) > MOST_CANDIDATES * 4:
        raise UsageError(f"{len(policies)} candidates are too many; give at most {MOST_CANDIDATES * 4}")
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


class _Team:
    """The ranks that tune together: those of torch.distributed, or this process alone."""

    def __init__(self) -> None:
        dist: Any = sys.modules.get("torch.distributed")
        joined = dist is not None and dist.is_available() and dist.is_initialized()
        self.dist = dist if joined and dist.get_world_size() > 1 else None
        self.size = self.dist.get_world_size() if self.dist else 1
        self.leads = self.dist is None or self.dist.get_rank() == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.dist is None:
            return [value]
        found: list[Any] = [None] * self.size
        self.dist.all_gather_object(found, value)
        return found

    def first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(map(float, self.gather(value)))

    def clock(self) -> float:
        """Rank 0's clock in seconds."""
        return float(self.first(time.monotonic()))


class _Stage:
    """Runs the callable under one policy after the other, and leaves the process as it was."""

    def __init__(
        self, fn: Callable[[], object], setup: Callable[[], object] | None, device: str, team: _Team
    ) -> None:
        self.fn, self.setup, self.team = fn, setup, team
        self.cuda = device == "cuda"
        self.calls = 1
        self.facts: Facts | None = None
        self.applied: Policy | None = None
        self.controls: Any = None
        if self.cuda:
            self.controls = _controls(team.size)

    def __enter__(self) -> _Stage:
        try:
            if self.controls is None:
                self._run(1)
            else:
                self._learn()
            took = self.team.most(self._run(1))
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self.calls = max(1, min(MOST_CALLS, math.ceil(SAMPLE_MS / max(took, 1e-3))))
        return self

    def __exit__(self, *problem: object) -> None:
        if self.controls is None:
            return
        from weft.shim import overlap

        self.controls.apply(Policy())
        overlap.again()
        if problem[0] is None:
            self.synchronize()
            self.team.gather(None)  # nobody is still on a communicator that goes
            self.controls.release()

    def options(self) -> list[Policy]:
        """What can matter for this callable, on all ranks."""
        from weft.tune.options import stages

        if self.facts is None:
            return []
        choices = [[{}, *stage] for stage in stages(self.facts, Policy())]
        changes = sorted(itertools.product(*choices), key=lambda parts: sum(map(bool, parts)))
        policies = [
            dataclasses.replace(Policy(), **{k: v for part in parts for k, v in part.items()})
            for parts in changes
        ]
        return [policy for policy in policies if not policy.is_neutral][:MOST_CANDIDATES]

    def prepared(self, policies: Sequence[Policy]) -> list[Policy]:
        """Those whose number of CTAs can be had on every rank."""
        wanted = sorted({p.max_ctas for p in policies if p.max_ctas is not None})
        ready: set[int | None] = {None}
        for ctas in wanted if self.controls is not None else ():
            self.synchronize()
            self.team.gather(None)
            try:
                self.controls.prepare(ctas)
                done = True
            except WeftError:
                done = False
            ready |= {ctas} if all(self.team.gather(done)) else set()
        return [p for p in policies if p.max_ctas in ready or self.controls is None]

    def measure(self, policy: Policy) -> float:
        """Milliseconds of one call on the slowest rank."""
        changed, problem = policy != self.applied, ""
        try:
            self._apply(policy)
        except WeftError as error:
            problem = str(error)
        problems = [text for text in self.team.gather(problem) if text]
        if problems:  # all ranks must run the callable, or none: it may hold collectives
            self.applied = None
            raise UnavailableError(problems[0])
        if changed:
            self._run(1)  # kernels load anew when they are launched another way
        return self.team.most(self._run(self.calls))

    def synchronize(self) -> None:
        if self.controls is not None:
            self.controls.synchronize()

    def _apply(self, policy: Policy) -> None:
        if self.controls is not None and policy != self.applied:
            self.synchronize()
            self.controls.apply(policy)
        self.applied = policy

    def _learn(self) -> None:
        from weft.tune.options import Facts, merge

        self._run(1)
        self._ready()
        self.controls.learn()  # from here to the facts, nothing but the callable
        self._timed(LEARNT_CALLS)
        own = self.controls.facts(LEARNT_CALLS)
        self.facts = merge([Facts.from_dict(found) for found in self.team.gather(own.to_dict())])

    def _run(self, calls: int) -> float:
        """Milliseconds of one call, of this rank; all ranks begin together."""
        self._ready()
        return self._timed(calls)

    def _ready(self) -> None:
        if self.setup is not None:
            self.setup()
        self.synchronize()
        self.team.gather(None)

    def _timed(self, calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            self.fn()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e3 / calls


def _controls(world: int) -> Any:
    """The live controls of this process's GPU; raises with the fix where there are none."""
    try:
        import torch
    except ImportError:
        raise UnavailableError("weft.tune needs PyTorch: pip install torch") from None
    if not torch.cuda.is_available():
        raise UnavailableError(
            'this machine has no GPU that PyTorch can use; weft.tune(fn, device="cpu") measures without one'
        )
    from weft.integrations.controls import LaunchControls
    from weft.shim import restart

    restart.require()
    return LaunchControls(Policy(), world)


class _Kept:
    """The verdict of a named callable, in the store; its troubles are warnings."""

    def __init__(self, name: str, device: str, team: _Team) -> None:
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
        from weft.tune import store

        return store.here(f"callable {self.name}, {self.team.size} ranks")

    @staticmethod
    def _store() -> store.Store:
        from weft.tune import store

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
