"""`weft run`: runs an unmodified program under a policy."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.output import check_distinct, check_output, check_output_folder, say
from weft.errors import UnavailableError, UsageError
from weft.policy import Policy

if TYPE_CHECKING:
    from weft.cli.run_report import JobOptions, ReportOptions
    from weft.shim.inject import TraceRequest
    from weft.tuning.live.starts import Memory

MOST_BUDGET = 0.5
TRACE_STEPS, TRACE_AFTER = 3, 10


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD…", help="The program and its arguments.")
    ] = None,
    policy_file: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="A policy file (JSON).")
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(metavar="high", help="Place blocks of collectives before pending compute blocks."),
    ] = None,
    residency: Annotated[
        int | None, typer.Option(metavar="N", help="Limit compute kernels to N resident blocks per SM.")
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(
            metavar="always|overlap", help="Limit residency always, or only while a collective is in flight."
        ),
    ] = None,
    head_start: Annotated[
        str | None,
        typer.Option(
            metavar="US|placed",
            help="Delay compute after a collective's launch by this many microseconds (try 5), or "
            "`placed`: until its blocks are placed.",
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Try policies during the first steps of a PyTorch job, and keep one that is proven faster.",
        ),
    ] = False,
    tune_budget: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --tune: share of the steps for checks and further searches; default: 0.05.",
        ),
    ] = None,
    tune_once: Annotated[
        bool, typer.Option("--tune-once", help="With --tune: do not watch the job after the search.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --tune: write a page with step times and candidates."),
    ] = None,
    stats_file: Annotated[
        Path | None,
        typer.Option("--stats", metavar="FILE", help="Write launch statistics of all processes as JSON."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="DIR", help="Write a trace of some steps of each rank, for `weft analyze`."
        ),
    ] = None,
    trace_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            metavar="N",
            help="With --trace: steps to trace (seconds, if the program has no steps); default: 3.",
        ),
    ] = None,
    trace_after: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="M",
            help="With --trace: steps before the trace begins (seconds, if the program has no steps); "
            "default: 10.",
        ),
    ] = None,
    steps: Annotated[
        bool,
        typer.Option(
            "--steps", help="Record step times of PyTorch programs for `weft top`, even without NCCL."
        ),
    ] = False,
    ops: Annotated[
        bool,
        typer.Option(
            "--ops",
            help="Fuse collectives of tensor-parallel PyTorch models with the matmuls next to them, where "
            "that should be faster.",
        ),
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve metrics for Prometheus; default HOST: 127.0.0.1."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no lines but errors.")] = False,
) -> None:
    """Run an unmodified program and its children under a policy.

    Exit code and signals are the program's own. The program may be a launcher, such as torchrun.

    weft run --priority high --head-start 5 -- torchrun --nproc-per-node 8 train.py

    weft run --tune -- torchrun --nproc-per-node 8 train.py

    weft run --trace traces -- torchrun --nproc-per-node 8 train.py
    """
    _check_platform()
    from weft.cli.run_report import JobOptions, ReportOptions
    from weft.monitor.exporter import metrics_address
    from weft.shim.apply import not_applied

    if not command:
        raise UsageError(
            "no command: put the program after `--`, as in `weft run --priority high -- torchrun train.py`"
        )
    policy = _policy(policy_file, priority=priority, residency=residency, when=when)
    policy = _with_head_start(policy, head_start)
    address = None if metrics is None else metrics_address(metrics, os.environ)
    budget = _tune_budget(tune, tune_budget, tune_once)
    _check_outputs(policy_file, stats_file, html, tune)
    if ops:
        _check_replacing()
    request = _trace_request(trace, trace_steps, trace_after)
    if trace is not None:
        check_output_folder("--trace", trace)
    for line in not_applied(policy, framework=True):
        say(line, quiet=False)
    start = _settle_start(command, policy, tune, quiet)
    asked = JobOptions(
        command=command,
        policy=start.policy,
        earlier=start.earlier,
        variables={**budget, **_start_environment(start.chosen)},
        trace=request,
        count_steps=steps or address is not None,
        replacing=ops,
        metrics=address,
    )
    _run_job(asked, ReportOptions(stats_file=stats_file, html=html, traces=trace, quiet=quiet))


def _trace_request(folder: Path | None, steps: int | None, after: int | None) -> TraceRequest | None:
    from weft.shim.inject import TraceRequest

    given = {"--trace-steps": steps, "--trace-after": after}
    if folder is None:
        if needless := next((name for name, value in given.items() if value is not None), ""):
            raise UsageError(f"{needless} needs --trace DIR, the folder for the traces")
        return None
    return TraceRequest(TRACE_STEPS if steps is None else steps, TRACE_AFTER if after is None else after)


@dataclass(frozen=True)
class _Start:
    """Policy and settings of this start of the program: live tuning tries some settings once per start."""

    policy: Policy
    earlier: Memory | None
    chosen: dict[str, str]


def _settle_start(command: list[str], policy: Policy, tune: bool, quiet: bool) -> _Start:
    from weft.tuning.live.start_trial import CTA_VARIABLE, configured
    from weft.tuning.live.starts import Memory

    if not tune:
        return _Start(policy, None, {})
    fixed = {*os.environ, *configured(os.environ), *([CTA_VARIABLE] if policy.max_ctas is not None else [])}
    earlier = Memory(command, fixed=fixed)
    chosen = earlier.begin()
    if CTA_VARIABLE in chosen:
        policy = dataclasses.replace(policy, max_ctas=int(chosen[CTA_VARIABLE]))
    say(earlier.problem, quiet)
    say(f"this start uses {_as_settings(chosen)}" if chosen else "", quiet)
    return _Start(policy, earlier, chosen)


def _run_job(asked: JobOptions, wanted: ReportOptions) -> None:
    """Run the program to its end, report, and exit with its status."""
    from weft.cli.run_report import report_job
    from weft.monitor.exporter import Exporter
    from weft.shim import launch
    from weft.shim.inject import Job, check_preload

    with ExitStack() as held:
        mask = launch.hold_signals()  # a signal that ended weft now would leave the job's folder behind
        held.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        job = held.enter_context(
            Job(
                asked.policy,
                tune=asked.tune,
                trace=asked.trace,
                command=asked.command,
                steps=asked.count_steps,
                ops=asked.replacing,
            )
        )
        say(job.problem, wanted.quiet)
        env = {**job.environment(launch.original_environment()), **asked.variables}
        check_preload(env)
        exporter = None
        if asked.metrics is not None:
            exporter = Exporter(job.folder, asked.metrics)
            held.callback(exporter.stop)
            say(f"metrics: http://{asked.metrics}/metrics", wanted.quiet)
        kept = _kept_descriptors(wanted.stats_file)
        status = launch.run(asked.command, env, mask, keep=kept, now_and_then=job.keep_alive)
        held.pop_all()  # from here on the exit status is the program's, even if something fails
    launch.end(status, lambda: report_job(job, exporter, asked, wanted, status))


def _check_platform() -> None:
    if sys.platform != "linux":
        raise UnavailableError(
            "weft run needs Linux, whose loader preloads the shim; analyze, plan and report work here"
        )


def _policy(path: Path | None, **given: Any) -> Policy:
    base = Policy.load(path) if path else Policy()
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})


def _with_head_start(policy: Policy, given: str | None) -> Policy:
    """The policy with the head start of the command line: microseconds, or `placed`."""
    if given is None:
        return policy
    if given == "placed":
        bound_us = policy.head_start_us if policy.head_start == "placed" else 0.0
        return dataclasses.replace(policy, head_start="placed", head_start_us=bound_us)
    try:
        us = float(given)
    except ValueError:
        raise UsageError(f"--head-start {given!r} is neither microseconds nor `placed`; try 5") from None
    return dataclasses.replace(policy, head_start=None, head_start_us=us)


def _check_replacing() -> None:
    """Refuse a value of the environment variable that the job's processes would ignore."""
    from weft.shim.inject import BY_PICK, OPS_VARIABLE, REPLACE_ALL

    wanted = os.environ.get(OPS_VARIABLE) or BY_PICK
    if wanted not in (BY_PICK, REPLACE_ALL):
        raise UsageError(f"{OPS_VARIABLE}={wanted} is not known; use {BY_PICK} or {REPLACE_ALL}")


def _tune_budget(tune: bool, share: float | None, once: bool) -> dict[str, str]:
    """Environment variables that limit the steps live tuning may use after the search."""
    if not tune and (once or share is not None):
        raise UsageError("--tune-budget and --tune-once go with --tune: add it")
    if share is not None and not 0 <= share <= MOST_BUDGET:
        raise UsageError(f"--tune-budget {share:g} is not a share; give 0 to {MOST_BUDGET:g}, such as 0.05")
    return {"WEFT_TUNE_BUDGET": "0" if once else f"{share:g}"} if once or share is not None else {}


def _as_settings(chosen: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in chosen.items())


def _start_environment(chosen: dict[str, str]) -> dict[str, str]:
    """Settings of this start as environment variables of the program; CTAs are part of the policy instead."""
    from weft.tuning.live.start_trial import CTA_VARIABLE, GIVEN_VARIABLE

    rest = {name: value for name, value in chosen.items() if name != CTA_VARIABLE}
    return {**rest, GIVEN_VARIABLE: _as_settings(rest)} if rest else {}


def _check_outputs(policy_file: Path | None, stats_file: Path | None, html: Path | None, tune: bool) -> None:
    """Reject an output that cannot be written, before hours of training."""
    if html is not None and not tune:
        raise UsageError("--html is the page of live tuning: add --tune")
    check_distinct({"--stats": stats_file, "--html": html})
    for option, path in (("--stats", stats_file), ("--html", html)):
        check_output(option, path)
        if policy_file is not None and path is not None and path.exists() and policy_file.samefile(path):
            raise UsageError(f"{option} {path} is the policy file: name another file")


def _kept_descriptors(stats_file: Path | None) -> tuple[int, ...]:
    """Descriptor 1 if the statistics go to standard output; it must stay open. Else a reader must see the
    program close it, so weft does not keep it."""
    try:
        same = stats_file is not None and os.path.samestat(stats_file.stat(), os.fstat(1))
    except OSError:
        same = False
    return (1,) if same else ()
