"""Starts: settings that cannot change while a job runs, tried over several starts of one command.

If communicators cannot have siblings, NCCL_MAX_CTAS can still be set before a job begins: each start under
`weft run --tune` measures its step with one number of CTAs; the best, if it is well ahead, is then compared
with the program's own. The number of queues and the size of NCCL's buffers are compared directly. Later
starts use only what has won every pair of starts (`weft.tuning.live.start_trial`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import WeftError
from weft.gpu import nvml
from weft.policy import MAX_CTAS, Policy
from weft.tuning.live.launcher import still_runs, this_launcher
from weft.tuning.live.start_trial import CTA_VARIABLE, MOST_SETTINGS, StartTrial, known_setting, trial_of
from weft.tuning.store import Entry, Key, Store

_AHEAD = 0.03  # share of the step time by which a CTA count must lead to be compared
OWN = 0  # stands for the program's own number of CTAs
NEVER_MS = 1e9  # step time of a start that has not ended: if it never does, its CTAs are not tried again
_STORE_TIMEOUT_S = 2.0
_LONGEST_NAME = 1024  # characters of a program's path in its key; the rest of the command is a hash
NEVER_ENDED = "a start with it did not end well"
OVERLAPPED = "another start of this command is running: this one is not compared with others"


@dataclass(frozen=True)
class Starts:
    """Results of earlier starts of a command: ms per step by number of CTAs, and trials of settings."""

    ms: Mapping[int, float]
    choices: tuple[int, ...] = ()
    trials: tuple[StartTrial, ...] = ()

    @property
    def untried(self) -> tuple[int, ...]:
        return tuple(count for count in self.choices if count not in self.ms)

    @property
    def leader(self) -> int:
        """The CTA count that is well ahead of the program's own after one run each; OWN if there is none."""
        first = min(self.ms, key=lambda count: self.ms[count], default=OWN)
        return first if self.ms.get(first, 0) < (1 - _AHEAD) * self.ms.get(OWN, 0) else OWN

    def current(self, fixed: Collection[str] = ()) -> StartTrial | None:
        """The trial that starts compare now, except settings in `fixed`, which the user has set.

        None if there is none, or while CTA counts are untried. A pair that has begun comes first: nothing
        else may change before its second start.
        """
        free = [trial for trial in self.trials if trial.active and trial.variable not in fixed]
        begun = [trial for trial in free if trial.half_ms is not None]
        return None if self.untried else next(iter(begun + free), None)

    @property
    def confirmed(self) -> tuple[str, ...]:
        return tuple(trial.setting for trial in self.trials if trial.confirmed)

    def next(self, fixed: Collection[str] = ()) -> tuple[str, ...]:
        """The settings of the next start, except those whose variable is in `fixed`."""
        if self.ms and self.untried:
            found: tuple[str, ...] = (f"{CTA_VARIABLE}={self.untried[0]}",)
        else:
            trial = self.current(fixed)
            found = tuple(one for one in self.confirmed if trial is None or one != trial.setting)
            found += (trial.setting,) if trial and trial.next_has_it else ()
        return tuple(setting for setting in found if setting.split("=")[0] not in fixed)

    @property
    def text(self) -> str:
        """What the next start will do, in one sentence."""
        if self.ms and self.untried:
            return f"the next start tries {self.untried[0]} CTAs"
        shown = self.current() or next((trial for trial in reversed(self.trials) if trial.confirmed), None)
        shown = shown or (self.trials[-1] if self.trials else None)
        if shown is not None:
            return shown.text
        return "no number of CTAs was clearly faster in earlier starts" if self.choices else ""

    def with_trials(self, offered: Sequence[str]) -> Starts:
        """These starts with new trials of the settings that the job offers, and of the leading CTA count."""
        wanted = [
            *([f"{CTA_VARIABLE}={self.leader}"] if self.leader != OWN and not self.untried else []),
            *offered,
        ]
        known = {trial.setting: trial for trial in self.trials}
        for setting in wanted:
            if setting not in known and known_setting(setting) and len(known) < MOST_SETTINGS:
                known[setting] = StartTrial(setting)
        return dataclasses.replace(self, trials=tuple(known.values()))

    def replaced(self, trial: StartTrial) -> Starts:
        trials = (trial if one.setting == trial.setting else one for one in self.trials)
        return dataclasses.replace(self, trials=tuple(trials))


def gpu_and_driver() -> tuple[str, str] | None:
    """This machine's GPU name and driver version; None without an NVIDIA GPU."""
    with nvml.session() as library:
        name = nvml.first_name(library)
        return (name, nvml.driver_release(library) or "unknown") if name else None


class Memory:
    """The starts of one command on this machine. A store error only sets `problem`; the job goes on."""

    def __init__(
        self,
        command: Sequence[str],
        machine: Callable[[], tuple[str, str] | None] = gpu_and_driver,
        *,
        fixed: Collection[str] = (),
        coin: Callable[[], bool] = lambda: random.random() < 0.5,
        runs: Callable[[str], bool] = still_runs,
    ) -> None:
        """`fixed`: variables that the user has set. `coin`: draws the order of each pair. `runs`: whether the
        launcher of another start still runs."""
        self.starts, self.problem = Starts({}), ""
        self._fixed, self._coin, self._runs = frozenset(fixed), coin, runs
        self._alone = True
        self._number = OWN
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

    def begin(self) -> dict[str, str]:
        """The variables for this start. First marks its trials as running, in case the start never ends."""
        starts = self._settled(self.starts)
        self._alone = not any(trial.running for trial in starts.trials)
        if not self._alone:
            return self._second(starts)
        launcher, compared = this_launcher(), starts.current(self._fixed)
        if compared is not None:
            starts = starts.replaced(compared.begun(self._coin(), launcher))
        given = starts.next(self._fixed)
        for trial in starts.trials:
            if trial.confirmed and not trial.active and trial.setting in given:
                starts = starts.replaced(dataclasses.replace(trial, running=launcher))
        if starts.ms and starts.untried and given:
            self._number = starts.untried[0]
            starts = dataclasses.replace(starts, ms={**starts.ms, self._number: NEVER_MS})
        if starts != self.starts and not self._keep(starts):
            return {}
        self.starts = starts
        return dict(setting.split("=") for setting in given)

    def _second(self, starts: Starts) -> dict[str, str]:
        """The variables for a start while another one runs: each slows the other, so neither is compared."""
        known = [one for one in starts.trials if one.confirmed and one.variable not in self._fixed]
        for trial in starts.trials:
            if trial.running:
                starts = starts.replaced(dataclasses.replace(trial, overlapped=True))
        self._keep(starts)
        return dict(trial.setting.split("=") for trial in known if not trial.active)

    def learn(self, result: Mapping[str, Any], *, ended_well: bool = True) -> str:
        """Store the result of this start; returns a line about the next one, or an empty string."""
        if self._store is None:
            return ""
        if not self._alone:
            return OVERLAPPED
        facts, ms = result.get("facts") or {}, result.get("default_ms")
        # How fast a failed start was does not matter.
        starts = self._with_overlaps()
        if ms and ended_well:
            after = self._measured(starts, float(ms))
        else:
            after = self._unmeasured(starts, ended_well)
        if ms:
            choices = (
                ()
                if CTA_VARIABLE in self._fixed
                else tuple(map(int, facts.get("cta_choices_at_start") or ()))
            )
            after = dataclasses.replace(after, choices=after.choices or choices)
            offers = [str(one) for one in facts.get("start_settings") or ()]
            after = after.with_trials([one for one in offers if one.split("=")[0] not in self._fixed])
        if not after.choices and not after.trials:
            return ""
        return after.text if self._keep(after) else self.problem

    def _settled(self, starts: Starts) -> Starts:
        """Settle trials whose start never ended, and drop begun pairs that cannot be completed now."""
        for trial in starts.trials:
            if trial.running and not self._runs(trial.running):
                starts = starts.replaced(_failed(trial))
            elif trial.active and trial.variable in self._fixed and not trial.running:
                starts = starts.replaced(trial.pair_again())
        return starts

    def _measured(self, starts: Starts, ms: float) -> Starts:
        running = [trial for trial in starts.trials if trial.running]
        if self._number != OWN or not (starts.ms or running):
            return dataclasses.replace(starts, ms={**starts.ms, self._number: ms})
        for trial in running:
            starts = starts.replaced(trial.pair_again() if trial.overlapped else trial.ended(ms))
        return starts

    def _unmeasured(self, starts: Starts, ended_well: bool) -> Starts:
        """After a start without a step time: repeat it, unless a setting may have made it fail."""
        for trial in starts.trials:
            if trial.running:
                starts = starts.replaced(trial.pair_again() if ended_well else _failed(trial))
        return starts

    def _with_overlaps(self) -> Starts:
        """These starts, with the trials marked during which another start has begun."""
        try:
            stored = read_starts(self._store.get(self._key) if self._store is not None else None)
        except WeftError as error:
            self.problem = f"earlier starts are not used: {error}"
            return self.starts
        marked = {trial.setting for trial in stored.trials if trial.overlapped}
        trials = (dataclasses.replace(t, overlapped=t.setting in marked) for t in self.starts.trials)
        return dataclasses.replace(self.starts, trials=tuple(trials))

    def _keep(self, starts: Starts) -> bool:
        if self._store is None:
            return starts == self.starts
        try:
            write_starts(self._store, self._key, starts)
        except WeftError as error:
            self.problem, self._store = f"starts are not saved for the next: {error}", None
            return False
        return True


def _failed(trial: StartTrial) -> StartTrial:
    """The trial after a start that did not end well. If the setting is not to blame (the start ran without
    it, or another start took part of the GPU), only the pair starts over."""
    if trial.overlapped or not trial.next_has_it:
        return trial.pair_again()
    return trial.from_scratch() if trial.confirmed else trial.dropped(NEVER_ENDED)


def key(command: Sequence[str], gpu: str, driver: str) -> Key:
    """The store key of a command on a GPU. The program's NCCL and torch are unknown before it starts."""
    mark = hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()[:16]
    name = "".join(letter if letter.isprintable() else "?" for letter in command[0][-_LONGEST_NAME:])
    return Key(gpu, driver, "of the program", "of the program", f"starts of {name}, {mark}")


def read_starts(entry: Entry | None) -> Starts:
    """The starts in a store entry; empty (so all is tried again) if it is missing, stale or malformed."""
    if entry is None or entry.stale:
        return Starts({})
    try:
        found = {int(count): float(ms) for count, ms in entry.verdict["starts"].items()}
        choices = tuple(int(count) for count in entry.verdict["choices"])
        trials = tuple(trial_of(trial) for trial in entry.verdict.get("trials", ()))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return Starts({})
    if any(not 0 <= count <= MAX_CTAS for count in (*found, *choices)) or any(
        not 0 < ms < float("inf") for ms in found.values()
    ):
        return Starts({})
    return Starts(found, choices, trials[:MOST_SETTINGS])


def write_starts(store: Store, where: Key, starts: Starts) -> None:
    """Store the starts of a command."""
    document = {
        "starts": {str(count): ms for count, ms in starts.ms.items()},
        "choices": list(starts.choices),
        "trials": [dataclasses.asdict(trial) for trial in starts.trials],
    }
    ctas = next((int(one.split("=")[1]) for one in starts.confirmed if one.startswith(CTA_VARIABLE)), None)
    store.put(where, Policy(max_ctas=ctas), {**document, "text": starts.text})
