"""Other formats: real or tool-made files give exactly the figures that another program computed."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sqlite3
import sys

import pytest
from trace_building import GEMM, NCCL, TraceBuilder, as_text
from trace_programs import comm, compute, host, run, wait

import weft
from weft.errors import InputError
from weft.timeline import Kind

US = 1_000

# Spans, compute and span in ns of each GPU, by jax.profiler.ProfileData (JAX 0.10.2) and plain interval sums.
MI300X_JAX = [
    (60, 3995965, 138470832), (25, 3345845, 112106106), (25, 3524285, 106992671), (25, 3403364, 95261145),
    (25, 3493365, 91596080), (25, 3464884, 92938503), (25, 3403004, 104221477), (25, 3502165, 90563059),
]  # fmt: skip


def test_an_xla_profile_of_a_real_node(pytestconfig):
    analysis = weft.analyze(pytestconfig.rootpath / "tests/data/traces/mi300x_jax.xplane.pb")
    found = [(len(r.trace.timeline), r.figures.compute_ns, r.figures.span_ns) for r in analysis.ranks]
    assert found == MI300X_JAX
    assert [rank.trace.device for rank in analysis.ranks] == list(range(8))


def field(number, value):
    """One field of a protocol buffer."""

    def varint(n):
        out = b""
        while n > 0x7F:
            out += bytes([n & 0x7F | 0x80])
            n >>= 7
        return out + bytes([n])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def xspace(device, lines, names, stats=()):
    """A profile of one plane. The fourth item of an event is its value for the first of `stats`."""
    plane = field(2, device)
    for number, texts in ((4, names), (5, stats)):
        for i, name in enumerate(texts, 1):
            plane += field(number, field(1, i) + field(2, field(1, i) + field(2, name)))
    for identity, (title, events) in enumerate(lines, 1):
        body = field(1, identity) + field(2, title) + field(3, 1_700_000_000_000_000_000)
        for name, start, end, *values in events:
            event = field(1, names.index(name) + 1) + field(2, start * 1000) + field(3, (end - start) * 1000)
            body += field(4, event + b"".join(field(4, field(1, 1) + field(4, value)) for value in values))
        plane += field(3, body)
    return field(1, plane)


def test_communication_in_an_xla_profile(tmp_path):
    """Kernels on the streams of a GPU count; the lines that XLA derives from them do not."""
    kernels = [(GEMM, 0, 1_000), (GEMM, 2_000, 3_000)]
    collectives = [(NCCL, 500, 2_500)]
    lines = [
        ("Stream #1(Compute)", kernels),
        ("Stream #2(NCCL)", collectives),
        ("XLA Ops", [(NCCL, 0, 9_000)]),
    ]
    (tmp_path / "host.xplane.pb").write_bytes(xspace("/device:GPU:3", lines, [GEMM, NCCL]))
    (rank,) = weft.analyze(tmp_path).ranks
    assert (rank.figures.comm_ns, rank.figures.overlap_ns, rank.figures.compute_ns) == (2_000, 1_000, 2_000)
    lines = [
        ("XLA Ops", [("fusion.3", 0, 1_000), ("all-reduce.7", 1_000, 1_400)]),
        ("Steps", [("1", 0, 5_000)]),
    ]
    names = ["fusion.3", "all-reduce.7", "1"]
    (tmp_path / "host.xplane.pb").write_bytes(xspace("/device:TPU:0", lines, names))
    (rank,) = weft.analyze(tmp_path).ranks
    assert (rank.figures.comm_ns, rank.figures.compute_ns, rank.figures.span_ns) == (400, 1_000, 1_400)


def test_steps_in_an_xla_profile(tmp_path):
    """A TPU's own steps; on a GPU those that the program marked."""
    operations = [("fusion.1", 0, 1_000), ("all-reduce.2", 1_000, 1_400), ("fusion.1", 5_000, 7_000)]
    lines = [("XLA Ops", operations), ("Steps", [("7", 0, 4_000), ("8", 4_000, 8_000)])]
    tpu = xspace("/device:TPU:0", lines, ["fusion.1", "all-reduce.2", "7", "8"])
    gpu = xspace("/device:GPU:0", [("Stream #1", [(GEMM, 0, 900), (NCCL, 5_000, 5_300)])], [GEMM, NCCL])
    marked = [("python", [("train", 0, 4_000, 7), ("train", 4_000, 8_000, 8)])]
    host = xspace("/host:CPU", marked, ["train"], ["step_num"])
    for profile, compute_ns, comm_ns in (
        (tpu + host, [1_000, 2_000], [400, 0]),
        (gpu + host, [900, 0], [0, 300]),
    ):
        (tmp_path / "host.xplane.pb").write_bytes(profile)
        (rank,) = weft.analyze(tmp_path).ranks
        assert [step.name for step in rank.steps] == ["ProfilerStep#7", "ProfilerStep#8"]
        assert [step.figures.compute_ns for step in rank.steps] == compute_ns
        assert [step.figures.comm_ns for step in rank.steps] == comm_ns


def test_xla_operations_written_as_hlo_text(tmp_path):
    """The opcode decides: a loop only contains other operations; waiting for a DMA copy is not compute."""
    loop = "%while.2 = (s32[], f32[8]{0:T(256)}) while((s32[], f32[8]{0:T(256)}) %tuple.1), body=%body"
    fusion = "%fusion = f32[8]{0:T(256)} fusion(f32[8]{0} %all-gather.1), kind=kLoop, calls=%fused"
    reduce = "%all-reduce = f32[8]{0:T(256)} all-reduce(f32[8]{0} %fusion), replica_groups={}, to_apply=%add"
    renamed = "%psum.3 = f32[8]{0} reduce-scatter(f32[8]{0} %fusion), to_apply=%add"
    copied = "%copy-done.5 = f32[8]{0:T(256)S(5)} copy-done((f32[8]{0:S(5)}, u32[]{:S(2)}) %copy-start.5)"
    events = [(loop, 0, 9_000), (fusion, 0, 1_000), (reduce, 1_000, 1_400), (renamed, 1_400, 1_700)]
    fused = "%all-reduce-scatter.4 = f32[4]{0} fusion(f32[8]{0} %fusion), kind=kCustom, calls=%scatter"
    hidden = "%async-collective-fusion.6 = f32[4]{0} fusion(f32[8]{0} %fusion), kind=kOutput, calls=%both"
    events += [(copied, 2_000, 5_000), (fused, 5_000, 5_100), (hidden, 5_100, 5_300)]
    names = [loop, fusion, reduce, renamed, copied, fused, hidden]
    (tmp_path / "host.xplane.pb").write_bytes(xspace("/device:TPU:0", [("XLA Ops", events)], names))
    (rank,) = weft.analyze(tmp_path).ranks
    figures = rank.figures
    assert (figures.compute_ns, figures.comm_ns, figures.exposed_ns) == (1_200, 800, 800)
    assert (figures.memory_ns, figures.span_ns) == (3_000, 5_300)
    assert set(rank.found.kind) == {"all_reduce", "reduce_scatter"}
    assert "psum.3 (reduce-scatter)" in rank.trace.timeline.names


def as_nsys(path, traces):
    """The same runs as a Nsight Systems export, in its documented tables."""
    base = sqlite3.connect(path)
    base.executescript("""
      create table StringIds (id integer primary key, value text);
      create table CUPTI_ACTIVITY_KIND_KERNEL (start integer, end integer, deviceId integer, contextId integer,
        greenContextId integer, streamId integer, correlationId integer, globalPid integer, demangledName integer,
        shortName integer, mangledName integer, launchType integer, registersPerThread integer, gridX integer,
        gridY integer, gridZ integer, blockX integer, blockY integer, blockZ integer, staticSharedMemory integer,
        dynamicSharedMemory integer);
      create table CUPTI_ACTIVITY_KIND_RUNTIME (start integer, end integer, eventClass integer, globalTid integer,
        correlationId integer, nameId integer, returnValue integer);
      create table TARGET_INFO_GPU (id integer, name text, smCount integer, computeMajor integer,
        computeMinor integer, threadsPerWarp integer);
      create table NVTX_EVENTS (start integer, end integer, text text, textId integer, globalTid integer);
    """)  # fmt: skip
    texts = {}
    for trace in traces:
        process = (1000 + trace.rank) << 24
        base.execute(
            "insert into TARGET_INFO_GPU values (?, ?, 132, 9, 0, 32)", (trace.rank, trace.device_name)
        )
        for event in trace.events:
            start = round(float(event["ts"].strip("@").replace(".", "")))
            start = int(event["ts"].strip("@").replace(".", ""))
            end = start + int(event["dur"].strip("@").replace(".", ""))
            args, name = event["args"], texts.setdefault(event["name"], len(texts) + 1)
            if event["cat"] == "kernel":
                row = (start, end, trace.rank, 1, None, args["stream"], args["correlation"], process, name, name, name,
                       0, args["registers per thread"], *args["grid"], *args["block"], 0, args["shared memory"])  # fmt: skip
                base.execute(
                    f"insert into CUPTI_ACTIVITY_KIND_KERNEL values ({','.join('?' * len(row))})", row
                )
            else:
                row = (start, end, 0, process + 7, args["correlation"], name, 0)
                base.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?,?,?,?,?,?,?)", row)
    base.executemany("insert into StringIds values (?, ?)", [(i, text) for text, i in texts.items()])
    base.commit()
    base.close()
    return path


def test_an_nsight_systems_export_says_what_the_same_run_says_elsewhere(tmp_path):
    step = [compute(100 * US), comm(150 * US), compute(300 * US, greedy=True), wait(), host(20 * US)]
    traces = run([step * 10, [compute(900 * US), *step[1:]] * 10], [0, 0])
    base = 1_700_000_000_000_000_000
    for trace in traces:
        for event in trace.events:  # both formats with the same clock
            event["args"] = {
                k: v for k, v in event["args"].items() if not k.startswith(("Coll", "Proc", "dtype"))
            }
        trace.clock_ns = base
        trace.write(tmp_path / f"rank{trace.rank}.json")
    expected = weft.analyze(tmp_path / "rank0.json", tmp_path / "rank1.json")
    found = weft.analyze(as_nsys(tmp_path / "report.sqlite", traces))
    assert [rank.trace.rank for rank in found.ranks] == [0, 1]
    for ours, theirs in zip(found.ranks, expected.ranks, strict=True):
        assert ours.figures == theirs.figures
        assert ours.attribution.reasons() == theirs.attribution.reasons()
        assert ours.trace.device_name == "NVIDIA H200"


def on_host(name, path):
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute(
            "create table TARGET_INFO_SYSTEM_ENV (globalVid integer, devStateName text, name text, "
            "nameEnum integer, value text)"
        )
        rows = [("CpuCores", 5, "96"), ("Hostname", 7, name)]
        base.executemany("insert into TARGET_INFO_SYSTEM_ENV values (0, 'System', ?, ?, ?)", rows)
        base.commit()
    return path


def test_exports_of_two_hosts_have_different_ranks(tmp_path):
    step = [compute(100 * US), comm(150 * US), wait()]
    traces = run([step * 10, [compute(900 * US), *step[1:]] * 10], [0, 0])
    exports = [as_nsys(tmp_path / f"node{number}.sqlite", traces) for number in range(2)]
    assert [rank.trace.rank for rank in weft.analyze(tmp_path).ranks] == [0, 0, 1, 1]
    assert "rank 0 appears 2 times at the same time" in weft.analyze(*exports).warnings[0]
    for name, path in zip(("b-17", "a-3"), exports, strict=True):  # files, not names, say which is first
        on_host(name, path)
    found = weft.analyze(tmp_path)
    assert [rank.trace.path for rank in found.ranks] == [str(exports[number]) for number in (0, 0, 1, 1)]
    assert [(rank.trace.rank, rank.trace.world_size) for rank in found.ranks] == [(r, 4) for r in range(4)]
    assert not found.warnings
    assert all(rank.matched.matched.all() for rank in found.ranks)


def test_exports_of_one_host_and_ranks_in_names_of_files_stay_as_they_are(tmp_path):
    step = [compute(100 * US), comm(150 * US), wait()]
    traces = run([step * 10] * 2, [0, 0])
    both = [on_host("a-3", as_nsys(tmp_path / f"window{number}.sqlite", traces)) for number in range(2)]
    assert "rank 0 appears 2 times at the same time" in weft.analyze(*both).warnings[0]
    each = [
        on_host(f"a-{trace.rank}", as_nsys(tmp_path / f"rank{7 + trace.rank}.sqlite", [trace]))
        for trace in traces
    ]
    assert [rank.trace.rank for rank in weft.analyze(*each).ranks] == [7, 8]
    for trace in traces:
        (tmp_path / f"rank{7 + trace.rank}.sqlite").rename(tmp_path / f"node{trace.rank}_gpu0.sqlite")
    each = [tmp_path / f"node{number}_gpu0.sqlite" for number in range(2)]
    assert [rank.trace.rank for rank in weft.analyze(*each).ranks] == [0, 1]


def test_all_to_all_in_an_export_is_told_from_pipeline_sends_by_the_calls(tmp_path):
    """Both run the same NCCL kernel; PyTorch's ranges around the calls say which one it is."""
    step = [compute(100 * US), comm(150 * US), wait()]
    traces = run([step * 10, [compute(900 * US), *step[1:]] * 10], [0, 0])
    for trace in traces:
        for event in trace.events:
            if "nccl" in event["name"].lower():
                event["name"] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
                event["args"] = {
                    k: v for k, v in event["args"].items() if not k.startswith(("Coll", "Proc", "dtype"))
                }
    path = as_nsys(tmp_path / "report.sqlite", traces)
    assert weft.analyze(path).ranks[0].attribution.reasons()["pipeline_bubble"] > 0
    with contextlib.closing(sqlite3.connect(path)) as base:
        launches = base.execute(
            "select r.start, r.end, r.globalTid from CUPTI_ACTIVITY_KIND_RUNTIME r join CUPTI_ACTIVITY_KIND_KERNEL k"
            " on k.correlationId = r.correlationId and k.globalPid >> 24 = r.globalTid >> 24"
            " join StringIds s on s.id = k.shortName where s.value like '%SendRecv%'"
        ).fetchall()
        base.executemany(
            "insert into NVTX_EVENTS values (?, ?, 'nccl:all_to_all, op_id = 12', null, ?)",
            [(start - 1, end + 1, thread) for start, end, thread in launches],
        )
        base.commit()
    analysis = weft.analyze(path)
    assert set(analysis.ranks[0].found.kind) == {"all_to_all"}
    assert analysis.ranks[0].attribution.reasons()["pipeline_bubble"] == 0
    assert analysis.ranks[0].attribution.reasons()["slower_rank"] > 0


def test_graphs_that_nsys_traced_as_a_whole_are_named(tmp_path):
    path = as_nsys(tmp_path / "report.sqlite", run([[compute(100 * US), comm(150 * US)] * 2] * 2, [0, 0]))
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute(
            "create table CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start integer, end integer, deviceId integer, "
            "streamId integer, correlationId integer, globalPid integer)"
        )
        base.executemany(
            "insert into CUPTI_ACTIVITY_KIND_GRAPH_TRACE values (?, ?, 1, 7, 9, ?)",
            [(start, start + 1000, 1001 << 24) for start in (0, 5000, 9000)],
        )
        base.commit()
        first, second = weft.analyze(path).ranks
        assert not first.trace.warnings
        assert "3 launches of CUDA graphs" in second.trace.warnings[0]
        assert "--cuda-graph-trace=node" in second.trace.warnings[0]
        base.execute("delete from CUPTI_ACTIVITY_KIND_KERNEL")
        base.commit()
    with pytest.raises(InputError, match="only CUDA graphs.*--cuda-graph-trace=node"):
        weft.analyze(path)


ROCPROF = """"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name","Correlation_Id",\
"Start_Timestamp","End_Timestamp","LDS_Block_Size","Scratch_Size","VGPR_Count","Accum_VGPR_Count","SGPR_Count",\
"Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z","Grid_Size_X","Grid_Size_Y","Grid_Size_Z"
"KERNEL_DISPATCH","Agent 4",1,1,852831,1,10,"void addition_kernel<float>(float*, float const*, float const*, int, int)",1,1551874061244694,1551874061255734,0,0,8,0,16,64,1,1,1024,1024,1
"KERNEL_DISPATCH","Agent 4",1,1,852831,2,13,"subtract_kernel(float*, float const*, float const*, int, int)",2,1551874061259214,1551874061270254,0,0,8,0,16,64,1,1,1024,1024,1
"KERNEL_DISPATCH","Agent 4",1,1,852831,3,12,"multiply_kernel(float*, float const*, float const*, int, int)",3,1551874061270254,1551874061279974,0,0,8,0,16,64,1,1,1024,1024,1
"KERNEL_DISPATCH","Agent 4",2,2,852831,8,11,"divide_kernel(float*, float const*, float const*, int, int)",8,1551874061326294,1551874061335454,0,0,12,4,16,64,1,1,1024,1024,1
"""


def test_a_rocprof_table_of_the_documentation(tmp_path):
    """The example of rocprofv3's manual, with a collective and a copy between GPUs added."""
    more = (
        '"KERNEL_DISPATCH","Agent 4",3,3,852831,9,14,"ncclDevKernel_Generic_1(ncclDevKernelArgsStorage)",9,'
    )
    rows = ROCPROF + more + "1551874061250000,1551874061272000,0,0,96,0,16,256,1,1,7168,1,1\n"
    (tmp_path / "123_kernel_trace.csv").write_text(rows)
    (tmp_path / "123_memory_copy_trace.csv").write_text(
        '"Kind","Direction","Stream_Id","Source_Agent_Id","Destination_Agent_Id","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
        '"MEMORY_COPY","MEMORY_COPY_DEVICE_TO_DEVICE",4,"Agent 5","Agent 4",10,1551874061300000,1551874061310000\n'
    )
    (rank,) = weft.analyze(tmp_path).ranks
    compute = 11_040 + 11_040 + 9_720 + 9_160
    overlap = (55_734 - 50_000) + (70_254 - 59_214) + (72_000 - 70_254)
    assert rank.figures.compute_ns == compute
    assert (rank.figures.comm_ns, rank.figures.overlap_ns) == (22_000 + 10_000, overlap)
    assert rank.figures.span_ns == 1551874061335454 - 1551874061244694
    assert rank.trace.timeline.resources["blocks"].tolist()[:2] == [16 * 1024, 28]
    assert rank.trace.device == 4


XPROF_JSON = (
    b'{"displayTimeUnit":"ns","metadata":{"highres-ticks":true}, "traceEvents":'
    b'[{"ph":"M","pid":1,"name":"process_name","args":{"name":"/device:GPU:0 NVIDIA H100"}}]}'
)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.nsys-rep", b"whatever", "nsys export --type sqlite"),
        ("a.json", b"PK\x03\x04....", "ZIP archive"),
        (
            "report.sqlite.gz",
            gzip.compress(b"SQLite format 3\0" + bytes(84), mtime=0),
            "packed SQLite database",
        ),
        ("a.pb", b"\x0a\xff\xff\xff\xff\xff", "protocol buffer"),
        ("a.pb", b"", "empty"),
        ("a.csv", b"a,b,c\n1,2,3\n", "not JSON"),
        ("a.json", b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}', "rocprofv3 --kernel-trace"),
        ("a.json", b'{"rocprofiler-sdk-tool": 5}', "not a result of rocprofv3"),
        ("a.json", b' { "rocprofiler-sdk-tool" :[{"agents"', "not a result of rocprofv3"),
        ("a.sqlite", b"SQLite format 3\0" + b"x" * 200, "database"),
        ("a.trace.json.gz", gzip.compress(XPROF_JSON, mtime=0), "the .xplane.pb file"),
        ("b_kernel_trace.csv", b'"Kernel_Name","Start_Timestamp"\n"k",1\n', "end_timestamp"),
    ],
)
def test_an_unknown_or_damaged_format_is_named(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=told):
        weft.analyze(tmp_path / name)


def test_a_database_of_something_else_is_named(tmp_path):
    base = sqlite3.connect(tmp_path / "x.sqlite")
    base.execute("create table rocpd_info (a)")
    base.commit()
    base.close()
    with pytest.raises(InputError, match="rocpd convert"):
        weft.analyze(tmp_path / "x.sqlite")


def test_a_trace_of_weft_run_says_what_it_could_not_see(tmp_path):
    built = TraceBuilder()
    built.gpu(GEMM, 0, 1_000, launch=-500)
    built.collective(500, 2_000)
    document = {**built.document(), "weft": {"source": "weft run --trace", "overlap_unknown": 3}}
    (tmp_path / "weft.rank0.json").write_text(as_text(document))
    analysis = weft.analyze(tmp_path)
    assert analysis.ranks[0].figures.exposed_ns == 1_000
    assert any("3 launches of CUDA graphs" in warning for warning in analysis.warnings)


def as_rocprof_json(table):
    """The same run in the layout of --output-format json, from a ROCm 6.4 file of an MI350X."""
    rows = list(csv.DictReader(io.StringIO(table)))
    names = {row["Kernel_Id"]: row["Kernel_Name"] for row in rows}
    axes = [(axis.lower(), axis) for axis in "XYZ"]
    dispatches = [
        {
            "size": 184, "kind": 11, "operation": 2, "thread_id": int(row["Thread_Id"]),
            "correlation_id": {"internal": int(row["Correlation_Id"]), "external": 0},
            "start_timestamp": int(row["Start_Timestamp"]), "end_timestamp": int(row["End_Timestamp"]),
            "dispatch_info": {
                "agent_id": {"handle": 77}, "queue_id": {"handle": int(row["Queue_Id"])},
                "kernel_id": int(row["Kernel_Id"]), "group_segment_size": int(row["LDS_Block_Size"]),
                "workgroup_size": {low: int(row[f"Workgroup_Size_{high}"]) for low, high in axes},
                "grid_size": {low: int(row[f"Grid_Size_{high}"]) for low, high in axes},
            },
            "stream_id": {"handle": int(row["Stream_Id"])},
        }
        for row in rows
    ]  # fmt: skip
    copies = [
        {"operation": 4, "start_timestamp": 1551874061244694, "end_timestamp": 1551874061250000,
         "correlation_id": {"internal": 90}, "src_agent_id": {"handle": 77}, "dst_agent_id": {"handle": 78}},
        {"operation": 2, "start_timestamp": 1551874061244000, "end_timestamp": 1551874061244694,
         "correlation_id": {"internal": 91}, "src_agent_id": {"handle": 3}, "dst_agent_id": {"handle": 77}},
    ]  # fmt: skip
    call = {"kind": 1, "operation": 0, "start_timestamp": 1551874061240000, "end_timestamp": 1551874061241000}
    process = {
        "metadata": {"pid": 1},
        "agents": [
            {"id": {"handle": 3}, "type": 1, "name": "CPU"},
            {"id": {"handle": 77}, "type": 2, "gpu_index": 0, "product_name": "AMD Instinct MI350X"},
            {"id": {"handle": 78}, "type": 2, "gpu_index": 1, "product_name": "AMD Instinct MI350X"},
        ],
        "strings": {
            "buffer_records": [{"kind": "NONE", "operations": []}, {"operations": ["hipLaunchKernel"]}]
        },
        "kernel_symbols": [
            {"kernel_id": int(key), "formatted_kernel_name": name, "arch_vgpr_count": 8}
            for key, name in names.items()
        ],
        "buffer_records": {
            "kernel_dispatch": dispatches,
            "memory_copy": copies,
            "hip_api": [{**call, "correlation_id": {"internal": 1}, "thread_id": 5}],
        },
    }
    return json.dumps({"rocprofiler-sdk-tool": [process]})


@pytest.mark.parametrize("packed", [False, True])
def test_a_rocprof_result_as_json_says_what_the_table_says(tmp_path, packed):
    """Compared with real files by hand: see benchmarks/results/analyze_bars.md."""
    (tmp_path / "1_kernel_trace.csv").write_text(ROCPROF)
    (table,) = weft.analyze(tmp_path / "1_kernel_trace.csv").ranks
    text = as_rocprof_json(ROCPROF).encode()
    path = tmp_path / ("1_results.json.gz" if packed else "1_results.json")
    path.write_bytes(gzip.compress(text) if packed else text)
    first, second = weft.analyze(path).ranks
    assert first.figures.compute_ns == table.figures.compute_ns
    kernels = first.trace.timeline.kind == Kind.COMPUTE
    for key in ("blocks", "threads", "shared_bytes"):
        expected = table.trace.timeline.resources[key].tolist()
        assert first.trace.timeline.resources[key][kernels].tolist() == expected
    assert first.trace.timeline.stream[kernels].tolist() == table.trace.timeline.stream.tolist()
    assert first.trace.device_name == "AMD Instinct MI350X"
    assert first.figures.memory_ns == 694  # from the host
    assert second.figures.comm_ns == 5_306  # from a peer
    assert first.trace.launch_ns[kernels].tolist()[0] == 1551874061240000


@pytest.mark.parametrize("number", ["\x1e64", "²", "6\u00b2", "٣", "9" * 30])
def test_numbers_that_only_look_like_some_in_a_rocprof_table(tmp_path, number):
    """Found by fuzzing: some characters that Python counts as white space or digits break int()."""
    path = tmp_path / "1_kernel_trace.csv"
    path.write_text(ROCPROF.replace(",64,1,1,1024", f",{number},1,1,1024", 1), encoding="utf-8")
    (rank,) = weft.analyze(path).ranks
    assert len(rank.trace.timeline) == 4


def test_standard_input(tmp_path, monkeypatch):
    built = TraceBuilder()
    built.gpu(GEMM, 0, 1_000)
    built.collective(500, 2_000)
    stdin = io.TextIOWrapper(io.BytesIO(built.text().encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    told = []
    (rank,) = weft.analyze("-", progress=lambda *about: told.append(about)).ranks
    assert rank.figures.exposed_ns == 1_000
    assert json.loads(json.dumps(rank.to_json()))["path"] == "-"
    assert told == [("-", 1, 1)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"x')))
    with pytest.raises(InputError, match="^-: no traceEvents"):
        weft.analyze("-")


def test_a_real_trace_with_communication_on_the_compute_stream(pytestconfig):
    analysis = weft.analyze(pytestconfig.rootpath / "tests/data/traces/b200_same_stream.json.gz")
    exposed = analysis.ranks[0].figures.exposed_ns
    reasons = analysis.ranks[0].attribution.reasons()
    assert exposed > 0
    assert reasons["same_stream"] == exposed
    assert analysis.attribution["launched_late_us"] == 0
