"""Finds running jobs: every `weft run` on this machine holds a lock on its job's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import InputError, UsageError
from weft.policy import Policy
from weft.shim import job_folder

_PREFIX_LENGTH = len("weft-job-")


@dataclass(frozen=True)
class RunningJob:
    """A job that `weft run` started. `name` is the last part of its folder's name."""

    folder: Path
    name: str
    pid: int | None = None
    """Process id of `weft run`."""
    command: tuple[str, ...] = ()
    started: float | None = None
    """Unix time."""
    policy: Policy = field(default_factory=Policy)
    """The policy it was started with."""
    tune: bool = False


def running_jobs() -> list[RunningJob]:
    """This user's running jobs, the oldest first."""
    found = [
        describe_running(folder)
        for folder in job_folder.job_folders()
        if _mine(folder) and job_folder.in_use(folder)
    ]
    return sorted(found, key=lambda job: job.started or 0.0)


def select_job(wanted: str) -> RunningJob:
    """The job with this name, folder or process id (of `weft run`, or of any of its processes)."""
    path = Path(wanted)
    if path.is_dir():
        return _checked(path)
    for folder in job_folder.job_folders():
        if wanted in (folder.name, folder.name[_PREFIX_LENGTH:]):
            return _checked(folder)
    jobs = running_jobs()
    if wanted.isdecimal():
        of_process = _folder_of_process(int(wanted))
        if of_process is not None:
            return _checked(of_process)
        for job in jobs:
            if job.pid == int(wanted):
                return job
    known = ", ".join(job.name for job in jobs) or "none"
    raise UsageError(f"no running job {wanted!r}; running jobs of this user: {known}")


def describe_running(folder: Path) -> RunningJob:
    """The job of a folder, from the description that `weft run` wrote."""
    facts = job_folder.description(folder)
    pid, started, command = facts.get("pid"), facts.get("started"), facts.get("command")
    return RunningJob(
        folder=folder,
        name=folder.name[_PREFIX_LENGTH:],
        pid=pid if isinstance(pid, int) and 0 < pid < 2**31 else None,
        command=tuple(map(str, command)) if isinstance(command, list) else (),
        started=float(started) if isinstance(started, (int, float)) and 0 < started < 1e11 else None,
        policy=_policy(facts.get("policy")),
        tune=bool(facts.get("tune")),
    )


def _policy(document: Any) -> Policy:
    try:
        return Policy.from_dict(document)
    except UsageError:
        return Policy()


def _mine(folder: Path) -> bool:
    try:
        return folder.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False


def _checked(folder: Path) -> RunningJob:
    """The job of a folder. Another user's job is rejected, even for root: its figures are private."""
    if not job_folder.control(folder).is_file() and _mine(folder):
        raise InputError(f"{folder} is not the folder of a job; `weft top` without arguments lists jobs")
    if not _mine(folder):
        raise UsageError(f"the job in {folder} belongs to another user; run `weft top` as that user")
    if not job_folder.in_use(folder):
        raise InputError(f"the job in {folder} is over: the `weft run` that started it has ended")
    return describe_running(folder)


def _folder_of_process(pid: int) -> Path | None:
    """WEFT_JOB of a process; None if it has none. Raises UsageError if it belongs to another user."""
    process = Path("/proc", str(pid))
    try:
        if process.stat().st_uid != os.getuid():
            raise UsageError(f"process {pid} belongs to another user; run `weft top` as that user")
        environment = (process / "environ").read_bytes()
    except OSError:
        return None
    entries = (entry.partition(b"=") for entry in environment.split(b"\0"))
    return next((Path(os.fsdecode(value)) for name, _, value in entries if name == b"WEFT_JOB"), None)
