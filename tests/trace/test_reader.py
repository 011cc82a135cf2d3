"""Traces with known truth: every layout, clock and kind of communication gives exact figures."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from trace_building import BASE_NS, GEMM, NCCL, TraceBuilder, as_text, us_text, write_text

import weft
from weft.errors import InputError
from weft.timeline import Kind
from weft.trace import events, files, native, scan
from weft.trace.digits import UNKNOWN, nanoseconds
from weft.trace.kineto import read

COMM_NAMES = [
    NCCL,
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)",
    "void deep_ep::internode_ll::combine<true, 3, 7168, 9>(void*, void*)",
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)",
    "void deep_ep::internode::notify_dispatch<false, 1>(int const*)",
    "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "nvshmemi_transfer_allgather_kernel",
]
COMPUTE_NAMES = [
    GEMM,
    "void cub::DispatchReduce<float>::kernel(float*)",
    "void at::native::elementwise_kernel<dispatch_combine>(int)",
    "<script>alert(1)</script>",
    'quoted "name" with \\ and \u2028 and {braces}, {',
]


def random_trace(seed: int, spans: int = 300, **more) -> tuple[TraceBuilder, dict[str, set[int]]]:
    """Random spans and the nanoseconds that they cover, counted one by one as sets."""
    pick = random.Random(seed)
    built = TraceBuilder(**more)
    covered: dict[str, set[int]] = {"compute": set(), "comm": set(), "memory": set()}
    for _ in range(spans):
        start = pick.randrange(0, 40_000)
        end = start + pick.choice([0, 1, 7, 400, 999, 1_000, 1_001, pick.randrange(4_000)])
        kind = pick.choice(["compute", "compute", "comm", "peer", "memory"])
        if kind == "compute":
            built.gpu(pick.choice(COMPUTE_NAMES), start, end, stream=7, launch=start - 5_000)
        elif kind == "comm":
            built.gpu(pick.choice(COMM_NAMES), start, end, stream=20, launch=start - 9_000)
        elif kind == "peer":
            built.gpu("Memcpy PtoP (Device -> Device)", start, end, stream=21, cat="gpu_memcpy", bytes=4096)
            kind = "comm"
        else:
            name, cat = pick.choice(
                [("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"), ("Memset (Device)", "gpu_memset")]
            )
            built.gpu(name, start, end, stream=7, cat=cat)
        covered[kind].update(range(start, end))
    return built, covered


def check(trace, covered):
    figures = trace.timeline.figures()
    compute, comm, memory = (covered[k] for k in ("compute", "comm", "memory"))
    assert figures.compute_ns == len(compute)
    assert figures.comm_ns == len(comm)
    assert figures.overlap_ns == len(compute & comm)
    assert figures.exposed_ns == len(comm - compute)
    assert figures.memory_ns == len(memory)
    assert figures.idle_ns == figures.span_ns - len(compute | comm | memory)


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".json.zst"])
@pytest.mark.parametrize("seed", range(4))
def test_random_spans_are_exact_near_a_clock_of_17e14_us(tmp_path, suffix, seed):
    built, covered = random_trace(seed)
    (trace,) = read(built.write(tmp_path / f"t{suffix}"))
    check(trace, covered)
    assert trace.timeline.start_ns.min() >= BASE_NS


@pytest.mark.parametrize("indent", [None, 0, 3])
def test_layouts_of_json(tmp_path, indent):
    built, covered = random_trace(9)
    (trace,) = read(write_text(tmp_path / "t.json", built.text(indent)))
    check(trace, covered)


def test_a_bare_list_of_events(tmp_path):
    built, covered = random_trace(3)
    (trace,) = read(write_text(tmp_path / "rank5.json", as_text(built.events)))
    check(trace, covered)
    assert trace.rank == 5  # from the name of the file


def test_metadata_before_and_after_the_events(tmp_path):
    built, covered = random_trace(4, rank=3)
    document = built.document()
    turned = dict(reversed(document.items()))
    turned["more"] = [{"a": 1}, {"b": [{"c": "},{"}]}]
    (trace,) = read(write_text(tmp_path / "t.json", as_text(turned)))
    check(trace, covered)
    assert (trace.rank, trace.world_size, trace.device_name) == (3, 2, "NVIDIA H200")


@pytest.mark.parametrize("chunk", [64, 300, 1000, 4096])
def test_wherever_the_text_is_cut(tmp_path, monkeypatch, chunk):
    """Small pieces put cuts into strings and nested arrays that look like the end of an event."""
    monkeypatch.setattr(scan, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(files, "BLOCK_BYTES", chunk)
    built, covered = random_trace(5, spans=120)
    for event in built.events[::3]:
        event["args"]["odd"] = ["},{", {"x": [{"y": 1}, {"z": '"},{"'}]}, {}, {"},{": "]}"}]
    (trace,) = read(write_text(tmp_path / "t.json", built.text(None)))
    check(trace, covered)
    assert not trace.partial
    assert trace.events == len(built.events)


def test_four_microsecond_kernels_keep_their_nanoseconds(tmp_path):
    built = TraceBuilder()
    for i in range(1000):
        built.gpu(GEMM, i * 4_700, i * 4_700 + 4_013)
        built.gpu(NCCL, i * 4_700 + 2_000, i * 4_700 + 4_500, stream=20)
    (trace,) = read(built.write(tmp_path / "t.json.gz"))
    figures = trace.timeline.figures()
    assert figures.comm_ns == 1000 * 2_500
    assert figures.overlap_ns == 1000 * 2_013


def test_old_categories_and_integer_microseconds(tmp_path):
    old = [
        {"ph": "X", "cat": "Kernel", "name": NCCL, "pid": 0, "tid": "stream 20", "ts": 1_661_203_462_598_738,
         "dur": 10, "args": {"device": 0, "stream": 20, "correlation": 5, "external id": 4}},
        {"ph": "X", "cat": "Kernel", "name": GEMM, "pid": 0, "tid": "stream 7", "ts": 1_661_203_462_598_741,
         "dur": 4, "args": {"device": 0, "stream": 7, "correlation": 6}},
        {"ph": "X", "cat": "Memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": "stream 7",
         "ts": 1_661_203_462_598_700, "dur": 2, "args": {"device": 0, "stream": 7}},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": "2",
         "ts": 1_661_203_462_598_000, "dur": 3, "args": {"correlation": 5}},
        {"ph": "X", "cat": "Operator", "name": "ProfilerStep#3", "pid": 1, "tid": "2",
         "ts": 1_661_203_462_597_000, "dur": 4000, "args": {}},
    ]  # fmt: skip
    (trace,) = read(write_text(tmp_path / "t.json", json.dumps({"traceEvents": old})))
    figures = trace.timeline.figures()
    assert (figures.comm_ns, figures.overlap_ns, figures.memory_ns) == (10_000, 4_000, 2_000)
    assert [step.name for step in trace.steps] == ["ProfilerStep#3"]
    assert trace.launch_ns.max() == 1_661_203_462_598_000_000


def test_rocm_takes_shapes_from_the_launch(tmp_path):
    built = TraceBuilder(device_name="AMD Instinct MI300X")
    built.span(
        "kernel", "Cijk_gemm", 0, 5_000, pid=0, tid=0, device=0, stream=0, correlation=7, kind="Dispatch"
    )
    built.span(
        "cuda_runtime", "hipLaunchKernel", -900, -100, pid=1, tid=1, cid=107, correlation=7, grid=[304, 2, 1],
        block=[256, 1, 1], **{"shared memory": 1024},
    )  # fmt: skip
    built.span(
        "gpu_memcpy", "Memcpy PtoP (Device -> Device)", 0, 700, pid=0, tid=4, device=0, stream=4, kind="PtoP"
    )
    (trace,) = read(built.write(tmp_path / "t.json"))
    gemm = int(np.flatnonzero(trace.timeline.kind == Kind.COMPUTE)[0])
    taken = {key: int(column[gemm]) for key, column in trace.timeline.resources.items()}
    assert taken == {"blocks": 608, "threads": 256, "registers": -1, "shared_bytes": 1024, "bytes": -1}
    assert trace.timeline.figures().comm_ns == 700


def test_every_device_is_a_timeline_of_its_own(tmp_path):
    first, second = TraceBuilder(device=0), TraceBuilder(device=1)
    first.gpu(GEMM, 0, 100)
    second.gpu(NCCL, 0, 100, stream=20)
    document = first.document()
    document["traceEvents"] += second.events
    traces = read(write_text(tmp_path / "t.json", as_text(document)))
    assert [t.device for t in traces] == [0, 1]
    assert traces[1].timeline.figures().exposed_ns == 100


def test_sizes_from_the_kernel_the_call_or_the_annotation(tmp_path):
    built = TraceBuilder(world_size=4)
    built.collective(0, 1_000_000, elements=1 << 20, **{"Group size": 4})
    built.gpu("ncclDevKernel_AllGather_RING", 0, 2_000_000, stream=21, launch=50, **{"External id": 77})
    built.span(
        "cpu_op", "record_param_comms", 0, 100, pid=9, tid=1,
        **{"External id": 77, "Collective name": "_allgather_base", "In msg nelems": 1 << 18,
           "Out msg nelems": 1 << 20, "Group size": 4, "dtype": "Float"},
    )  # fmt: skip
    built.gpu("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 0, 4_000_000, stream=22, launch=5_050, thread=3)
    built.span(
        "user_annotation", "nccl:all_to_all", 5_000, 5_100, pid=9, tid=3,
        **{"Input Dims": [[8, 1024], [16]], "Input type": ["float", "float"]},
    )  # fmt: skip
    rows = {
        row["kind"]: row
        for row in weft.analyze(built.write(tmp_path / "t.json")).to_json()["ranks"][0]["collectives"]
    }
    assert rows["all_reduce"]["bytes"] == 2 << 20
    assert rows["all_reduce"]["busbw_gbps"] == pytest.approx((2 << 20) * 1.5 / 1e6, abs=1e-3)
    assert rows["all_gather"]["bytes"] == 4 << 20
    assert rows["all_gather"]["busbw_gbps"] == pytest.approx((4 << 20) * 0.75 / 2e6, abs=1e-3)
    assert rows["all_to_all"]["bytes"] == (8 * 1024 + 16) * 4
    assert rows["all_to_all"]["busbw_gbps"] == pytest.approx((8 * 1024 + 16) * 4 * 0.75 / 4e6, abs=1e-3)


def test_steps_share_the_timeline_out_and_the_last_one_counts(tmp_path):
    built = TraceBuilder()
    for step in range(5):
        at = step * 1_000_000
        built.step(step, at, at + 1_000_000)
        built.gpu(GEMM, at + 100_000, at + 700_000, launch=at + 10)
        built.gpu(NCCL, at + 600_000, at + 1_050_000, stream=20, launch=at + 20)
    rank = weft.analyze(built.write(tmp_path / "t.json")).to_json()["ranks"][0]
    assert [s["name"] for s in rank["steps"]] == [f"ProfilerStep#{i}" for i in range(5)]
    for step in rank["steps"]:
        assert (step["comm_us"], step["overlap_us"], step["exposed_comm_us"]) == (450.0, 100.0, 350.0)
    assert sum(s["exposed_comm_us"] for s in rank["steps"]) == rank["exposed_comm_us"]


def test_kernels_without_a_launch_in_the_trace_count(tmp_path):
    built = TraceBuilder()
    built.gpu(NCCL, 0, 500, stream=20, correlation=0)
    (trace,) = read(built.write(tmp_path / "t.json"))
    assert trace.timeline.figures().comm_ns == 500


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"1700000000123456.789", 1_700_000_000_123_456_789),
        (b"1700000000123456", 1_700_000_000_123_456_000),
        (b"0.001", 1),
        (b"0.5", 500),
        (b".5", 500),
        (b"-1.25", -1_250),
        (b"1e3", 1_000_000),
        (b"1.5E-3", 2),
        (b'"12.5"', 12_500),
        (b"0.0004", 0),
        (b"1e-400", 0),
        (b"9e99", UNKNOWN),
        (b"NaN", UNKNOWN),
        (b"null", UNKNOWN),
        (b"", UNKNOWN),
        (b"[1]", UNKNOWN),
        (b"9" * 5000, UNKNOWN),
        (b"4611686018427387.904", 1 << 62),
        (b"4611686018427387.905", UNKNOWN),
        (b"4611686018427388", UNKNOWN),
        (b"9223372036854775", UNKNOWN),
        (b"3999999999999999.999", 3_999_999_999_999_999_999),
        (b"1.2345", 1_235),
        (b"+1.000", 1_000),
        (b"1.5e3", 1_500_000),
        (b"1.0-1", UNKNOWN),
    ],
)
def test_digits(text, ns):
    assert nanoseconds([text]).tolist() == [ns]
    assert nanoseconds([text, b"1.000", b"2"]).tolist() == [ns, 1_000, 2_000]


def test_odd_types_do_not_hurt(tmp_path):
    built = TraceBuilder()
    built.gpu(NCCL, 0, 1_000, stream=20, **{"blocks per SM": "0.06", "shared memory": "119040", "Seq": "x"})
    built.gpu(GEMM, 0, 400, **{"registers per thread": 1e300, "bytes": [1], "grid": "none"})
    built.events[-1]["args"]["grid"] = [1 << 40, 1 << 40, 1]
    (trace,) = read(built.write(tmp_path / "t.json"))
    figures = trace.timeline.figures()
    assert (figures.comm_ns, figures.overlap_ns) == (1_000, 400)
    comm = trace.timeline.kind == Kind.COMM
    assert trace.timeline.resources["shared_bytes"][comm].tolist() == [119040]
    assert trace.timeline.resources["blocks"][~comm].tolist() == [-1]


def test_bare_nan_and_bad_utf8_as_profilers_write_them(tmp_path):
    built, covered = random_trace(6, spans=50)
    built.events[10]["args"]["memory bandwidth (GB/s)"] = "@inf@"
    built.events[20]["args"]["x"] = "@-nan@"
    built.events[30]["args"]["path"] = "BYTE"
    data = built.text().encode().replace(b'"BYTE"', b'"C:\\temp \xff"')
    (trace,) = read(write_text(tmp_path / "t.json", data))
    check(trace, covered)
    assert not trace.partial


def test_a_damaged_event_is_left_out_and_said_so(tmp_path):
    built = TraceBuilder()
    for i in range(5):
        built.gpu(NCCL, i * 1_000, i * 1_000 + 100, stream=20)
    text = built.text().replace('"stream": 20', '"stream" 20', 1)
    (trace,) = read(write_text(tmp_path / "t.json", text))
    assert trace.partial
    assert "1 damaged event" in trace.warnings[0]
    assert trace.timeline.figures().comm_ns == 400


def test_negative_durations_are_left_out_and_said_so(tmp_path):
    built = TraceBuilder()
    built.gpu(NCCL, 0, 1_000, stream=20)
    built.gpu(GEMM, 5_000, 4_000)
    (trace,) = read(built.write(tmp_path / "t.json"))
    assert trace.timeline.figures().comm_ns == 1_000
    assert len(trace.timeline) == 1
    assert "negative" in trace.warnings[0]


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".json.zst"])
def test_a_truncated_file_gives_what_it_has_and_says_so(tmp_path, suffix):
    built = TraceBuilder()
    pick = random.Random(1)
    for i in range(2_000):
        built.gpu(NCCL, i * 1_000, i * 1_000 + pick.randrange(500), stream=20, salt=pick.random())
    path = built.write(tmp_path / f"t{suffix}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    analysis = weft.analyze(path)
    assert analysis.partial
    assert analysis.to_json()["partial"] is True
    assert any("ends early" in w or "damaged" in w for w in analysis.warnings)
    assert 100 < len(analysis.timelines[0]) < 2_000


def test_decoding_keeps_a_bounded_part_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "CHUNK_BYTES", 10_000)
    sizes = []
    taken = events.Collector.take

    def take(self, buffer, low, high):
        sizes.append(len(buffer))
        return taken(self, buffer, low, high)

    monkeypatch.setattr(events.Collector, "take", take)
    monkeypatch.setattr(native, "library", lambda: None)
    built, covered = random_trace(8, spans=3_000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 10_000)
    (trace,) = read(built.write(tmp_path / "t.json"))
    check(trace, covered)
    assert max(sizes) < 40_000 < sum(sizes)


def test_no_gpu_activity_is_an_error_that_says_what_to_do(tmp_path):
    built = TraceBuilder()
    built.span("cpu_op", "aten::mm", 0, 100, pid=1, tid=1)
    with pytest.raises(InputError, match=r"no GPU activity.*ProfilerActivity\.CUDA"):
        read(built.write(tmp_path / "t.json"))


def test_the_time_text_of_the_builder():
    assert us_text(BASE_NS) == "1700000000123456.789"
    assert us_text(-1) == "-0.001"


@pytest.mark.parametrize(("compute", "comm"), [("stream 7", "stream 16"), (7, 16), ("Compute", "NCCL")])
def test_the_thread_names_the_stream_where_no_argument_does(tmp_path, compute, comm):
    """PyTorch 1.8 writes such traces. With all spans on one stream, the cause would be `same_stream`."""

    def span(name, thread, start, length):
        times = {"ts": start, "dur": length}
        return {
            "ph": "X",
            "cat": "Kernel",
            "name": name,
            "pid": 0,
            "tid": thread,
            **times,
            "args": {"device": 0},
        }

    events = [
        span("gemm", compute, 0, 100),
        span("ncclKernel_AllReduce", comm, 100, 50),
        span("gemm", compute, 150, 100),
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    (rank,) = weft.analyze(path).ranks
    streams = rank.trace.timeline.stream.tolist()
    assert streams[0] == streams[2] != streams[1]
    assert rank.attribution.reasons()["same_stream"] == 0
