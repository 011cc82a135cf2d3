"""Starts programs under the shim: the job's folder, the environment, and a check that the shim loads."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.errors import InputError, UnavailableError
from weft.policy import Policy
from weft.shim import apply, binding, communicators, job_folder, policy_image, stats
from weft.shim.engine import engine_report, read_notes
from weft.shim.step_times import STEPS_VARIABLE

_log = logging.getLogger("weft.shim")

LIBRARY = "libweft_shim.so"
PACKAGE = Path(__file__).parent.parent
AUTOLOAD = PACKAGE / "integrations" / "autoload"
PRELOAD_FAILURE = "cannot be preloaded"


TRACE_PATIENCE_S = 60.0
"""How long after the first launch a trace waits for the first step of a torch program."""


@dataclass(frozen=True)
class TraceRequest:
    """The part of a program to trace: `steps` steps after the first `after`; seconds if steps are unknown."""

    steps: int
    after: int


def library_path() -> Path:
    """The compiled shim; if it is missing, raises an error that says how to fix it."""
    path = Path(__file__).with_name(LIBRARY)
    if not path.is_file():
        raise UnavailableError(
            "the launch shim is not built on this machine: install a C compiler and reinstall weft, "
            "or run `python hatch_build.py` in a checkout (`weft doctor` shows what is missing)"
        )
    return path


def environment(policy: Policy, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the variables that start a program and all its children under the shim and this policy."""
    env = apply.start_environment(policy, base)
    env["LD_PRELOAD"] = _preload(_preloadable(folder), env.get("LD_PRELOAD", ""))
    env["WEFT_JOB"] = str(folder)
    # A program built with AddressSanitizer refuses to start if another library precedes its runtime. The shim
    # defines nothing that the sanitizer intercepts, so their order does not matter.
    env["ASAN_OPTIONS"] = ":".join(filter(None, (env.get("ASAN_OPTIONS"), "verify_asan_link_order=0")))
    return env


TUNE_VARIABLE, APPLY = "WEFT_TUNE", "apply"
"""Environment variable: if set, torch loads live tuning; with the value APPLY, only to apply the policy."""


def tuning_environment(policy: Policy, base: Mapping[str, str], *, search: bool = True) -> dict[str, str]:
    """`base` plus the variables that make torch programs of this job load weft's live tuning.

    Without `search`, it only applies the framework controls of the policy.
    PYTHONPATH keeps its value, including empty entries (the current folder); weft's entry comes last.
    NCCL asks weft's tuner plugin, so that live tuning can try rules. If the job sets a CTA policy, it does
    not, because NCCL follows a CTA policy only in part when it has a plugin.
    """
    asked = search and not base.get("NCCL_CTA_POLICY")
    return {
        **(apply.tuner_environment(base) if asked else base),
        "PYTHONPATH": _with_autoload(base.get("PYTHONPATH", "")),
        TUNE_VARIABLE: "1" if search else APPLY,
        "WEFT_TUNE_HOME": str(PACKAGE.parent),
        "WEFT_TUNE_POLICY": json.dumps(policy.to_dict()),
        communicators.LIVE_VARIABLE: "1",
    }


def steps_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the variables that make torch programs publish steps for `weft top` and `--metrics`."""
    return {
        **base,
        "PYTHONPATH": _with_autoload(base.get("PYTHONPATH", "")),
        "WEFT_TUNE_HOME": str(PACKAGE.parent),
        STEPS_VARIABLE: "1",
    }


OPS_VARIABLE, BY_PICK, REPLACE_ALL = "WEFT_OPS", "pick", "all"
"""Environment variable: where `weft run --ops` uses fused operations. `pick` (the default): on GPUs where the
pick predicts a gain; `all`: everywhere, regardless of the gain (for tests)."""


def ops_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the variables that make torch programs use fused operations."""
    return {
        **base,
        OPS_VARIABLE: base.get(OPS_VARIABLE) or BY_PICK,
        "PYTHONPATH": _with_autoload(base.get("PYTHONPATH", "")),
        "WEFT_TUNE_HOME": str(PACKAGE.parent),
    }


def _with_autoload(path: str) -> str:
    if path.split(os.pathsep)[-1] == str(AUTOLOAD):
        return path
    return f"{path}{os.pathsep}{AUTOLOAD}" if path else str(AUTOLOAD)


def _preload(library: str, given: str) -> str:
    """`given` with the shim first; only once if one weft runs another."""
    others = [name for name in re.split("[ :]+", given) if name and name != library]
    return ":".join([library, *others])


def tracing_environment(trace: TraceRequest, base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the variables that make the shim, and torch if used, record a trace in every process."""
    patience_s = float(base.get("WEFT_TRACE_PATIENCE_S", TRACE_PATIENCE_S))
    return {
        **base,
        "PYTHONPATH": _with_autoload(base.get("PYTHONPATH", "")),
        "WEFT_TUNE_HOME": str(PACKAGE.parent),
        "WEFT_TRACE": f"{trace.after} {trace.steps} {patience_s}",
    }


def _preloadable(folder: Path) -> str:
    """A path of the shim that LD_PRELOAD can hold: the loader splits at spaces and colons, unquoted."""
    library = library_path()
    if not any(character.isspace() or character == ":" for character in str(library)):
        return str(library)
    if not folder.is_dir():
        raise UnavailableError(
            f"LD_PRELOAD cannot hold the path of the launch shim, {library.parent}, and no temporary folder "
            "can be written for a copy: set TMPDIR"
        )
    return shutil.copy(library, str(folder))


def check_preload(env: Mapping[str, str]) -> None:
    """Raise if the loader cannot load the shim. Errors about other libraries in LD_PRELOAD are ignored."""
    true = shutil.which("true") or "/bin/true"
    checked = {**env, "LC_ALL": "C"}
    checked.pop("WEFT_JOB", None)
    try:
        done = subprocess.run(
            [true],
            env=checked,
            stdin=subprocess.DEVNULL,  # other libraries in LD_PRELOAD may read and print
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.debug("cannot check LD_PRELOAD: %s", error)
        return
    for line in done.stderr.decode(errors="replace").splitlines():
        if PRELOAD_FAILURE in line and LIBRARY in line:
            raise UnavailableError(
                f"the launch shim cannot be loaded here: {line}; reinstall weft on this machine"
            )


class Job:
    """The folder that a program and its children share with weft while they run; removed at the end.

    If no folder can be written (a full or read-only disk), the policy is kept in memory: it still applies,
    but nothing is counted, and `problem` says so.
    """

    folder: Path
    problem: str = ""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        tune: bool = False,
        trace: TraceRequest | None = None,
        command: Sequence[str] = (),
        steps: bool = False,
        ops: bool = False,
    ) -> None:
        self.policy, self.tune, self.trace, self.steps = policy or Policy(), tune, trace, steps
        self.ops = ops
        self.command = tuple(command)
        self._lock = -1

    def __enter__(self) -> Job:
        image = policy_image.control_image(self.policy)
        description = {
            "version": 1,
            "pid": os.getpid(),
            "command": list(self.command),
            "started": time.time(),
            "policy": self.policy.to_dict(),
            "tune": self.tune,
        }
        try:
            self.folder, self._lock = job_folder.create(image, description)
        except OSError as error:
            self.folder, self._lock = job_folder.in_memory(image)
            holds = os.fstat(self._lock).st_size == len(image)
            self.problem = f"no temporary folder can be written ({error.strerror}): " + (
                "the policy holds, but nothing is counted; set TMPDIR"
                if holds
                else "no policy is in force and nothing is counted; raise the limit of file sizes (ulimit -f)"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder."""
        job_folder.remove(self.folder, self._lock)

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment that starts a program in this job."""
        env = environment(self.policy, self.folder, os.environ if base is None else base)
        if self.tune or self.policy.changes_models:
            env = tuning_environment(self.policy, env, search=self.tune)
        env = steps_environment(env) if self.steps else env
        env = ops_environment(env) if self.ops else env
        return tracing_environment(self.trace, env) if self.trace else env

    def set_policy(self, policy: Policy) -> None:
        """Change the policy of every process of the running job."""
        binding.write_policy(job_folder.control(self.folder), policy)

    def keep_alive(self) -> None:
        """Show cleaners of temporary files that the job still runs."""
        job_folder.touch(self.folder)

    def leave_outcome(self, counted: dict[str, Any]) -> None:
        """Publish the job's final figures for those who watch it; `counted` is as in `weft run --stats`."""
        facts = ("pid", "rank", "command", "launches", "comm_launches", "shaped", "comm_bytes")
        tuning = counted.get("tuning") or {}
        outcome = {
            "totals": {name: value for name, value in counted.items() if isinstance(value, int)},
            "processes": [{name: process[name] for name in facts} for process in counted["processes"]],
            "tuning": {name: tuning.get(name) for name in ("state", "text", "gain_pct", "facts")},
        }
        job_folder.leave_outcome(self.folder, outcome)

    def collect(self) -> dict[str, Any]:
        """The counters of all processes so far."""
        counted = stats.collect(self.folder)
        notes = read_notes(self.folder)
        return {**counted, "engine": engine_report(counted, self.policy.engine == "dma", notes)}


def attach(folder: str | os.PathLike[str]) -> Job:
    """A running job, seen from outside: `folder` is WEFT_JOB in the environment of its processes."""
    job = Job()
    job.folder = Path(folder)
    if not job_folder.control(job.folder).is_file():
        raise InputError(
            f"{job.folder} is not the folder of a running job; look for WEFT_JOB in /proc/PID/environ"
        )
    return job
