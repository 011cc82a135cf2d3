"""`weft top`: watches running jobs from outside, and changes their policy."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.output import versioned
from weft.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from weft.monitor.jobs import RunningJob
    from weft.policy import Policy

LINE_EVERY_S = 1.0


def top(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Name, folder or a process id of a job; default: all jobs."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per second, each on its own line.")
    ] = False,
    samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Exit after N samples.")] = None,
    policy_file: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Apply this policy to the running job, and exit."),
    ] = None,
    off: Annotated[
        bool, typer.Option("--off", help="Remove the policy of the running job, and exit.")
    ] = False,
) -> None:
    """Watch running jobs that `weft run` started on this machine.

    Watching adds no work to the jobs. --policy rejects controls that all ranks must change together, and any
    change of a job that is tuned or watched (--tune).

    weft top

    weft top JOB --json --samples 5

    weft top JOB --policy policy.json
    """
    if sys.platform != "linux":
        raise UnavailableError("weft top needs Linux, where `weft run` works")
    from weft.monitor.jobs import select_job
    from weft.policy import Policy

    if policy_file is not None and off:
        raise UsageError("--policy and --off exclude each other: give one of them")
    if samples is not None and (policy_file is not None or off):
        raise UsageError("--samples counts what `weft top` shows; --policy and --off show nothing")
    policy = Policy.load(policy_file) if policy_file is not None else None
    only = select_job(job) if job is not None else None
    if policy is not None or off:
        _change(only or _only_job(), policy, as_json)
    elif as_json:
        _print_lines(only, samples)
    else:
        from weft.cli.top_screen import show_top

        show_top(only, samples)


def _only_job() -> RunningJob:
    from weft.monitor.jobs import running_jobs

    jobs = running_jobs()
    if len(jobs) != 1:
        names = ", ".join(job.name for job in jobs) or "none is running"
        raise UsageError(f"name the job whose policy to change: {names}")
    return jobs[0]


def _change(job: RunningJob, policy: Policy | None, as_json: bool) -> None:
    """Apply the policy to the job, or remove the job's own."""
    from weft.monitor.change import change_policy, switch_off
    from weft.monitor.watch_job import JobWatch

    watch, stays = JobWatch(job), ""
    try:
        if policy is not None:
            before = change_policy(watch, policy)
        else:
            before, stays = switch_off(watch)
        now = watch.policy()
    finally:
        watch.close()
    if as_json:
        document: dict[str, Any] = {"job": job.name}
        document |= {"before": before.to_dict(), "policy": now.to_dict(), "stays": stays}
        print(json.dumps(versioned(document)))
        return
    print(f"{job.name}: {before.label} -> {now.label}, from each process's next launch on")
    if stays:
        print(f"{stays} stays in force: it concerns all ranks at once; start the job again without it")


def _print_lines(only: RunningJob | None, samples: int | None) -> None:
    from weft.monitor.watch_jobs import JobsWatch

    watch, printed, due = JobsWatch(only), 0, time.monotonic()
    try:
        while True:
            print(json.dumps(watch.sample().to_dict()), flush=True)
            printed += 1
            if watch.over or printed == samples:
                return
            due = max(due + LINE_EVERY_S, time.monotonic())
            watch.wait(due - time.monotonic())
    except KeyboardInterrupt:
        return
    finally:
        watch.close()
