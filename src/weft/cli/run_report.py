"""The report of `weft run` after the program has ended. This module is loaded before the program starts."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.output import say, versioned
from weft.errors import WeftError
from weft.files import write_whole
from weft.policy import Policy
from weft.shim.chrome import write_traces
from weft.shim.engine import engine_summary, kernels_in_traces, traced_summary
from weft.shim.stats import stats_summary
from weft.tuning.live.tuned_job import read_record, read_result

if TYPE_CHECKING:
    from weft.monitor.exporter import Address, Exporter
    from weft.shim.inject import Job, TraceRequest
    from weft.tuning.live.starts import Memory


@dataclass(frozen=True)
class JobOptions:
    """How the program runs."""

    command: list[str]
    policy: Policy
    earlier: Memory | None
    """Results of earlier starts of this program; None without --tune."""
    variables: dict[str, str]
    """Variables added to the program's environment."""
    trace: TraceRequest | None
    count_steps: bool
    replacing: bool
    """Whether collectives and matmuls are fused (--ops)."""
    metrics: Address | None
    """Where metrics are served; None: nowhere."""

    @property
    def tune(self) -> bool:
        return self.earlier is not None


@dataclass(frozen=True)
class ReportOptions:
    """What is written after the program has ended."""

    stats_file: Path | None
    html: Path | None
    traces: Path | None
    quiet: bool


def report_job(
    job: Job, exporter: Exporter | None, asked: JobOptions, wanted: ReportOptions, status: int
) -> None:
    """Collect what the processes counted, report it, and end the job. `status`: the program's wait status."""
    try:
        counted, line = _collect(job, asked, wanted, status)
    finally:
        if exporter is not None:
            exporter.stop()
        job.close()
    say(line, wanted.quiet)
    if wanted.stats_file is not None:
        document = versioned({"policy": asked.policy.to_dict(), **counted})
        write_whole(wanted.stats_file, json.dumps(document, indent=1) + "\n")


def _collect(job: Job, asked: JobOptions, wanted: ReportOptions, status: int) -> tuple[dict[str, Any], str]:
    """The statistics of all processes, and the closing line."""
    counted = job.collect()
    line = stats_summary(counted, asked.policy)
    if asked.earlier is not None:
        line = _report_tuning(job.folder, counted, asked.earlier, wanted, status)
    if asked.replacing:
        from weft.ops.replacements import read_replacements

        counted["ops"] = read_replacements(job.folder)
        say(counted["ops"]["text"], wanted.quiet)
    job.leave_outcome(counted)
    if wanted.traces is not None:
        _report_traces(job.folder, counted, wanted.traces, wanted.quiet)
    return counted, line


def _report_tuning(
    folder: Path, counted: dict[str, Any], earlier: Memory, wanted: ReportOptions, status: int
) -> str:
    counted["tuning"] = read_result(folder)
    _write_page(wanted.html, counted["tuning"], read_record(folder))
    say(earlier.learn(counted["tuning"], ended_well=_ended_well(status)), wanted.quiet)
    say(engine_summary(counted["engine"]), wanted.quiet)
    return str(counted["tuning"]["text"])


def _report_traces(folder: Path, counted: dict[str, Any], out: Path, quiet: bool) -> None:
    written = _write_traces(folder, out, quiet)
    if written and counted["engine"]["asked"]:
        counted["engine"]["traced"] = kernels_in_traces(written)
        say(traced_summary(counted["engine"]["traced"]), quiet)


def _ended_well(status: int) -> bool:
    """Whether the program succeeded, or was stopped on purpose (SIGINT, SIGTERM, SIGHUP)."""
    code = os.waitstatus_to_exitcode(status)
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return code == 0 or -code in wanted or code - 128 in wanted


def _write_page(path: Path | None, tuning: dict[str, Any], steps: dict[str, Any]) -> None:
    if path is None:
        return
    from weft.report.live import live_page

    try:
        write_whole(path, live_page(tuning, steps))
    except WeftError as error:
        say(str(error), quiet=False)


def _write_traces(folder: Path, out: Path, quiet: bool) -> list[Path]:
    try:
        written = write_traces(folder, out)
    except WeftError as error:
        say(str(error), quiet=False)
        return []
    if written:
        say(f"traces of {len(written)} processes: weft analyze {out}/weft.*.json", quiet)
    else:
        say("nothing was traced: the program launched no kernel, or ended before --trace-after", quiet)
    return written
