"""`weft run --trace`: a trace of each process, which `weft analyze` reads as the GPU ran it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from building import HERE, compile_c
from test_nccl_routes import fake_nccl  # noqa: F401 (fixture)

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


@pytest.fixture
def trace_run(environment, tmp_path):
    """Runs Python source, or a command, under `weft run --trace`; returns the traces by file name."""

    def run(program, *options, env=None):
        out = tmp_path / "traces"
        command = [sys.executable, "-c", textwrap.dedent(program)] if isinstance(program, str) else program
        weft = [sys.executable, "-m", "weft", "run", "--trace", str(out), *options, "--", *command]
        done = subprocess.run(
            weft,
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return {path.name: json.loads(path.read_text()) for path in sorted(out.iterdir())}, done

    return run


TIMED = f"""
from tracer_driver import *
import time
gemm, comm = kernel("gemm"), kernel("{NCCL}")
cost("gemm", 1000, sms=100)
cost("{NCCL}", 700, sms=8)
launch(gemm, stream=0x10)
until = time.monotonic() + 2.5
while time.monotonic() < until:
    launch(gemm, stream=0x10)
    launch(comm, grid=8, stream=0x20)
    sync()
    time.sleep(0.01)
"""


def test_a_program_without_steps_is_traced_by_time(trace_run, tmp_path):
    traces, done = trace_run(TIMED, "--trace-after", "0", "--trace-steps", "1", env={"RANK": "3"})
    assert list(traces) == ["weft.rank3.json"]
    assert "weft analyze" in done.stderr
    trace = traces["weft.rank3.json"]
    assert trace["distributedInfo"]["rank"] == 3
    assert trace["weft"]["steps"] is None
    assert 0.9 < trace["weft"]["seconds"] < 2.5
    kernels = [e for e in trace["traceEvents"] if e["cat"] == "kernel"]
    assert {e["name"] for e in kernels} == {"gemm", NCCL}
    gemm = next(e for e in kernels if e["name"] == "gemm")
    assert gemm["args"]["grid"] == [100_000, 1, 1]
    assert gemm["args"]["block"] == [128, 1, 1]
    assert gemm["args"]["registers per thread"] == 32
    assert next(e for e in kernels if e["name"] == NCCL)["args"]["CTAs"] == 8


def test_a_program_that_ends_first_is_traced_until_its_end(trace_run):
    traces, _ = trace_run(TIMED.replace("2.5", "1.0"), "--trace-after", "0", "--trace-steps", "100")
    (trace,) = traces.values()
    assert any(e["name"] == "gemm" for e in trace["traceEvents"])


def test_a_program_that_ends_before_is_not_traced(trace_run):
    traces, done = trace_run(TIMED.replace("2.5", "0.2"), "--trace-after", "5")
    assert traces == {}
    assert "nothing was traced" in done.stderr


def test_a_program_without_python_is_traced(trace_run, fake_driver, tmp_path):
    program = tmp_path / "hammer"
    compile_c(program, str(HERE / "hammer.c"), f"-L{fake_driver}", "-lcuda", "-lpthread")
    traces, _ = trace_run([str(program), "2", "3000000"], "--trace-after", "0", "--trace-steps", "1")
    (trace,) = traces.values()
    assert sum(e["cat"] == "kernel" for e in trace["traceEvents"]) > 100


STEPS = """
import sys, types
from tracer_driver import *
sys.path.append(next(p for p in sys.path if "autoload" in p) if any("autoload" in p for p in sys.path) else "")
hooks = {}
class Handle:
    id = 0
    def remove(self): hooks.clear()
def register(hook):
    hooks[0] = hook
    return Handle()
optimizer = types.ModuleType("torch.optim.optimizer")
optimizer.register_optimizer_step_post_hook = register
optimizer._global_optimizer_post_hooks = hooks
torch = types.ModuleType("torch")
torch.compiler = types.SimpleNamespace(is_compiling=lambda: False)
dist = types.ModuleType("torch.distributed")
dist.is_available = lambda: False
torch.distributed = dist
modules = {"torch": torch, "torch.distributed": dist, "torch.optim": types.ModuleType("torch.optim")}
sys.modules.update({**modules, "torch.optim.optimizer": optimizer})
import weft_autoload
weft_autoload.start()
gemm, comm = kernel("gemm"), kernel("%s")
cost("gemm", 1000, sms=100)
cost("%s", 700, sms=8)
for step in range(20):
    for i in range(3):
        launch(gemm, stream=0x10)
        launch(comm, grid=8, stream=0x20)
    if step == 19:
        sync()
    for hook in list(hooks.values()):
        hook("optimizer", (), {})
    library().fake_host(ctypes.c_int64(10_000_000))
""" % (NCCL, NCCL)


def test_the_steps_of_torch_are_found(trace_run):
    traces, _ = trace_run(STEPS, "--trace-after", "8", "--trace-steps", "4")
    (trace,) = traces.values()
    assert trace["weft"]["steps"] == 4
    marks = [e["name"] for e in trace["traceEvents"] if e["cat"] == "user_annotation"]
    assert marks == [f"ProfilerStep#{i}" for i in range(4)]
    kernels = [e["name"] for e in trace["traceEvents"] if e["cat"] == "kernel"]
    assert (kernels.count("gemm"), kernels.count(NCCL)) == (12, 12)


def independent(trace):
    """Compute, communication and overlap by a sweep over all edges, in ns."""
    edges = []
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel":
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            kind = "comm" if event["name"] == NCCL else "compute"
            edges += [(start, 1, kind), (end, -1, kind)]
    running, spent, last = {"comm": 0, "compute": 0}, {"comm": 0, "compute": 0, "both": 0}, 0
    for at, change, kind in sorted(edges):
        for which in ("comm", "compute"):
            spent[which] += (at - last) if running[which] else 0
        spent["both"] += (at - last) if all(running.values()) else 0
        running[kind] += change
        last = at
    return spent


def test_analyze_reads_what_was_traced(trace_run, tmp_path, environment):
    traces, _ = trace_run(STEPS, "--trace-after", "6", "--trace-steps", "5", env={"RANK": "0", "WORLD_SIZE": "2"})
    done = subprocess.run(
        [sys.executable, "-m", "weft", "analyze", "--json", str(tmp_path / "traces" / "weft.rank0.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (rank,) = json.loads(done.stdout)["ranks"]
    expected = independent(traces["weft.rank0.json"])
    assert rank["rank"] == 0
    assert rank["comm_us"] == pytest.approx(expected["comm"] / 1e3, abs=1)
    assert rank["compute_us"] == pytest.approx(expected["compute"] / 1e3, abs=1)
    assert rank["overlap_us"] == pytest.approx(expected["both"] / 1e3, abs=1)
    assert rank["exposed_comm_us"] == pytest.approx((expected["comm"] - expected["both"]) / 1e3, abs=1)


def test_collectives_carry_their_sizes_and_communicators(trace_run, fake_nccl, environment):  # noqa: F811
    path = f"{fake_nccl}:{environment['LD_LIBRARY_PATH']}"
    traces, _ = trace_run(
        f"""
from tracer_driver import *
from nccl_driver import *
import ctypes, time
n = Nccl()
comm = n.init(2, 1)
kernels = {{name: kernel(name) for name in ("ncclDevKernel_AllReduce", "ncclDevKernel_AllGather")}}
# The fake NCCL launches nothing: launch what it would have, from inside the call.
tracer.start()
tracer.drop()
inside = ctypes.CDLL(None)
def collective(name, count, dtype, stream, operation):
    inside.weft_nccl_test = None
    n.lib  # the call itself
""",
        env={"LD_LIBRARY_PATH": path},
    )
    assert traces == {}


def test_a_folder_that_cannot_be_written_is_refused_at_once(environment, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    weft = [sys.executable, "-m", "weft", "run", "--trace", str(blocked / "x"), "--", "true"]
    done = subprocess.run(weft, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--trace" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
