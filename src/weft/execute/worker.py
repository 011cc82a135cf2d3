"""An executor in a separate process under the shim, so that a hang or a crash costs only one measurement.

The two sides exchange JSON lines over dedicated pipes, so that the output of libraries does not interfere.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from weft import errors
from weft.execute import base, spans
from weft.policy import Policy
from weft.timeline import Timeline
from weft.workload import Workload

CUDA_FACTORY = "weft.execute.cuda:CudaExecutor"
START_DEADLINE_S = 180.0
RUN_DEADLINE_S = 60.0
LOG_CHARACTERS = 6000
"""Characters of a worker's output that are kept."""
PR_SET_PDEATHSIG = 1
_KINDS: dict[str, type[errors.WeftError]] = {
    kind.__name__: kind
    for module in (errors, base)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, errors.WeftError)
}

# After these errors the GPU context may be unusable, so the worker is replaced.
_BROKEN = ("WeftError", "WorkerDiedError", "WrongResultError")

# If inherited, these limits would override those of each communicator.
_CTA_VARIABLES = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")


def worker_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment: several ranks per GPU, a queue per stream, and the NCCL of WEFT_NCCL."""
    env = {k: v for k, v in inherited.items() if k not in _CTA_VARIABLES}
    env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    # Streams that share a hardware queue block each other; the lab has more than the default 8 queues.
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    nccl = env.get("WEFT_NCCL")
    if nccl:  # torch and the lab must use the same one
        env["LD_PRELOAD"] = ":".join(part for part in (env.get("LD_PRELOAD"), os.path.realpath(nccl)) if part)
    return env


class RemoteExecutor:
    """Proxy of an executor in a worker process; restarts the worker after a hang or a crash."""

    def __init__(
        self,
        factory: str = CUDA_FACTORY,
        *,
        options: Mapping[str, Any] | None = None,
        deadline_s: float = RUN_DEADLINE_S,
        start_deadline_s: float = START_DEADLINE_S,
        under_shim: bool = True,
    ) -> None:
        self._factory, self._options = factory, dict(options or {})
        self._deadline_s, self._start_deadline_s = deadline_s, start_deadline_s
        self._under_shim = under_shim
        self._resources = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Any = None
        self._asks_plugin = False
        self.restarts = 0
        self.log = ""
        """The end of the output of the last worker that was stopped."""
        try:
            hello = self._start()
        except BaseException:
            self.close()
            raise
        self.device: str = hello["device"]
        self.simulated: bool = hello["simulated"]
        self._info: dict[str, Any] = hello["info"]

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> base.PipelineSample:
        """Run the pipeline once in the worker."""
        answer = self._ask("measure", workload, policy, mode)
        return base.PipelineSample(answer["ms"], answer["facts"])

    def timeline(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Timeline:
        """Run the pipeline once in the worker and record its timeline."""
        return spans.timeline_from_dict(self._ask("timeline", workload, policy, mode))

    def info(self) -> dict[str, Any]:
        """The machine and the versions, as the worker reported them."""
        return self._info

    def shim_stats(self) -> dict[str, Any]:
        """The shim's counters in this worker; empty without the shim."""
        return self._job.collect() if self._job is not None and self._process is not None else {}

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            _close_quietly(self._requests)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self._stop()

    def __enter__(self) -> RemoteExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, op: str, workload: Workload, policy: Policy, mode: str) -> dict[str, Any]:
        if policy.comm_rules and not self._asks_plugin:
            self.close()  # NCCL looks for a tuner plugin only once, so restart
            self._asks_plugin = True
            self._start()
        if self._process is None:
            self._start()
            self.restarts += 1
        request = {"op": op, "workload": workload.to_dict(), "policy": policy.to_dict(), "mode": mode}
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except OSError:
            self._fail_dead(f"{workload}")
        return self._answer(self._deadline_s, f"{workload} ({policy}, {mode})")

    def _start(self) -> dict[str, Any]:
        env = worker_environment(os.environ)
        if self._under_shim:
            from weft.shim import apply
            from weft.shim.inject import Job

            self._job = self._resources.enter_context(Job())
            env = self._job.environment(apply.tuner_environment(env) if self._asks_plugin else env)
        request_read, request_write = os.pipe()
        answer_read, answer_write = os.pipe()
        # From here on a failure must not leak a pipe, a folder or a process.
        self._requests: IO[bytes] = os.fdopen(request_write, "wb")
        self._resources.callback(_close_quietly, self._requests)
        self._resources.callback(os.close, answer_read)
        self._errors = self._resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        try:
            pipes = (str(request_read), str(answer_write))
            options = json.dumps(self._options)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft.execute.worker", self._factory, options, *pipes],
                env=_with_package(env),
                pass_fds=(request_read, answer_write),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # so that its children can be killed with it
            )
        finally:
            os.close(request_read)
            os.close(answer_write)
        self._answers, self._pending = answer_read, b""
        return self._answer(self._start_deadline_s, "the worker's start")

    def _answer(self, deadline_s: float, what: str) -> dict[str, Any]:
        line = self._read_line(time.monotonic() + deadline_s)
        if line is None:
            self._stop()
            raise base.HungError(f"{what}: not finished after {deadline_s:.0f} s; the worker was killed")
        if not line:
            self._fail_dead(what)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            if answer["error"] in _BROKEN:
                self._stop()
            raise _KINDS.get(answer["error"], errors.WeftError)(answer["message"])
        return answer

    def _read_line(self, until: float) -> bytes | None:
        """The next line; b"" at the end of the pipe; None at the deadline."""
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._answers, 1 << 16)
            if not data:
                return b""
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _fail_dead(self, what: str) -> None:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(10) if self._process else None
        self._stop()
        words = self.log.splitlines()
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        raise base.WorkerDiedError(
            f"{what}: the worker exited with {how}: {words[-1] if words else 'no message'}"
        )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process is not None:
            self._errors.seek(0)
            self.log = self._errors.read().decode(errors="replace").strip()[-LOG_CHARACTERS:]
        self._resources.close()


def _with_package(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with this weft on the module path, even if it runs from a source tree."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    return {**env, "PYTHONPATH": ":".join(part for part in (source, env.get("PYTHONPATH")) if part)}


def _close_quietly(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        pipe.close()


def serve_requests(make: Callable[[], Any], requests: IO[bytes], answers: IO[bytes]) -> None:
    """Handle requests until the other side closes the pipe."""

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document).encode() + b"\n")
        answers.flush()

    try:
        executor = make()
        answer({"device": executor.device, "simulated": executor.simulated, "info": executor.info()})
    except Exception as error:
        answer(_problem(error))
        return
    for line in requests:
        request = json.loads(line)
        workload = Workload.from_dict(request["workload"])
        policy = Policy.from_dict(request["policy"])
        try:
            if request["op"] == "timeline":
                answer(spans.timeline_to_dict(executor.timeline(workload, policy, request["mode"])))
            else:
                sample = executor.measure(workload, policy, request["mode"])
                answer({"ms": sample.ms, "facts": dict(sample.facts)})
        except Exception as error:
            answer(_problem(error))
    # Exit without freeing GPU resources, which could wait for a hung collective.
    os._exit(0)


def _problem(error: Exception) -> dict[str, Any]:
    """The answer for an error. Prints the traceback of an unexpected error to the worker's log."""
    if isinstance(error, errors.WeftError):
        return {"error": type(error).__name__, "message": str(error)}
    traceback.print_exc()
    first = next(iter(str(error).strip().splitlines()), "")
    return {"error": "WorkerDiedError", "message": f"{type(error).__name__}: {first}"}


def worker_main() -> None:
    """Entry point of the worker process."""
    factory, options, requests, answers = sys.argv[1:5]
    if sys.platform == "linux":
        # A worker whose parent was killed must not keep the GPU.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    module, _, name = factory.partition(":")

    def make() -> Any:
        return getattr(importlib.import_module(module), name)(**json.loads(options))

    with os.fdopen(int(requests), "rb") as read, os.fdopen(int(answers), "wb") as write:
        serve_requests(make, read, write)


if __name__ == "__main__":
    worker_main()
