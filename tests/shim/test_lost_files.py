"""The job's files are truncated or removed while the program runs, and processes fork while a trace is written."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from building import HERE, ROOT

from weft.policy import Policy
from weft.shim.inject import Job

LOSE = """
import os, pathlib
from weft.shim.step_times import StepWriter
job, steps = pathlib.Path(os.environ["WEFT_JOB"]), StepWriter(0, 1)
kernels = [kernel(f"gemm{i}") for i in range(100)]
assert [launch(k) for k in kernels[:50]] == [0] * 50
steps.step()
files = [path for path in job.iterdir() if path.is_file()]
assert {"control", f"{os.getpid()}.0", f"steps.{os.getpid()}"} <= {path.name for path in files}
for path in files:
    LOST(path)
"""
GO_ON = """
assert [launch(k) for k in kernels] == [0] * 100
for _ in range(3):
    steps.step()
"""


def run(environment, source, policy=None):
    with Job(policy) as job:
        env = job.environment({**environment, "PYTHONPATH": f"{ROOT / 'src'}:{HERE}"})
        command = [sys.executable, "-c", "from driver import *\n" + source]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("lost", ["lambda path: os.truncate(path, 0)", "os.unlink"])
@pytest.mark.parametrize("policy", [None, Policy(residency=2, when="overlap", head_start_us=5)])
def test_the_program_runs_on_without_the_jobs_files(environment, lost, policy):
    done = run(environment, LOSE.replace("LOST(", f"({lost})(") + GO_ON, policy)
    assert (done.returncode, done.stderr) == (0, "")


OWN = """
launch(kernel("gemm"))
import mmap, os, signal, tempfile
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    END
"""


@pytest.mark.parametrize("end", ["memory[0]", "os.kill(os.getpid(), signal.SIGBUS)"])
def test_a_bus_error_of_the_program_ends_it_as_natively(environment, end):
    source = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))" + OWN.replace("END", end)
    assert run(environment, source).returncode == -signal.SIGBUS


def test_a_child_of_a_process_that_writes_a_trace_ends(environment):
    """The parent's writer waits for the GPU; the child must not inherit its lock."""
    source = """
import os, signal
from ctypes import CDLL, c_double, c_int64
shim = CDLL(None)
library().fake_cost(b"slow", c_int64(10**18), 1)
k = kernel("slow")
assert shim.weft_trace_begin() == 0
launch(k, stream=0x10)
writer = threading.Thread(target=lambda: shim.weft_trace_finish(c_double(30)))
writer.start()
while shim.weft_trace_state() != 2:
    pass
child = os.fork()
if child == 0:
    signal.alarm(20)
    shim.weft_trace_finish(c_double(0))
    os._exit(0)
show(os.waitpid(child, 0)[1])
library().fake_host(c_int64(2 * 10**18))
writer.join()
"""
    done = run(environment, source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
