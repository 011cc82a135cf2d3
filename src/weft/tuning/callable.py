"""`weft.tune(fn)`: find the policy that makes a Python callable fastest on this process's GPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence

from weft.errors import UsageError, WeftError
from weft.measure.race import ROUNDS, race
from weft.policy import Policy
from weft.ranks import Ranks
from weft.tuning.callable_runner import CallableRunner
from weft.tuning.candidates import PLAIN, Candidate
from weft.tuning.lab import why_left_alone
from weft.tuning.remembered import Remembered
from weft.tuning.store import Entry, here
from weft.tuning.verdict import Measured, Verdict

MOST_POLICIES = 160

_Measure = Callable[[Policy], float]


def tune(
    fn: Callable[[], object],
    *,
    candidates: Iterable[Policy] | None = None,
    setup: Callable[[], object] | None = None,
    measure: _Measure | None = None,
    device: str = "cuda",
    name: str = "",
    rounds: int = ROUNDS,
    budget_s: float = 60.0,
    seed: int = 0,
) -> Verdict:
    """Find the policy under which `fn()` is fastest. The policy is returned, not applied.

    Returns a Verdict: apply its policy with `weft.overlap(verdict.policy)`. Its times are median ms per call
    on the slowest rank; its baseline is the process without a policy.

    `fn` is called many times; `setup` is called before each measurement and is not timed. In a job with
    several ranks, all ranks must call this together; the slowest rank counts. `candidates`: the policies to
    try; by default those that the kernels and collectives of `fn` allow. `name`: stores the verdict under
    this name; the next call with the same name returns it. `budget_s`: no new round begins after this time.

    Needs a GPU and a process started by `weft run`. `device="cpu"` needs neither and measures elapsed time.
    `measure(policy)` replaces the measurement: it returns ms per call, and `fn` is not called.
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
    ranks = Ranks()
    runner = CallableRunner(fn, setup, device, ranks)
    remembered = _remembered(name, device, ranks)
    before, found = _of_rank_0(remembered.entry, ranks)
    if found is not None:
        return found
    with runner:
        policies = runner.options() if given is None else given
        tried = runner.prepared([*policies, *([before] if before else [])])
        verdict = _decide(runner.measure, tried, rounds, budget_s, seed, ranks.clock)
    remembered.put(verdict.policy, verdict.to_dict())
    return verdict


def _decide(
    measure: _Measure,
    policies: Sequence[Policy],
    rounds: int,
    budget_s: float,
    seed: int,
    clock: Callable[[], float],
) -> Verdict:
    """Race the policies against the process without a policy."""
    if len(policies) > MOST_POLICIES:
        raise UsageError(f"{len(policies)} candidates are too many; give at most {MOST_POLICIES}")
    distinct = [p for p in dict.fromkeys(policies) if not p.is_neutral]
    result = race(
        [PLAIN, *map(Candidate.of, distinct)],
        lambda candidate: measure(candidate.policy),
        baselines=(0,),
        rounds=rounds,
        seed=seed,
        deadline_s=budget_s,
        clock=clock,
    )
    plain, chosen = result.entries[0], result.chosen
    if plain.error is not None:
        raise plain.error
    assert chosen is not None
    best = result.entries[chosen]
    middle, low, high = result.ratio(chosen)
    return Verdict(
        source="callable",
        policy=best.candidate.policy,
        chosen=best.candidate.label,
        applies=chosen != 0,
        gain_pct=100 * (1 - middle),
        gain_ci_pct=(100 * (1 - high), 100 * (1 - low)),
        best_ms=best.ms,
        baseline_ms=plain.ms,
        baseline="no policy",
        reason="" if chosen else why_left_alone(result, "noise"),
        measurements=result.measurements,
        candidates=tuple(map(Measured.of, result.entries)),
    )


def _remembered(name: str, device: str, ranks: Ranks) -> Remembered:
    """The stored verdict of a named callable. Only rank 0 uses the store; only GPU verdicts are written."""
    return Remembered(
        lambda: here(f"callable {name}, {ranks.size} ranks"),
        lambda line: warnings.warn(f"weft: {line}", stacklevel=5),
        reads=bool(name) and ranks.leads,
        writes=bool(name) and ranks.leads and device == "cuda",
    )


def _of_rank_0(entry: Entry | None, ranks: Ranks) -> tuple[Policy | None, Verdict | None]:
    """Broadcast rank 0's stored policy, and its verdict unless it must be measured again."""
    known = None if entry is None else (entry.policy.to_dict(), dict(entry.verdict), entry.stale)
    found = ranks.first(known)
    if found is None:
        return None, None
    policy = Policy.from_dict(found[0])
    if found[2]:
        return policy, None
    try:
        return policy, Verdict.from_dict(found[1], stored=True)
    except WeftError as error:
        warnings.warn(f"weft: {error}; measured again", stacklevel=4)
        return policy, None
