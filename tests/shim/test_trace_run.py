"""`weft run --trace`: each process writes a trace; `weft analyze` of it matches what the GPU ran."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from itertools import dropwhile, pairwise

import pytest
from building import HERE, compile_c

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
ctypes.CDLL(None).weft_trace_set_clock(None)  # by real time
gemm, comm = kernel("gemm"), kernel("{NCCL}")
cost("gemm", 1000, sms=100)
cost("{NCCL}", 700, sms=8)
launch(gemm, stream=0x10)
def work():
    launch(gemm, stream=0x10)
    launch(comm, grid=8, stream=0x20)
    sync()
    time.sleep(0.01)
"""
UNTIL_TRACED = """
state = ctypes.CDLL(None).weft_trace_state
while state() == 0:
    work()
while state() != 0:
    work()
work()
"""
FROM_THE_TRACE_ON = """
while ctypes.CDLL(None).weft_trace_state() == 0:
    work()
for _ in range(5):
    work()
"""


def test_a_program_without_steps_is_traced_by_time(trace_run, tmp_path):
    traces, done = trace_run(
        TIMED + UNTIL_TRACED, "--trace-after", "0", "--trace-steps", "1", env={"RANK": "3"}
    )
    assert list(traces) == ["weft.rank3.json"]
    assert "weft analyze" in done.stderr
    trace = traces["weft.rank3.json"]
    assert trace["distributedInfo"]["rank"] == 3
    assert trace["weft"]["steps"] is None
    assert trace["weft"]["seconds"] > 0.9
    kernels = [e for e in trace["traceEvents"] if e["cat"] == "kernel"]
    assert {e["name"] for e in kernels} == {"gemm", NCCL}
    gemm = next(e for e in kernels if e["name"] == "gemm")
    assert gemm["args"]["grid"] == [100_000, 1, 1]
    assert gemm["args"]["block"] == [128, 1, 1]
    assert gemm["args"]["registers per thread"] == 32
    assert next(e for e in kernels if e["name"] == NCCL)["args"]["CTAs"] == 8


def test_a_program_that_ends_first_is_traced_until_its_end(trace_run):
    traces, _ = trace_run(TIMED + FROM_THE_TRACE_ON, "--trace-after", "0", "--trace-steps", "100")
    (trace,) = traces.values()
    assert any(e["name"] == "gemm" for e in trace["traceEvents"])


def test_a_program_that_ends_before_is_not_traced(trace_run):
    traces, done = trace_run(TIMED + "work()", "--trace-after", "100")
    assert traces == {}
    assert "nothing was traced" in done.stderr


def test_a_program_without_python_is_traced(trace_run, fake_driver, tmp_path):
    source = tmp_path / "plain.c"
    source.write_text("""
        #define _GNU_SOURCE
        #include "cuda_api.h"
        #include <dlfcn.h>
        #include <unistd.h>
        CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                CUstream, void **, void **);
        void *fake_kernel(const char *, int, int, int);
        int main(void) {
            CUfunction gemm = fake_kernel("gemm", 32, 0, 0);
            int (*state)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "weft_trace_state");
            for (int begun = 0; !begun || state(); begun |= state()) {
                if (cuLaunchKernel(gemm, 64, 1, 1, 128, 1, 1, 0, (CUstream)0x10, NULL, NULL))
                    return 1;
                usleep(5000);
            }
            return 0;
        }
    """)
    program = compile_c(tmp_path / "plain", str(source), f"-L{fake_driver}", "-lcuda", "-ldl")
    traces, _ = trace_run([str(program)], "--trace-after", "0", "--trace-steps", "1")
    (trace,) = traces.values()
    assert sum(e["cat"] == "kernel" for e in trace["traceEvents"]) > 1


STEPS = """
import sys, types
from tracer_driver import *
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
torch.compiler = types.SimpleNamespace(is_dynamo_compiling=lambda: False)
dist = types.ModuleType("torch.distributed")
dist.is_available = lambda: False
torch.distributed = dist
modules = {"torch": torch, "torch.distributed": dist, "torch.optim": types.ModuleType("torch.optim")}
sys.modules.update({**modules, "torch.optim.optimizer": optimizer})
import weft_autoload
weft_autoload.start()
gemm, comm = kernel("gemm"), kernel("COLLECTIVE")
cost("gemm", 1000, sms=100)
cost("COLLECTIVE", 700, sms=8)
for step in range(20):
    for i in range(3):
        launch(gemm, stream=0x10)
        launch(comm, grid=8, stream=0x20)
    if step == 19:
        sync()
    for hook in list(hooks.values()):
        hook(optimizer, (), {})
    host(10_000)
""".replace("COLLECTIVE", NCCL)


def test_the_steps_of_torch_are_found(trace_run):
    traces, _ = trace_run(STEPS, "--trace-after", "8", "--trace-steps", "4")
    (trace,) = traces.values()
    assert trace["weft"]["steps"] == 4
    marks = [e["name"] for e in trace["traceEvents"] if e["cat"] == "user_annotation"]
    assert marks == [f"ProfilerStep#{i}" for i in range(4)]
    kernels = [e["name"] for e in trace["traceEvents"] if e["cat"] == "kernel"]
    assert (kernels.count("gemm"), kernels.count(NCCL)) == (12, 12)


def independent(trace):
    """Compute, communication and overlap in ns, computed independently by a sweep over all edges."""
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
    traces, _ = trace_run(
        STEPS, "--trace-after", "6", "--trace-steps", "5", env={"RANK": "0", "WORLD_SIZE": "2"}
    )
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


LAUNCHING = """
from tracer_driver import *
from ctypes import byref, c_size_t
import time
n = ctypes.CDLL("libnccl.so.2")
n.fake_launch_with(ctypes.cast(library().cuLaunchKernel, c_void_p), kernel("ncclDevKernel_Generic"))
class Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)
unique = Id()
n.ncclGetUniqueId(byref(unique))
world, pair = c_void_p(), c_void_p()
n.ncclCommInitRank(byref(world), 4, unique, 2)
unique.internal = b"other"
n.ncclCommInitRank(byref(pair), 2, unique, 0)
BFLOAT16, FLOAT = 9, 7
def step():
    n.ncclAllReduce(None, None, c_size_t(1000), BFLOAT16, 0, world, c_void_p(0x20))
    n.ncclAllGather(None, None, c_size_t(100), FLOAT, pair, c_void_p(0x30))
    n.ncclReduceScatter(None, None, c_size_t(50), FLOAT, 0, pair, c_void_p(0x30))
    n.ncclGroupStart()
    for i in range(3):
        n.ncclAllReduce(None, None, c_size_t(10), FLOAT, 0, world, c_void_p(0x20))
    n.ncclAllGather(None, None, c_size_t(7), FLOAT, pair, c_void_p(0x30))
    n.ncclGroupEnd()
def work():
    step()
    sync()
    time.sleep(0.01)
"""


def test_collectives_carry_their_sizes_and_communicators(trace_run, environment, tmp_path):
    flags = ("-shared", "-fPIC", "-Wl,-soname,libnccl.so.2")
    compile_c(tmp_path / "libnccl.so.2", *flags, str(HERE / "launching_nccl.c"))
    path = f"{tmp_path}:{environment['LD_LIBRARY_PATH']}"
    options = ("--trace-after", "0", "--trace-steps", "1")
    traces, _ = trace_run(
        LAUNCHING + UNTIL_TRACED, *options, env={"LD_LIBRARY_PATH": path, "RANK": "2", "WORLD_SIZE": "4"}
    )
    trace = traces["weft.rank2.json"]
    kernels = [e["args"] for e in trace["traceEvents"] if e["cat"] == "kernel"]
    # The trace may begin between an NCCL call and its kernel: nothing is known about that call.
    found = list(dropwhile(lambda args: "Collective name" not in args, kernels))
    names = (
        "Collective name",
        "In msg nelems",
        "Out msg nelems",
        "dtype",
        "Group size",
        "calls",
        "Rank in group",
    )
    told = [tuple(args[name] for name in names) for args in found]
    step = [
        ("all_reduce", 1000, 1000, "BFloat16", 4, 1, 2),
        ("all_gather", 100, 200, "Float", 2, 1, 0),
        ("reduce_scatter", 100, 50, "Float", 2, 1, 0),
        ("all_reduce", 30, 30, "Float", 4, 3, 2),
        ("all_gather", 7, 14, "Float", 2, 1, 0),
    ]
    whole = told[told.index(step[0]) :]
    assert len(whole) >= len(step)
    assert whole == (step * len(whole))[: len(whole)]
    groups = {args["Process Group Name"] for args in found}
    assert len(groups) == 2
    assert trace["distributedInfo"] == {"backend": "nccl", "pg_count": 2, "rank": 2, "world_size": 4}


def test_a_folder_that_cannot_be_written_is_refused_at_once(environment, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    weft = [sys.executable, "-m", "weft", "run", "--trace", str(blocked / "x"), "--", "true"]
    done = subprocess.run(weft, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--trace" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_program_that_cannot_be_started_leaves_no_folder(environment, tmp_path):
    out = tmp_path / "traces"
    weft = [sys.executable, "-m", "weft", "run", "--trace", str(out), "--", "/no/such/program"]
    done = subprocess.run(weft, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert not out.exists()


REAL_TORCH = f"""
import torch
from tracer_driver import *
gemm, comm = kernel("gemm"), kernel("{NCCL}")
cost("gemm", 100, sms=100)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    launch(gemm, stream=0x10)
    launch(comm, grid=8, stream=0x20)
    sync()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_steps_of_the_real_torch_are_traced(trace_run):
    pytest.importorskip("torch")
    traces, _ = trace_run(REAL_TORCH, "--trace-after", "8", "--trace-steps", "3")
    (trace,) = traces.values()
    assert trace["weft"]["steps"] == 3
    kernels = [e["name"] for e in trace["traceEvents"] if e["cat"] == "kernel"]
    assert (kernels.count("gemm"), kernels.count(NCCL)) == (3, 3)
    assert trace["weft"]["stamps"] == 3


GRAPH = f"""
from tracer_driver import *
gemm, comm = kernel("gemm"), kernel("{NCCL}")
graph, ready = c_void_p(), c_void_p()
assert call("cuStreamBeginCapture_v2", c_void_p(0x10), 0) == 0
launch(gemm, stream=0x10)
launch(comm, grid=8, stream=0x10)
assert call("cuStreamEndCapture", c_void_p(0x10), ctypes.byref(graph)) == 0
assert call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0)) == 0
assert tracer.start()
launch(gemm, stream=0x10)
for i in range(2):
    assert call("cuGraphLaunch", ready, c_void_p(0x10)) == 0
sync()
assert tracer.finish()
"""


def test_analyze_warns_of_graphs_with_collectives(trace_run, tmp_path, environment):
    trace_run(GRAPH)
    command = [sys.executable, "-m", "weft", "analyze", "--json", *map(str, (tmp_path / "traces").iterdir())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (warning,) = json.loads(done.stdout)["warnings"]
    assert "2 launches of CUDA graphs with collectives are not counted" in warning


def test_times_in_a_trace_are_exact(trace_run):
    """Readers use doubles, which hold no nanoseconds next to the microseconds since 1970."""
    traces, _ = trace_run(TIMED + UNTIL_TRACED, "--trace-after", "0", "--trace-steps", "1")
    (trace,) = traces.values()
    streams = {}
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel":
            ends = event["ts"], event["ts"] + event["dur"]
            streams.setdefault(event["args"]["stream"], []).append(ends)
    for ends in streams.values():
        ends.sort()
        assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(ends))
    times = [event["ts"] for event in trace["traceEvents"]]
    assert all(abs(at * 1000 - round(at * 1000)) < 0.2 for at in times)
    assert trace["baseTimeNanoseconds"] > 10**18
