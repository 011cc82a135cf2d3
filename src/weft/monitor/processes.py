"""The processes of a job, from /proc: a process that launched no kernel has no file in the job's folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.monitor.jobs import RunningJob
from weft.tuning.live.launcher import start_time

_RANK_VARIABLES = (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")
_MOST = 4096


@dataclass(frozen=True)
class JobProcess:
    """A process that is a rank of a job."""

    pid: int
    rank: int
    command: str


_known: dict[tuple[int, str], JobProcess] = {}
"""Ranks by process id and start time. Processes without a rank are not kept: they may still become one."""


def job_processes(job: RunningJob) -> list[JobProcess]:
    """Every running rank of the job, with one process each: the topmost in the process tree."""
    if job.pid is None:
        return []
    found: dict[int, JobProcess] = {}
    waiting = [job.pid]
    for pid in waiting:
        if len(waiting) < _MOST:
            waiting += _children(pid)
        process = _rank_process(pid) if pid != job.pid else None
        if process is not None:
            found.setdefault(process.rank, process)
    return list(found.values())


def job_environments(job: RunningJob) -> list[dict[str, str]]:
    """The initial environment of each rank of the job."""
    found = []
    for process in job_processes(job):
        with suppress(OSError):
            data = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
            pairs = (entry.partition("=") for entry in data.split("\0"))
            found.append({name: value for name, _, value in pairs if name})
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError):
                found += map(int, (task / "children").read_text().split())
    return found


def _rank_process(pid: int) -> JobProcess | None:
    identity = pid, start_time(pid)
    if identity in _known:
        return _known[identity]
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    entries = (entry.partition(b"=") for entry in environment.split(b"\0"))
    values = {name: value for name, _, value in entries if name in _RANK_VARIABLES and value.isdigit()}
    rank = next((int(values[name]) for name in _RANK_VARIABLES if name in values), None)
    if rank is None:
        return None
    text = command.replace(b"\0", b" ").decode(errors="replace").strip()
    _known[identity] = JobProcess(pid, rank, text[:256])
    return _known[identity]
