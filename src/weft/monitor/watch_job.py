"""Watches one job: opens the files that its processes create in the job's folder, and samples them.

Files stay open, so that a last sample has the final figures after the job has ended and removed its folder.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from weft.errors import InputError
from weft.files import open_regular
from weft.monitor.calls import CallFile
from weft.monitor.counters import ProcessCount, ProcessFile
from weft.monitor.jobs import RunningJob
from weft.monitor.processes import JobProcess, job_processes
from weft.monitor.sample import JobSample, RankSample, TuningSample
from weft.policy import Policy
from weft.shim import job_folder, layout, policy_image, tracer
from weft.shim.spans import span_profile
from weft.shim.step_times import StepReader, StepTimes

_log = logging.getLogger("weft.monitor")

OF_THE_START = ("max_ctas", "engine", "schedule")
"""Controls that are not in the job's control block: they keep the values of the job's start."""
LATEST_STEPS = 64
"""Number of steps in a median."""
_PROCESSES_EVERY_S = 5.0
_NOTHING = ProcessCount(0, 0, 0, dict.fromkeys(layout.COUNTERS, 0), None)
_File = TypeVar("_File", ProcessFile, CallFile, StepReader)


class JobWatch:
    """One job, which can be sampled even after its end."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self._counters: dict[str, ProcessFile] = {}
        self._calls: dict[str, CallFile] = {}
        self._steps: dict[str, StepReader] = {}
        self._refused: set[str] = set()
        try:
            self._control = open_regular(job_folder.control(job.folder))
        except OSError as error:
            raise InputError(f"the job {job.name} is over, or cannot be read: {error.strerror}") from None
        self._policy = job.policy
        self._end = _open_outcome(job.folder)
        self._before: dict[str, tuple[float, ProcessCount]] = {}
        self._tuning: tuple[int, dict[str, Any]] = (0, {})
        self._totals: dict[str, int] = {}
        self._traced: float | None = None
        self._processes: list[JobProcess] = []
        self._listed_s = -_PROCESSES_EVERY_S
        self.state: Literal["running", "ended", "killed"] = "running"
        self.discover()

    def discover(self) -> None:
        """Open new files in the folder."""
        try:
            names = [path.name for path in self.job.folder.iterdir()]
        except OSError:
            return
        for name in names:
            if name[0].isdecimal():
                self._open(self._counters, name, ProcessFile)
            elif name.startswith("calls."):
                self._open(self._calls, name, CallFile)
            elif name.startswith("steps.") and name[6:].isdecimal():
                self._open(self._steps, name, StepReader)
        self._read_tuning(names)
        self._read_trace(names)

    def _open(self, known: dict[str, _File], name: str, kind: type[_File]) -> None:
        if name in known or name in self._refused:
            return
        try:
            known[name] = kind(self.job.folder / name)
        except (InputError, ValueError) as error:  # often the file is not complete yet
            _log.debug("%s is not read: %s", name, error)
            if "another version" in str(error):
                self._refused.add(name)
        except OSError as error:
            _log.debug("%s is not read: %s", name, error)

    def close(self) -> None:
        os.close(self._control)
        if self._end >= 0:
            os.close(self._end)
        for files in (self._counters, self._calls, self._steps):
            for file in files.values():
                file.close()

    def sample(self) -> JobSample:
        """The current state of the job."""
        if self.state == "running" and not job_folder.in_use(self.job.folder):
            self.state = "killed" if self.job.folder.is_dir() else "ended"
        self.discover()
        now = time.monotonic()
        known = self._processes or self._counters or self._steps
        every_s = _PROCESSES_EVERY_S if known else 0.0
        if self.state == "running" and now - self._listed_s >= every_s:
            self._listed_s, self._processes = now, job_processes(self.job)
        policy = self.policy()
        steps = {file.pid: found for file in self._steps.values() if (found := _read(file))}
        outcome = _read_outcome(self._end) if self.state == "ended" else {}
        tuning = outcome.get("tuning")
        if isinstance(tuning, dict) and tuning.get("state"):
            self._tuning = 0, tuning
        ranks = self._ranks(now, policy, steps, outcome)
        slowest = max(ranks, key=lambda rank: rank.step_ms or 0.0, default=None)
        return JobSample(
            job=self.job.name,
            folder=str(self.job.folder),
            pid=self.job.pid,
            command=" ".join(self.job.command),
            state=self.state,
            elapsed_s=round(time.time() - self.job.started, 3) if self.job.started else None,
            policy=policy.to_dict(),
            policy_label=policy.label,
            launches_per_s=_sum([rank.launches_per_s for rank in ranks]),
            collectives_per_s=_sum([rank.collectives_per_s for rank in ranks]),
            comm_bytes_per_s=_sum([rank.comm_bytes_per_s for rank in ranks]),
            step_ms=slowest.step_ms if slowest else None,
            step_spread_pct=_spread_pct(slowest),
            exposed_pct=self._exposed_pct(),
            tuning=self._tuning_sample(steps),
            totals=self._totals,
            ranks=ranks,
        )

    def policy(self) -> Policy:
        """The policy in force for processes without their own; controls of OF_THE_START never change."""
        with suppress(InputError, OSError):  # being written: keep the previous one until the next sample
            found = policy_image.policy_in_file(self._control)[0] or Policy()
            self._policy = replace(found, **{name: getattr(self.job.policy, name) for name in OF_THE_START})
        return self._policy

    def own_policies(self) -> list[ProcessFile]:
        """Processes with their own policy, which takes precedence over the job's."""
        return [file for file in self._counters.values() if _alive(file.pid) and file.policy() is not None]

    # --- ranks --------------------------------------------------------------------------------------------

    def _ranks(
        self, now: float, policy: Policy, steps: dict[int, StepTimes], outcome: dict[str, Any]
    ) -> list[RankSample]:
        calls = {file.pid: file for file in self._calls.values()}
        found: list[RankSample] = []
        counts = []
        for name, file in self._counters.items():
            count = _count(file)
            counts.append(count)
            rates = self._rates(name, now, count)
            own = file.policy()
            label = policy.label if own is None else own.label
            found.append(
                _rank(file.rank, file.pid, file.command, count, rates, label, steps.get(file.pid), calls)
            )
        self._totals = outcome.get("totals") or _totals(counts)
        counted = {file.pid for file in self._counters.values()}
        for late in outcome.get("processes", []):  # started and ended since the last sample
            if late["pid"] not in counted:
                counted.add(late["pid"])
                more = {**_NOTHING.counters, "comm_bytes": late["comm_bytes"]}
                count = ProcessCount(late["launches"], late["comm_launches"], late["shaped"], more, None)
                found.append(_rank(late["rank"], late["pid"], late["command"], count, None, "", None, calls))
        named = {process.pid for process in self._processes}
        for pid, ended in steps.items():  # a rank that another process forked, or that has ended already
            if pid not in counted and pid not in named:
                found.append(_rank(ended.rank, pid, "", _NOTHING, None, "", ended, calls))
        for process in self._processes:
            if process.pid not in counted:
                times = steps.get(process.pid)
                found.append(
                    _rank(process.rank, process.pid, process.command, _NOTHING, None, "", times, calls)
                )
        return sorted(found, key=lambda rank: (rank.rank is None, rank.rank or 0, rank.pid))

    def _rates(self, name: str, now: float, count: ProcessCount) -> tuple[float, float, float] | None:
        before = self._before.get(name)
        self._before[name] = now, count
        if before is None or now <= before[0]:
            return None
        seconds, earlier = now - before[0], before[1]
        return (
            (count.launches - earlier.launches) / seconds,
            (count.comm_launches - earlier.comm_launches) / seconds,
            (count.counters["comm_bytes"] - earlier.counters["comm_bytes"]) / seconds,
        )

    # --- tuning -------------------------------------------------------------------------------------------

    def _read_tuning(self, names: Sequence[str]) -> None:
        ranks = [int(found[1]) for name in names if (found := _RESULT.fullmatch(name))]
        if not ranks:
            return
        path = self.job.folder / f"tuning.{min(ranks)}.json"
        with suppress(OSError):
            changed = path.stat().st_mtime_ns
            if changed != self._tuning[0]:
                self._tuning = changed, job_folder.read_object(path)

    def _tuning_sample(self, steps: dict[int, StepTimes]) -> TuningSample | None:
        if not self.job.tune:
            return None
        leader = min((s for s in steps.values() if s.phase), key=lambda s: s.rank, default=None)
        result = self._tuning[1]
        return TuningSample(
            phase=leader.phase if leader else "waiting",
            trying=leader.policy if leader else "",
            state=str(result.get("state", "")),
            text=str(result.get("text", "")),
            gain_pct=_figure(result, "gain_pct") if result.get("state") == "kept" else None,
        )

    def _read_trace(self, names: Sequence[str]) -> None:
        """Reads the share of exposed communication from the first usable trace of a process, once."""
        traces = sorted(name for name in names if name.startswith("trace."))
        if not traces or self._traced is not None or traces[0] in self._refused:
            return
        try:
            profile = span_profile(tracer.read_file(self.job.folder / traces[0]), steps=1)
        except (InputError, OSError, ValueError) as error:
            _log.debug("%s is not read: %s", traces[0], error)
            profile = None
        if profile is None or not profile.span_ms or profile.exposed_ms is None:
            self._refused.add(traces[0])
        else:
            self._traced = 100 * profile.exposed_ms / profile.span_ms

    def _exposed_pct(self) -> float | None:
        if self._traced is not None:
            return round(self._traced, 2)
        facts = self._tuning[1].get("facts")
        step_ms, exposed_ms = _figure(facts, "step_ms"), _figure(facts, "exposed_ms")
        return round(100 * exposed_ms / step_ms, 2) if step_ms and exposed_ms is not None else None


_RESULT = re.compile(r"tuning\.([0-9]{1,9})\.json")


def _figure(document: Any, name: str) -> float | None:
    """A number in a JSON object that another process wrote; None if there is none."""
    value = document.get(name) if isinstance(document, dict) else None
    finite = isinstance(value, (int, float)) and abs(value) < 1e15
    return float(value) if finite and value is not None else None


def _open_outcome(folder: Path) -> int:
    """Opens the outcome file, so that it can be read after the folder is removed; -1 if that fails."""
    try:
        return open_regular(folder / job_folder.OUTCOME)
    except OSError as error:
        _log.debug("the end of %s will not be known: %s", folder, error)
        return -1


def _read_outcome(number: int) -> dict[str, Any]:
    """The outcome of the whole job that `weft run` wrote; empty if there is none."""
    try:
        data = os.pread(number, os.fstat(number).st_size, 0) if number >= 0 else b""
    except OSError as error:
        _log.debug("the outcome cannot be read: %s", error)
        return {}
    return job_folder.parse_object(data)


def _count(file: ProcessFile) -> ProcessCount:
    try:
        return file.read()
    except (InputError, OSError) as error:
        _log.debug("%s is not read: %s", file.path, error)
        return _NOTHING


def _read(file: StepReader) -> StepTimes | None:
    try:
        return file.read()
    except (OSError, ValueError) as error:
        _log.debug("steps of %d are not read: %s", file.pid, error)
        return None


def _rank(
    rank: int | None,
    pid: int,
    command: str,
    count: ProcessCount,
    rates: tuple[float, float, float] | None,
    label: str,
    steps: StepTimes | None,
    calls: dict[int, CallFile],
) -> RankSample:
    times = steps.times_ms if steps else calls[pid].step_times_ms() if pid in calls else ()
    latest = sorted(times[-LATEST_STEPS:])
    return RankSample(
        rank=steps.rank if steps and rank is None else rank,
        pid=pid,
        command=command,
        alive=_alive(pid),
        launches=count.launches,
        comm_launches=count.comm_launches,
        shaped=count.shaped,
        comm_bytes=count.counters["comm_bytes"],
        launches_per_s=rates[0] if rates else None,
        collectives_per_s=rates[1] if rates else None,
        comm_bytes_per_s=rates[2] if rates else None,
        ctas=count.ctas,
        policy=steps.policy if steps and steps.policy else label,
        steps=steps.count if steps else None,
        step_ms=median(latest) if latest else None,
        step_p10_ms=latest[len(latest) // 10] if latest else None,
        step_p90_ms=latest[len(latest) * 9 // 10] if latest else None,
    )


def _totals(counts: Sequence[ProcessCount]) -> dict[str, int]:
    """Counters over all processes, summed as in `weft.shim.stats` for `weft run --stats`."""
    own = {name: sum(getattr(c, name) for c in counts) for name in ("launches", "comm_launches", "shaped")}
    return own | {name: sum(c.counters[name] for c in counts) for name in layout.COUNTERS}


def _sum(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _spread_pct(rank: RankSample | None) -> float | None:
    if rank is None or not rank.step_ms or rank.step_p10_ms is None or rank.step_p90_ms is None:
        return None
    return round(100 * (rank.step_p90_ms - rank.step_p10_ms) / rank.step_ms, 2)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
