"""Starting programs under the shim: the job's folder, the environment, and what could keep it out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.errors import InputError, UnavailableError, UsageError
from weft.policy import Policy
from weft.shim import apply, binding, communicators, stats

LIBRARY = "libweft_shim.so"
PACKAGE = Path(__file__).parent.parent
AUTOLOAD = PACKAGE / "integrations" / "autoload"
PRELOAD_FAILURE = "cannot be preloaded"


TRACE_PATIENCE_S = 60.0
"""How long after the first launch a trace waits for a torch program's step to show itself."""


@dataclass(frozen=True)
class TraceRequest:
    """Which part of a program to trace: `steps` after `after` others; seconds where no step is known."""

    steps: int
    after: int


def library_path() -> Path:
    """The compiled shim; raises with the fix where it is missing."""
    path = Path(__file__).with_name(LIBRARY)
    if not path.is_file():
        raise UnavailableError(
            "the launch shim is not built on this machine: install a C compiler and reinstall weft "
            "(`weft doctor` shows what is missing)"
        )
    return path


def environment(policy: Policy, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what starts a program, and all its children, under the shim and this policy."""
    env = apply.start_environment(policy, base)
    env["LD_PRELOAD"] = ":".join(filter(None, (_preloadable(folder), env.get("LD_PRELOAD"))))
    env["WEFT_JOB"] = str(folder)
    return env


def tuning_environment(policy: Policy, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what makes torch, in this job only, load the part of weft that tunes it while it runs.

    The path goes to the end of PYTHONPATH, so that it hides nothing of the program's.
    """
    path = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {
        **base,
        "PYTHONPATH": os.pathsep.join([*path, str(AUTOLOAD)]),
        "WEFT_TUNE": "1",
        "WEFT_TUNE_HOME": str(PACKAGE.parent),
        "WEFT_TUNE_POLICY": json.dumps(policy.to_dict()),
        communicators.LIVE_VARIABLE: "1",
    }


def tracing_environment(trace: TraceRequest, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what makes the shim, and torch where there is one, record a trace in every process."""
    path = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(AUTOLOAD) not in path:
        path.append(str(AUTOLOAD))
    patience_s = float(base.get("WEFT_TRACE_PATIENCE_S", TRACE_PATIENCE_S))
    return {
        **base,
        "PYTHONPATH": os.pathsep.join(path),
        "WEFT_TUNE_HOME": str(PACKAGE.parent),
        "WEFT_TRACE": f"{trace.after} {trace.steps} {patience_s}",
    }


def _preloadable(folder: Path) -> str:
    """The shim by a name that LD_PRELOAD can hold: it separates by spaces and colons, and knows no quotes."""
    library = library_path()
    if not any(character.isspace() or character == ":" for character in str(library)):
        return str(library)
    return shutil.copy(library, str(folder))


def check_preload(env: Mapping[str, str]) -> None:
    """Refuse now what the loader would only mumble about: a preloaded library that is missing or unfit."""
    true = shutil.which("true") or "/bin/true"
    checked = {**env, "LC_ALL": "C"}
    checked.pop("WEFT_JOB", None)
    done = subprocess.run([true], env=checked, stderr=subprocess.PIPE, check=False, timeout=60)
    for line in done.stderr.decode(errors="replace").splitlines():
        if PRELOAD_FAILURE in line:
            name = line.split("object '", 1)[-1].split("'", 1)[0]
            if name.endswith(LIBRARY):
                raise UnavailableError(
                    f"the launch shim cannot be loaded here: {line}; reinstall weft on this machine"
                )
            raise UsageError(f"LD_PRELOAD names {name}, which cannot be loaded: correct or unset LD_PRELOAD")


class Job:
    """A folder that a program and its children share with weft while they run; removed at the end."""

    def __init__(
        self, policy: Policy | None = None, *, tune: bool = False, trace: TraceRequest | None = None
    ) -> None:
        self.policy, self.tune, self.trace = policy or Policy(), tune, trace

    def __enter__(self) -> Job:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="weft-"))
        except OSError as error:
            raise UnavailableError(f"cannot make a temporary folder: {error.strerror}; set TMPDIR") from None
        (self.folder / "control").write_bytes(binding.control_image(self.policy))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment that starts a program in this job."""
        env = environment(self.policy, self.folder, os.environ if base is None else base)
        env = tuning_environment(self.policy, env) if self.tune else env
        return tracing_environment(self.trace, env) if self.trace else env

    def set_policy(self, policy: Policy) -> None:
        """Change the policy of every process of the job, while it runs."""
        binding.write_policy(self.folder / "control", policy)

    def collect(self) -> dict[str, Any]:
        """What was counted so far, in all processes."""
        return stats.collect(self.folder)


def attach(folder: str | os.PathLike[str]) -> Job:
    """A job that runs already, from outside: `folder` is WEFT_JOB in the environment of its processes."""
    job = Job()
    job.folder = Path(folder)
    if not (job.folder / "control").is_file():
        raise InputError(
            f"{job.folder} is not the folder of a running job; look for WEFT_JOB in /proc/PID/environ"
        )
    return job
