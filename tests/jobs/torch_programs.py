"""Runs Python programs as forks of a process that has imported torch: the import takes longer than most of them.

    python torch_programs.py    reads a program per line as JSON; answers with its process, and with its exit code

A program differs from one started by itself only in what is fixed when torch is imported: one OpenMP thread.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from forked import run_program, run_to_end

_started: list[subprocess.Popen[str]] = []


def run_torch_program(
    command: Sequence[object], env: Mapping[str, str], output: Path, errors: Path, *, timeout_s: float
) -> int:
    """Run `python COMMAND…` with this environment; its exit code. Its process group is killed at the end."""
    asked = {
        "command": [str(word) for word in command],
        "env": dict(env),
        "folder": str(Path.cwd()),
        "files": [str(output), str(errors)],
    }
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        program = int(server.stdout.readline())
        late = threading.Timer(timeout_s, _end_group, [program])
        late.start()
        try:
            code = int(server.stdout.readline())
        finally:
            _end_group(program)
            late.cancel()
    except BaseException:  # a rerun of the test starts another server
        _stop()
        raise
    return code


def _server() -> subprocess.Popen[str]:
    if not _started or _started[0].poll() is not None:
        _started[:] = [
            subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        ]
        atexit.register(_stop)
    return _started[0]


def _stop() -> None:
    while _started:
        with _started.pop() as server:
            server.kill()


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def be_program(asked: dict) -> None:
    """Run the program in this fork as the leader of a process group, and exit."""
    descriptors = [os.open(os.devnull, os.O_RDONLY)]
    descriptors += [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in asked["files"]]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    run_to_end(lambda: run_program(asked["command"]))


def main() -> None:
    import torch._dynamo  # what programs of these tests import, or torch imports late
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.nn.parallel

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            be_program(asked)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
