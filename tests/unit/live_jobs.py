"""Simulated jobs under the search and the watch of live tuning, in which one policy matters or none does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from live_kinds import Kind
from live_machines import Moment

from weft.policy import Policy
from weft.tuning.live.options import Facts, Kernel
from weft.tuning.live.proof import BLOCK
from weft.tuning.live.search import tune
from weft.tuning.live.trial import Record, Sample, Trial
from weft.tuning.live.trial_length import lengths
from weft.tuning.live.tuned_job import Tried, TunedJob
from weft.tuning.live.watch import watch
from weft.tuning.live.watch_status import WatchStatus, without_pauses

FACTS = Facts(
    collectives=4,
    ctas=12,
    cta_choices=(6, 16, 24),
    most_ctas=64,
    kernels=(Kernel("gemm", "gemm", 10, 8, 4), Kernel("nvjet", "nvjet", 10, 8, 1)),
    world=4,
    workload="w",
)
DEFAULT, BETTER = Policy(), Policy(max_ctas=16)
MEETING_MS = 3.0  # the time of a meeting of all ranks
PROOF = 4 * BLOCK  # steps of the proof before the watch of `kept`
Less = Callable[[Policy, int], float]
"""By policy and step number: the share of the default's step time that the policy saves."""


def better_by(share: float) -> Less:
    """The policy with 16 CTAs takes `share` less time; nothing else matters."""
    return lambda policy, number: share * (policy.max_ctas == BETTER.max_ctas)


def one_better(share: float) -> Less:
    """The policy with 16 CTAs takes `share` less time, two other candidates take more."""
    less = {6: -0.15, BETTER.max_ctas: share, 24: -0.03}
    return lambda policy, number: less.get(policy.max_ctas, 0.0)


class SimulatedJob:
    """Runs trials. `meeting_ms`: the cost of a trial for which all ranks meet."""

    def __init__(self, kind: Kind, seed: object, less: Less, meeting_ms: float = 0.0) -> None:
        self._kind, self._less, self._meeting_ms = kind, less, meeting_ms
        self._times = kind.times(random.Random(f"noise {seed}"))
        self._policy = DEFAULT
        self._decided = 0  # trials left that an earlier trial named, so need no meeting
        self.clock_ms, self.number = 0.0, 0
        self.last: dict[Policy, int] = {}
        """The last step under each policy."""
        self.record = Record()
        """The record of the job's search, which its watch continues."""

    def step(self, policy: Policy) -> float:
        """The wall time of one step under a policy, in ms."""
        ms = self._kind.step_ms * (1 - self._less(policy, self.number))
        now = Moment(ms, self.clock_ms, self.number, switched=policy != self._policy)
        took = self._times(now)
        self._policy = policy
        self.last[policy] = self.number
        self.clock_ms += took
        self.number += 1
        return took

    def run(self, trial: Trial) -> Sample:
        paused_ms = 0.0 if trial.light or self._decided else self._meeting_ms
        self._decided = max(0, self._decided - 1) if self._decided else len(trial.then)
        self.clock_ms += paused_ms
        times, copied = [], []
        for _ in range(trial.steps):
            times.append(self.step(trial.policy))
            reporting = None if trial.inputs or not trial.light else 1
            copied.append(getattr(self._times, "copied", ())[:reporting])
        facts, means = FACTS if trial.learn else None, tuple(map(fmean, zip(*copied, strict=True)))
        return Sample(sum(times) / trial.steps, facts=facts, paused_ms=paused_ms, copied=means)


def searched(
    play: Callable[[Trial], Sample],
    seed: int = 0,
    ended: Callable[[], bool] = lambda: False,
    record: Record | None = None,
) -> TunedJob:
    """The outcome of a search in a job; nothing found if the job ends first. `record`: the job's record."""
    method = tune(DEFAULT, seed=seed, record=record)
    trial = next(method)
    while not ended():
        try:
            trial = method.send(play(trial))
        except StopIteration as end:
            outcome: TunedJob = end.value
            return outcome
    return TunedJob(policy=DEFAULT, kept=False, default=DEFAULT, reason="the job has ended")


def tuned(kind: Kind, seed: object, share: float = 0.0) -> TunedJob:
    """What live tuning concludes about a job in which one policy takes `share` less time."""
    job = SimulatedJob(kind, seed, better_by(share))
    outcome = searched(job.run, record=job.record)
    return settled(job, outcome) if outcome.still_open else outcome


def settled(job: SimulatedJob, outcome: TunedJob) -> TunedJob:
    """How the watch settles a proof that the search left open."""
    ends = (status for status in followed(job, outcome) if status.outcome is not outcome)
    return next(status.outcome for status in ends if not status.proving)


def kept(job: SimulatedJob, share: float) -> TunedJob:
    """The outcome of a search that found the policy in this job. The job has just run the blocks of its proof."""
    times: dict[Policy, list[float]] = {DEFAULT: [], BETTER: []}
    for policy in 2 * (DEFAULT, BETTER):
        for _ in range(BLOCK):
            trial = Trial(policy)
            sample = job.run(trial)
            times[policy].append(job.record.add(trial, sample, "proof"))
    tried = tuple(Tried(policy, ms[:1], ms) for policy, ms in times.items())
    return TunedJob(
        policy=BETTER,
        kept=True,
        gain_pct=100 * share,
        tried=tried,
        default_ms=tried[0].typical_ms,
        best_ms=tried[1].typical_ms,
        facts=FACTS,
    )


def followed(
    job: SimulatedJob, outcome: TunedJob, steps: float = math.inf, seed: int = 0
) -> Generator[WatchStatus, None, None]:
    """Watch a job until it has run `steps` steps; yields the status after every trial."""
    status = WatchStatus(outcome, outcome.policy)
    step_ms = outcome.default_ms or 0.0
    each, ahead = lengths(step_ms)
    watching = watch(outcome, ahead=ahead, each=each, seed=seed, record=job.record, status=status)
    trial = next(watching, None)
    while job.number < steps:
        sample = job.run(trial or Trial(status.in_force, light=True))
        try:
            trial = watching.send(sample) if trial else None
        except StopIteration:
            trial = None
        yield status


def reverted(kind: Kind, seed: int, share: float, steps: int) -> bool:
    """Whether the watch reverts a policy within `steps` steps although it stays `share` faster."""
    job = SimulatedJob(kind, seed, better_by(share))
    outcome = kept(job, share)
    return any(status.reverted for status in followed(job, outcome, job.number + steps, seed))


def steps_after_drift(kind: Kind, seed: int, limit: int, drift: float = -0.05) -> int:
    """Steps from the policy's turn to slower than the default until its last use; at most `limit`."""
    at = random.Random(f"drift {seed}").randrange(20, 200) + PROOF
    before = better_by(0.08)
    less = lambda policy, number: before(policy, number) * (1 if number < at else drift / 0.08)  # noqa: E731
    job = SimulatedJob(kind, seed, less)
    for _ in followed(job, kept(job, 0.08), at + limit, seed):
        pass
    return max(0, job.last[BETTER] - at)


def cost_of_search(
    kind: Kind, seed: int, share: float, simulated: type[SimulatedJob] = SimulatedJob
) -> tuple[float, float]:
    """A search's stated cost in ms, and its true cost: the extra time over the same steps without it."""
    job = simulated(kind, seed, one_better(share), MEETING_MS)
    without = SimulatedJob(kind, seed, one_better(share))
    outcome = searched(job.run, record=job.record)
    while without.number < job.number:
        without.step(DEFAULT)
    return outcome.cost_ms, job.clock_ms - without.clock_ms


@dataclass(frozen=True)
class Life:
    """A whole job under live tuning: search and watch."""

    status: WatchStatus
    extra_pct: float
    """Extra time in percent of the same job without weft; negative if it saved time."""
    extra_ms: float

    @property
    def claims(self) -> bool:
        return self.status.outcome.kept and not self.status.reverted


def lived(kind: Kind, seed: int, share: float, steps: int) -> Life:
    job = SimulatedJob(kind, seed, one_better(share), MEETING_MS)
    without = SimulatedJob(kind, seed, one_better(share))
    outcome = searched(job.run, ended=lambda: job.number >= steps, record=job.record)
    (*_, status) = (WatchStatus(outcome, outcome.policy), *followed(job, outcome, steps, seed))
    while without.number < job.number:
        without.step(DEFAULT)
    extra_ms = job.clock_ms - without.clock_ms
    return Life(status, 100 * extra_ms / without.clock_ms, extra_ms)


@cache
def total_gain_pct(kind: Kind, share: float, steps: int = 6000, jobs: int = 3) -> float:
    """Percent of time saved by long jobs that always run the better policy; the program's pauses left out."""
    if not kind.waits:
        return 100 * share
    ms = {}
    for policy in (DEFAULT, BETTER):
        played = [SimulatedJob(kind, f"long {seed}", better_by(share)) for seed in range(jobs)]
        ms[policy] = fmean(without_pauses([job.step(policy) for job in played for _ in range(steps)]))
    return 100 * (1 - ms[BETTER] / ms[DEFAULT])
