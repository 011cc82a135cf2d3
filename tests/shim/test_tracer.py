"""The shim's tracer against a simulated GPU that knows what really happened."""

from __future__ import annotations

import subprocess
from itertools import pairwise

import pytest
from building import HERE, compile_c

from weft.shim.inject import Job
from weft.shim.interval_sets import common, total, union_spans

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
CLOSE_NS = 6_000  # launch latency of an idle stream


@pytest.fixture
def traced(program):
    """Runs a traced program; returns the results that it printed."""

    def run(source, **options):
        return program("from tracer_driver import *\n" + source, **options).results

    return run


def compare(result, close_ns=CLOSE_NS):
    """Compare every span with the truth: ends exact, starts within the latency of a launch."""
    spans, truth = result["spans"], result["truth"]
    assert [s[:2] for s in spans] == [list(t[:2]) for t in truth]
    base = truth[0][3] - spans[0][3]
    for (name, _, start, end, _), (_, _, true_start, true_end) in zip(spans, truth, strict=True):
        assert abs(end + base - true_end) <= 100, name
        assert -2_000 <= true_start - (start + base) <= close_ns, name


def by_stream(spans):
    """Start and end of the spans of each stream, in order."""
    streams = {}
    for span in spans:
        streams.setdefault(span[1], []).append((span[2], span[3]))
    return {stream: sorted(mine) for stream, mine in streams.items()}


def test_kernels_of_a_busy_and_of_an_idle_stream(traced):
    result = traced("""
gemm, norm = kernel("gemm"), kernel("norm")
cost("gemm", 100)
cost("norm", 20)
before = left()
assert tracer.start()
for i in range(10):
    launch(gemm, stream=0x10)
    launch(norm, stream=0x10)
sync()
host(500)
launch(norm, stream=0x10)
sync()
tell(tracer.stop(), before=before)
""")
    compare(result)
    assert result["counters"]["skipped_fronts"] >= 15  # one event a kernel where the stream is busy
    assert result["left"] == result["before"] == [0, 0]


def test_a_collective_that_waits_for_sms_does_not_run(traced):
    result = traced(f"""
gemm, comm = kernel("gemm"), kernel("{NCCL}")
cost("gemm", 1000, sms=132)
cost("{NCCL}", 300, sms=8)
assert tracer.start()
launch(comm, grid=8, stream=0x20)   # placed at once: tells the latency
sync()
for i in range(3):
    launch(gemm, stream=0x10)
for i in range(3):
    launch(comm, grid=8, stream=0x20)
sync()
recording = tracer.stop()
profile = spans.span_profile(recording, 1)
tell(recording, profile=[profile.comm_ms, profile.exposed_ms], allowed=library().fake_timed_completions())
""")
    compare(result)
    assert result["allowed"] == 0  # the attribute's event has no timing
    truth = result["truth"]
    assert truth[4][2] - truth[1][2] > 2_900_000  # its stream was ready all the time
    assert result["profile"][0] == pytest.approx(1.2, abs=0.03)


def test_where_the_driver_refuses_launch_completion_events_all_goes_on(traced):
    result = traced(f"""
comm = kernel("{NCCL}")
fail("launch completion event", times=1)
assert tracer.start()
for i in range(3):
    assert launch(comm, grid=8, stream=0x20) == 0
sync()
tell(tracer.stop(), launched=[r["attributes"] for r in launched()])
""")
    compare(result, close_ns=50_000)  # two launches instead of one
    assert result["counters"]["placed_failures"] == 1
    assert result["launched"] == [0, 0, 0]
    assert {s[4] for s in result["spans"]} == {"stream ready"}


def test_a_stamp_is_as_large_as_a_cta_of_its_collective(traced):
    """It also has the collective's priority, so it cannot be placed where the collective was not."""
    result = traced(f"""
comm, small = kernel("{NCCL}", registers=96, static_shared=2048), kernel("{NCCL}_small")
cost("{NCCL}", 300, sms=8)
assert tracer.start()
launch_ex(comm, grid=8, threads=640, shared=40_000, stream=0x20, attributes=((4, 4, 1, 1), (PRIORITY, -2)))
launch(small, grid=8, threads=256, stream=0x20)
sync()
assert call("cuStreamBeginCapture_v2", c_void_p(0x20), 0) == 0
launch(comm, grid=8, threads=640, stream=0x20)
assert call("cuStreamEndCapture", c_void_p(0x20), ctypes.byref(c_void_p())) == 0
stamps = [r for r in records() if r["name"].startswith("weft_stamp") and r["threads"] > 1]
tell(tracer.stop(), stamps=stamps)
""")
    wide, narrow = result["stamps"]
    assert (wide["name"], narrow["name"]) == ("weft_stamp_wide", "weft_stamp")
    assert (wide["threads"], wide["shared"], wide["priority"]) == (640, 42_048, -2)
    assert (wide["grid"], wide["cluster"]) == (4, [4, 1, 1])
    assert (narrow["threads"], narrow["shared"], narrow["priority"]) == (256, 0, 0)
    assert (narrow["grid"], narrow["cluster"]) == (1, [0, 0, 0])
    assert 0x20 not in {stamp["stream"] for stamp in result["stamps"]}
    assert not any(stamp["captured"] for stamp in result["stamps"])
    assert result["counters"]["stamps"] == 2
    assert result["left"] == [0, 0]


def test_where_a_stamp_is_refused_the_stream_tells_the_start(traced):
    result = traced(f"""
comm = kernel("{NCCL}")
assert tracer.start()
fail("stamp", times=2)
for i in range(3):
    assert launch(comm, grid=8, stream=0x20) == 0
sync()
tell(tracer.stop(), launched=len(launched()))
""")
    compare(result)
    assert result["launched"] == 3
    assert [s[4] for s in result["spans"]] == ["stream ready", "stream ready", "events"]
    assert (result["counters"]["stamp_failures"], result["counters"]["stamps"]) == (2, 1)
    assert result["left"] == [0, 0]


@pytest.mark.parametrize("api", ["cuModuleLoadData", "cuFuncSetAttribute"])
def test_where_our_kernels_cannot_be_loaded_the_program_is_traced_without(traced, api):
    result = traced(f"""
gemm, comm = kernel("gemm"), kernel("{NCCL}")
fail("{api}", times=100)
assert tracer.start()
launch(comm, grid=8, stream=0x20)
launch(gemm, stream=0x10)
sync()
tell(tracer.stop())
""")
    compare(result)
    assert [s[4] for s in result["spans"]][:1] == ["stream ready"]
    assert result["counters"]["stamp_failures"] == 1
    assert result["left"] == [0, 0]


def test_streams_that_wait_for_each_other(traced):
    result = traced(f"""
gemm, comm = kernel("gemm"), kernel("{NCCL}")
cost("gemm", 200, sms=100)
cost("{NCCL}", 150, sms=8)
assert tracer.start()
for i in range(5):
    launch(gemm, stream=0x10)
    wait(0x20, new_event(0x10))
    launch(comm, stream=0x20)
    wait(0x10, new_event(0x20))
    launch(gemm, stream=0x10)
sync()
tell(tracer.stop())
""")
    compare(result)


def test_no_event_stands_between_programmatic_launches(traced):
    source = """
first, second = kernel("split_k"), kernel("reduce")
cost("split_k", 50)
cost("reduce", 50)
def pair():
    launch(first, stream=0x10)
    dependent(second, stream=0x10)
{learn}
assert tracer.start()
for i in range(4):
    pair()
    launch(kernel("other"), stream=0x10)
sync()
tell(tracer.stop())
"""
    result = traced(source.format(learn="tracer.watch_tracer(); pair(); tracer.unwatch(); sync()"))
    assert result["broken"] == 0
    assert [s[4] for s in result["spans"]] == ["chain", "chain", "events"] * 4
    ends = [t[3] for t in result["truth"] if t[0] != "split_k"][1:]
    assert [s[3] - result["spans"][1][3] for s in result["spans"] if s[0] != "split_k"] == pytest.approx(
        [end - ends[0] for end in ends], abs=20
    )
    result = traced(source.format(learn=""))
    assert result["broken"] == 1  # the first of its kind, which could not be foreseen
    assert result["counters"]["pdl_splits"] == 1


def test_a_kernel_that_precedes_programmatic_launches_may_also_stand_alone(traced):
    result = traced("""
first, second = kernel("split_k"), kernel("reduce")
cost("split_k", 50)
assert tracer.start()
launch(first, stream=0x10)
dependent(second, stream=0x10)
sync()
for i in range(3):
    launch(first, stream=0x10)
    sync()
    host(300)          # the stream is idle long before the next operation
tell(tracer.stop())
""")
    alone = [s for s in result["spans"] if s[0] == "split_k"]
    assert [round((s[3] - s[2]) / 1000) for s in alone][1:] == pytest.approx([52, 52, 52], abs=4)


def test_copies_and_fills(traced):
    result = traced("""
gemm = kernel("gemm")
assert tracer.start()
launch(gemm, stream=0x10)
copy("cuMemcpyHtoDAsync_v2", 0x20000, 0x100, 40_000, 0x10)
copy("cuMemcpyAsync", 0x100, 0x20000, 30_000, 0x30)
copy("cuMemcpyDtoDAsync_v2", 0x9000000, 0x20000, 20_000, 0x30)
copy("cuMemcpyDtoHAsync_v2", 0x100, 0x20000, 10_000, 0x30)
assert library().cuMemsetD8Async(c_void_p(0x20000), 0, ctypes.c_size_t(5_000), c_void_p(0x30)) == 0
to, sizes = (c_void_p * 2)(0x20000, 0x9000000), (ctypes.c_size_t * 2)(15_000, 1_000)
batch = (to, (c_void_p * 2)(0x20000, 0x20000), sizes, ctypes.c_size_t(2), None, None, ctypes.c_size_t(0))
assert library().cuMemcpyBatchAsync_v2(*batch, c_void_p(0x30)) == 0
sync()
recording = tracer.stop()
tell(recording, kinds=[[s.kind, s.raw.bytes] for s in spans.spans_of(recording)])
""")
    for (name, _, start, end, _), truth in zip(result["spans"], result["truth"], strict=True):
        assert end - start == pytest.approx(truth[3] - truth[2], abs=CLOSE_NS), name
    assert [s[0] for s in result["spans"]] == [
        "gemm",
        "Memcpy HtoD",
        "Memcpy DtoH",
        "Memcpy PtoP",
        "Memcpy DtoH",
        "Memset (Device)",
        "Memcpy PtoP",
    ]
    assert result["kinds"] == [
        ["compute", 0],
        ["memory", 40_000],
        ["memory", 30_000],
        ["comm", 20_000],
        ["memory", 10_000],
        ["memory", 5_000],
        ["comm", 16_000],
    ]


GRAPH = f"""
gemm, comm = kernel("gemm"), kernel("{NCCL}")
graph, executable = c_void_p(), c_void_p()
def capture(*kernels):
    assert call("cuStreamBeginCapture_v2", c_void_p(0x10), 0) == 0
    for one in kernels:
        assert launch(one, stream=0x10) == 0
    assert call("cuStreamEndCapture", c_void_p(0x10), ctypes.byref(graph)) == 0
    assert call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, c_uint64(0)) == 0
def replay():
    assert call("cuGraphLaunch", executable, c_void_p(0x10)) == 0
"""


def test_a_graph_is_one_span_with_its_kernels(traced):
    result = traced(
        GRAPH
        + """
capture(gemm, gemm)
assert tracer.start()
capture(gemm, gemm, gemm)
for i in range(3):
    replay()
launch(gemm, stream=0x10)
sync()
recording = tracer.stop()
profile = spans.span_profile(recording, 1)
tell(recording, launches=profile.launches, exposed=profile.exposed_ms, unsafe=library().fake_unsafe_calls())
"""
    )
    assert [s[0] for s in result["spans"]] == ["CUDA graph (3 kernels)"] * 3 + ["gemm"]
    assert result["launches"] == {"gemm": 10}
    assert result["exposed"] == 0
    assert result["captured_events"] == 0
    assert result["counters"]["captured"] == 3
    assert result["unsafe"] == 0
    assert [s[3] - s[2] for s in result["spans"]][:3] == pytest.approx([50_000] * 3, abs=CLOSE_NS)


def test_overlap_in_a_graph_with_collectives_is_unknown(traced):
    result = traced(
        GRAPH
        + """
capture(gemm, comm)
assert tracer.start()
replay()
sync()
recording = tracer.stop()
profile = spans.span_profile(recording, 1)
tell(recording, profile=[profile.comm_ms, profile.exposed_ms], launches=profile.launches)
"""
    )
    assert result["profile"] == [None, None]
    assert result["launches"] == {"gemm": 1, NCCL: 1}


@pytest.mark.parametrize("api", ["cuEventCreate", "cuStreamCreateWithPriority"])
def test_where_no_event_can_be_had_the_program_goes_on(traced, api):
    result = traced(f"""
gemm = kernel("gemm")
fail("{api}", times=100_000)
assert tracer.start()
for i in range(300):
    assert launch(gemm, stream=0x10) == 0
sync()
tell(tracer.stop(), launches=len(launched()))
""")
    assert result["launches"] == 300
    assert result["spans"] == []
    assert result["counters"]["event_failures"] > 0
    assert result["left"] == [0, 0]


def test_where_events_run_out_spans_are_lost_and_nothing_else(traced):
    result = traced("""
gemm = kernel("gemm")
assert tracer.start()
fail("cuEventCreate", times=100_000)
for i in range(4000):
    assert launch(gemm, stream=0x10) == 0
sync()
tell(tracer.stop(), launches=len(launched()))
""")
    assert result["launches"] == 4000
    assert 1000 < len(result["spans"]) < 4000
    assert result["counters"]["event_failures"] > 1000
    assert result["left"] == [0, 0]


def test_events_that_cannot_be_recorded_cost_their_spans_only(traced):
    result = traced("""
gemm = kernel("gemm")
assert tracer.start()
launch(gemm, stream=0x10)
fail("cuEventRecord", times=2)
for i in range(5):
    assert launch(gemm, stream=0x10) == 0
sync()
tell(tracer.stop(), launches=len(launched()))
""")
    assert result["launches"] == 6
    assert 4 <= len(result["spans"]) <= 5
    assert result["counters"]["event_failures"] == 2


def test_a_launch_that_fails_is_no_span(traced):
    result = traced("""
gemm = kernel("gemm")
assert tracer.start()
launch(gemm, stream=0x10)
fail("cuLaunchKernel")
assert launch(gemm, stream=0x10) == 1
launch(gemm, stream=0x10)
sync()
tell(tracer.stop())
""")
    compare(result)
    assert len(result["spans"]) == 2


def test_a_context_that_is_destroyed_while_it_is_traced(traced):
    result = traced("""
gemm = kernel("gemm")
assert tracer.start()
for i in range(3):
    launch(gemm, stream=0x10)
assert call("cuCtxDestroy_v2", c_void_p(0x1000)) == 0
tell(tracer.stop())
""")
    assert result["spans"] == []
    assert result["dead_calls"] == 0  # nothing of a context is touched after it is gone
    assert result["counters"]["contexts_gone"] == 1


def test_nothing_is_left_and_nothing_is_done_when_it_is_off(traced):
    result = traced("""
gemm = kernel("gemm")
def run():
    before = library().fake_event_calls()
    for i in range(100):
        launch(gemm, stream=0x10)
    sync()
    return library().fake_event_calls() - before
off = run()
shown = []
for i in range(3):
    assert tracer.start()
    assert not tracer.start()
    on = run()
    recording = tracer.stop()
    shown.append([on > 100, len(recording.spans), run(), left()])
assert tracer.start()
run()
tracer.drop()
import resource
def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit, MIB = resource.getrlimit(resource.RLIMIT_AS), 1 << 20
refused, grown, room = 0, 0, 8
while room < 1024:  # of address space: enough for none, for one and then for both of the tracer's reservations
    before = mapped()
    resource.setrlimit(resource.RLIMIT_AS, (before + room * MIB, limit[1]))
    started = tracer.start()
    grown = max(grown, mapped() - before) if not started else grown
    resource.setrlimit(resource.RLIMIT_AS, limit)
    if started:
        break
    refused, room = refused + 1, room + 1
tracer.drop()
tell(recording, off=off, shown=shown, again=[run(), left(), tracer.stop() is None],
     refused=refused, grown=grown // MIB)
""")
    assert result["refused"] > 8
    assert result["grown"] <= 1  # a trace that could not begin leaves nothing behind
    assert result["off"] == 0
    assert result["shown"] == [[True, 100, 0, [0, 0]]] * 3
    assert result["again"] == [0, [0, 0], True]


def test_a_fork_traces_nothing(traced):
    result = traced("""
import os
gemm = kernel("gemm")
assert tracer.start()
launch(gemm, stream=0x10)
child = os.fork()
if child == 0:
    before = library().fake_event_calls()
    ok = launch(gemm, stream=0x10) == 0 and library().fake_event_calls() == before and not tracer.recording()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
launch(gemm, stream=0x10)
sync()
tell(tracer.stop())
""")
    assert len(result["spans"]) == 2


def test_many_threads_on_streams_of_their_own(traced):
    result = traced("""
gemm = kernel("gemm")
assert tracer.start()
def work(stream):
    for i in range(200):
        launch(gemm, stream=stream)
threads = [threading.Thread(target=work, args=(0x100 + 16 * i,)) for i in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
sync()
recording = tracer.stop()
tell(recording)
""")
    assert len(result["spans"]) == 1600
    spans, truth = by_stream(result["spans"]), by_stream(result["truth"])
    assert spans.keys() == truth.keys()
    assert {len(mine) for mine in spans.values()} == {200}
    pairs = [pair for stream in spans for pair in zip(spans[stream], truth[stream], strict=True)]
    base = max(true_end - end for (_, end), (_, true_end) in pairs)
    # Calls of other threads may come between a launch and the event behind it, which then fires later, but always
    # before the stream's next kernel.
    for stream, mine in spans.items():
        assert all(end <= start + 20 for (_, end), (start, _) in pairwise(mine))
        for (_, end), (_, true_end), (next_start, _) in zip(
            mine, truth[stream], truth[stream][1:], strict=False
        ):
            assert true_end <= end + base <= next_start + 20


def test_steps_are_counted_and_kernels_described(traced):
    result = traced("""
gemm = kernel("gemm", registers=64, static_shared=1024)
assert tracer.start()
for step in range(3):
    for i in range(step + 1):
        launch(gemm, grid=10, threads=256, shared=2048, stream=0x10)
    tracer.mark()
sync()
recording = tracer.stop()
raw = recording.spans[0]
tell(recording, steps=[s.step for s in recording.spans], marks=len(recording.marks),
     raw=[list(raw.grid), list(raw.block), raw.shared, raw.static_shared, raw.registers, raw.blocks_per_sm])
""")
    assert result["steps"] == [0, 1, 1, 2, 2, 2]
    assert result["marks"] == 3
    assert result["raw"] == [[10, 1, 1], [256, 1, 1], 2048, 1024, 64, 4]


@pytest.fixture
def hammered(environment):
    def run(program, *arguments):
        with Job() as job:
            env = {**job.environment(environment), "ASAN_OPTIONS": "verify_asan_link_order=0"}
            if "sanitized" in str(program):
                del env["LD_PRELOAD"]
            done = subprocess.run(
                [program, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
            )
            assert (done.returncode, done.stderr) == (0, "")

    return run


def test_traces_come_and_go_under_many_threads(hammered, fake_driver, tmp_path):
    shim = HERE.parents[1] / "src/weft/shim/libweft_shim.so"
    links = (f"-L{fake_driver}", "-lcuda", str(shim), "-lpthread")
    hammered(compile_c(tmp_path / "hammer", str(HERE / "tracer_hammer.c"), *links), "6", "12")


def test_sanitizers_find_nothing_in_the_tracer(hammered, sanitized, fake_driver, tmp_path):
    program = tmp_path / "sanitized-hammer"
    hammered(sanitized(program, str(HERE / "tracer_hammer.c"), f"-L{fake_driver}", "-lcuda"), "4", "5")


def test_kernels_shorter_than_their_launch(traced):
    """Their end events fire on submission; a few launches that are held back reveal the durations."""
    result = traced("""
tiny, small = kernel("tiny"), kernel("small")
cost("tiny", 0.4)
cost("small", 0.8)
assert tracer.start()
for i in range(400):
    launch(tiny, stream=0x10)
    host(4)
    launch(small, stream=0x10)
    host(4)
sync()
tell(tracer.stop())
""")
    for name, true_ns in (("tiny", 400), ("small", 800)):
        found = [s for s in result["spans"] if s[0] == name]
        assert len(found) == 400
        assert sum(s[3] - s[2] for s in found) == pytest.approx(400 * true_ns, rel=0.1)
    assert 4 <= result["counters"]["stalls"] <= 20
    starts = [t[2] for t in result["truth"]]
    assert [s[2] for s in result["spans"]] == pytest.approx([t - starts[0] for t in starts], abs=4_000)


@pytest.mark.parametrize("gap_us", [0, 2.4])
def test_what_events_cost_is_subtracted(traced, gap_us):
    """A kernel starts some time after the event before it; this gap is measured at the start of a trace."""
    result = traced(f"""
library().fake_event_gap(ctypes.c_int64(int({gap_us} * 1000)))
one, two = kernel("one"), kernel("two")
cost("one", 20)
cost("two", 9)
assert tracer.start()
for i in range(50):
    launch(one, stream=0x10)
    launch(two, stream=0x10)
sync()
recording = tracer.stop()
tell(recording, calibrated=list(recording.header.calibrated_ns))
""")
    spin, twice, stamp, nothing = result["calibrated"]
    assert (twice - spin, nothing) == (6_000, 0)
    assert stamp - 620 == spin - 6_620 == gap_us * 1_000
    found = sum(s[3] - s[2] for s in result["spans"])
    true = sum(t[3] - t[2] for t in result["truth"])
    assert found == pytest.approx(true, rel=0.01)


def exposed_and_overlapped(rows):
    """Exposed and overlapped time in ns of rows (name, stream, start, end, …)."""
    comm = union_spans((row[2], row[3]) for row in rows if row[0] == NCCL)
    compute = union_spans((row[2], row[3]) for row in rows if row[0] != NCCL)
    both = common(comm, compute)
    return total(comm) - both, both


@pytest.mark.parametrize(("usual_us", "during_comm_us"), [(2.6, 5.2), (0, 4)])
def test_exposed_time_where_events_cost_more_than_on_an_idle_gpu(traced, usual_us, during_comm_us):
    """Events cost more while the host submits and while collectives load memory; empty kernels measure it.

    The spans describe the traced steps; the profile says what is exposed without the tracer.
    """
    result = traced(f"""
library().fake_event_gap(ctypes.c_int64(2400))
library().fake_kernel_gap(ctypes.c_int64(1000))
names = [f"part{{i}}" for i in range(5)]
parts = [kernel(name) for name in names]
for name, us in zip(names, (22, 35, 9, 60, 14)): cost(name, us, sms=20)
comm = kernel("{NCCL}")
cost("{NCCL}", 280, sms=16)
def steps():
    library().fake_event_load(
        ctypes.c_int64({int(usual_us * 1000)}), ctypes.c_int64({int(during_comm_us * 1000)})
    )
    for step in range(12):
        for i in range(20):
            launch(parts[(i + step) % 5], stream=0x10)
            if i % 10 == 4:
                wait(0x20, new_event(0x10))
                launch(comm, grid=16, stream=0x20)
    sync()
steps()
untraced = truths()
library().fake_event_load(ctypes.c_int64(0), ctypes.c_int64(0))
assert tracer.start()
steps()
recording = tracer.stop()
profile = spans.span_profile(recording, 1)
tell(recording, launched=len(launched()), untraced=untraced, profile=[profile.comm_ms, profile.exposed_ms])
""")
    untraced = result["untraced"]
    found = exposed_and_overlapped(result["spans"])
    true = exposed_and_overlapped(result["truth"][len(untraced) :])
    assert true[0] > 0.05 * sum(true)
    assert found == pytest.approx(true, rel=0.03)
    exposed, overlapped = exposed_and_overlapped(untraced)
    assert true[0] > 1.2 * exposed  # the tracer's own effect on the steps
    comm_ms, exposed_ms = result["profile"]
    assert 1e6 * exposed_ms == pytest.approx(exposed, abs=0.03 * (exposed + overlapped))
    assert 1e6 * comm_ms == pytest.approx(exposed + overlapped, rel=0.03)
    assert result["counters"]["probes"] >= 20
    assert result["launched"] == 2 * 12 * 22


def test_kernels_of_an_idle_stream_while_a_collective_runs(traced):
    result = traced(f"""
part, comm = kernel("part"), kernel("{NCCL}")
cost("part", 30, sms=20)
cost("{NCCL}", 3000, sms=16)
assert tracer.start()
library().fake_event_load(ctypes.c_int64(0), ctypes.c_int64(4000))
launch(comm, grid=16, stream=0x20)
for i in range(40):
    launch(part, stream=0x10)
    host(50)
sync()
tell(tracer.stop())
""")
    found, true = (
        sum(row[3] - row[2] for row in rows if row[0] == "part")
        for rows in (result["spans"], result["truth"])
    )
    assert found == pytest.approx(true, rel=0.05)  # 12% without probes
    assert 3 <= result["counters"]["probes"] <= 20


def test_bytes_copied_from_the_host_are_counted_for_live_tuning(program):
    done = program("""
    from tracer_driver import *
    from weft.shim import binding
    copied = binding.copied_bytes()
    launch(kernel("gemm"))
    copy("cuMemcpyHtoDAsync_v2", 0x20000, 0x100, 40_000, 0x10)
    copy("cuMemcpyHtoDAsync_v2_ptsz", 0x20000, 0x100, 2_000, 0x10)
    copy("cuMemcpyDtoHAsync_v2", 0x100, 0x20000, 10_000, 0x10)
    copy("cuMemcpyDtoDAsync_v2", 0x9000000, 0x20000, 20_000, 0x10)
    assert copied() == 42_000
    """)
    assert done.stats["copied_bytes"] == 42_000


def test_a_copy_that_fails_and_copies_before_the_first_launch_are_passed_on(program):
    done = program("""
    from tracer_driver import *
    copy("cuMemcpyHtoDAsync_v2", 0x20000, 0x100, 40_000, 0x10)
    launch(kernel("gemm"))
    fail("cuMemcpyHtoDAsync_v2", 1, 719)
    assert copy("cuMemcpyHtoDAsync_v2", 0x20000, 0x100, 3_000, 0x10) == 719
    """)
    assert done.stats["copied_bytes"] == 0
