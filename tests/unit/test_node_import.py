"""Import of nccl-tests logs: every layout yields the same times, and anything else is refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_checks import problems

from properties import examples
from weft.cli.main import main
from weft.comm.nccl_tests import read_tables
from weft.comm.node import load_node
from weft.comm.node_import import gpu_name, import_logs
from weft.errors import InputError

SIZES = tuple(1 << power for power in range(16, 31, 2))
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
}
MEASURED = {size: round(20 + size / 2e5, 2) for size in SIZES}
"""Microseconds by size in bytes, the same in every log here."""


def ranks_of(
    count: int, hosts: int = 1, *, group: bool = True, gpu: str = "NVIDIA H100 80GB HBM3"
) -> list[str]:
    per_host = count // hosts
    return [
        f"#  Rank {i:2} {'Group  0 ' if group else ''}Pid {1000 + i:6} on     node{i // per_host} device "
        f"{i % per_host:2} [0x{i:02x}] {gpu}"
        for i in range(count)
    ]


def rows(program: str, n: int, *, redop: bool = True, root: bool = True, error: str = "0") -> list[str]:
    """Rows as nccl-tests prints them; in place is 1% slower, which all-to-all cannot check."""
    lines = []
    reduces = program in ("all_reduce", "reduce_scatter", "reduce", "sendrecv")
    for size, us in MEASURED.items():
        words = [f"{size:12}", f"{size // 4:13}", f"{'float':>9}"]
        words += [f"{'sum' if reduces else 'none':>7}"] if redop else []
        words += [f"{'0' if program in ('reduce', 'broadcast') else '-1':>7}"] if root else []
        for time, check in (
            (us, error),
            (us * 1.01, "N/A" if program in ("alltoall", "sendrecv") else error),
        ):
            algbw = size / time / 1e3
            words += [
                f"{time:8.2f} {algbw:7.2f} {algbw * FACTORS.get(program, lambda n: 1.0)(n):7.2f} {check:>6}"
            ]
        lines.append(" ".join(words))
    return lines


HEAD = [
    "#                                                              out-of-place                       in-place",
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
]
OLD = [
    "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error",
    "#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
]
OLDEST = [
    "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error",
    "#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
]
START = "# nThread 1 nGpus 1 minBytes 65536 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1"
TAIL = ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 123.4", "#"]
DEBUG = "node0:1000:1100 [0] NCCL INFO 22 coll channels, 22 collnet channels, 15 nvls channels, 30 p2p channels, 30 p2p channels per peer"


def log(program: str, n: int = 8, hosts: int = 1) -> list[str]:
    """A log of the present version."""
    return [
        "# nccl-tests version 2.18.3 nccl-headers=22809 nccl-library=22809",
        f"# Collective test starting: {program}_perf",
        START,
        "#",
        "# Using devices",
        *ranks_of(n, hosts),
        "NCCL version 2.28.9+cuda12.9",
        *HEAD,
        *rows(program, n),
        *TAIL,
        f"# Collective test concluded: {program}_perf",
    ]


def without_name(program: str, n: int = 8) -> list[str]:
    return [line for line in log(program, n) if "_perf" not in line and "nccl-tests" not in line]


def oldest(program: str) -> list[str]:
    if program == "all_reduce":
        table = [*OLD, *rows(program, 8, root=False, error="0e+00")]
    else:
        table = [*OLDEST, *rows(program, 8, redop=False, root=False, error="0e+00")]
    return [START, *ranks_of(8, group=False, gpu="A100-SXM4-40GB"), *table, *TAIL]


def interleaved(program: str) -> list[str]:
    lines = log(program)
    for at in (12, 16, 18, 20):
        lines.insert(at, DEBUG)
    return [
        *lines[:-4],
        "node0:1000:1100 [0] NCCL INFO comm 0x1 rank 0 nranks 8 - Destroy COMPLETE",
        *lines[-4:],
    ]


def each_iteration(program: str) -> list[str]:
    """The log of `-I 1 -S 1`: four more columns in each half, and the time of day."""
    lines = []
    for line in log(program):
        words = line.split()
        if words[:2] == ["#", "size"]:
            more = "  i_min  i_max  i_p99  i_cv"
            line = line.replace("#wrong", f"#wrong{more}") + "  timestamp"
        elif words and words[0].isdecimal():
            line = "  ".join(
                [*words[:9], "9.1 9.9 9.8 0.1", *words[9:], "8.1 8.9 8.8 0.2 2026-01-01 00:00:00"]
            )
        lines.append(line)
    return lines


LAYOUTS = {
    "present": log,
    "without the name": without_name,
    "first versions": oldest,
    "mpirun --tag-output": lambda p: [f"[1,0]<stdout>:{line}" for line in log(p)],
    "srun --label": lambda p: [f" 0: {line}" for line in log(p)],
    "pieces": lambda p: [f"[0] {line.replace(' -1 ', ' -1[0] ')}" for line in log(p)],
    "kubectl": lambda p: [f"2025-01-01T00:00:00Z launcher | {line}" for line in log(p)],
    "debug lines": interleaved,
    "each iteration": each_iteration,
    "comment signs lost": lambda p: [line.lstrip("#") for line in log(p)],
    "unchecked": lambda p: [
        line.replace("     0 ", "   N/A ") if line.startswith("   ") else line for line in log(p)
    ],
    "colored": lambda p: [f"\x1b[1;32m{line}\x1b[0m" for line in log(p)],
    "Windows line ends": lambda p: [f"{line}\r" for line in log(p)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", ["all_reduce", "all_gather"])
def test_every_layout_gives_the_times_back(layout, program, tmp_path):
    path = tmp_path / "out.log"
    path.write_text("\n".join(LAYOUTS[layout](program)))
    node = import_logs([path])
    (curve,) = node.curves
    assert (curve.collective, node.ranks, node.basis) == (program, 8, "measured")
    assert dict(curve.points) == MEASURED
    assert node.gpu == ("a100-40gb" if layout == "first versions" else "h100")
    assert node.title.isprintable()
    for size, us in MEASURED.items():
        assert node.collective(program, size).us == pytest.approx(us)
    assert curve.error_pct == pytest.approx(1.0, abs=0.1)
    if layout == "debug lines":
        assert (node.ctas["ring"], node.ctas["nvls"], node.ctas["p2p"]) == (22, 15, 30)


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize(
    "program", ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv"]
)
def test_a_log_without_its_name_shows_the_collective_by_its_columns(program, n):
    (table,) = read_tables("\n".join(without_name(program, n)))
    assert table.collective == {"alltoall": "all_to_all", "sendrecv": "send_recv"}.get(program, program)


def test_several_runs_in_a_file_and_several_files(tmp_path):
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    programs = ("all_reduce", "all_gather", "gather", "all_reduce")
    first.write_text("\n".join(line for program in programs for line in log(program, 16, 2)))
    second.write_text("\n".join([*log("alltoall", 16, 2), *log("reduce_scatter", 8)]))
    node = import_logs([first, second], "pair")
    assert [curve.collective for curve in node.curves] == ["all_reduce", "all_gather", "all_to_all"]
    assert (node.name, node.ranks, node.domain, node.network.name) == ("pair", 16, 8, "ndr400")
    assert dict(node.curves[0].points) == MEASURED


def test_a_log_of_large_sizes_alone_says_nothing_about_the_start(tmp_path):
    large = [
        line
        for line in log("all_gather")
        if not line.split()[:1] or line.split()[0] not in map(str, SIZES[:-1])
    ]
    assert len(large) == len(log("all_gather")) - len(SIZES) + 1
    nodes = []
    for name, lines in (("all", log("all_gather")), ("large", large)):
        path = tmp_path / f"{name}.log"
        path.write_text("\n".join(lines))
        nodes.append(import_logs([path]))
    assert [node.constants["launch_us"] for node in nodes] == [
        MEASURED[SIZES[0]],
        load_node("dgx-h100").constants["launch_us"],
    ]


def test_rccl(tmp_path):
    lines = log("all_reduce")
    lines = [line.replace("NVIDIA H100 80GB HBM3", "AMD Instinct MI300X") for line in lines]
    lines[0] = "rccl-tests: Version develop:ae3e635"
    path = tmp_path / "rccl.log"
    path.write_text("\n".join(lines))
    node = import_logs([path])
    assert (node.gpu, node.kernel) == ("mi300x", load_node("mi300x").kernel)


def test_the_first_logs_list_ranks_without_processes_and_times_in_milliseconds(tmp_path):
    listed = [
        re.sub(r"Pid +\d+ ", "", line) for line in ranks_of(8, 2, group=False, gpu="Tesla P100-SXM2-16GB")
    ]
    head = "#      bytes             N    type      op     time  algbw  busbw      res"
    lines = [START, *listed, "", f"{head}     time  algbw  busbw      res"]
    for row in rows("all_reduce", 8, root=False, error="1e-07"):
        words = row.split()
        words[4], words[8] = (f"{float(words[at]) / 1000:.5f}" for at in (4, 8))
        lines.append("  ".join(words))
    path = tmp_path / "2017.log"
    path.write_text("\n".join([*lines, *(line.lstrip("#") for line in TAIL)]))
    node = import_logs([path])
    assert (node.ranks, node.domain, node.gpu) == (8, 4, "tesla p100-sxm2-16gb")
    assert dict(node.curves[0].points) == pytest.approx(MEASURED)


def test_bandwidths_of_2020_and_lists_of_ranks_that_are_cut(tmp_path):
    """Both bandwidths of an all-gather then counted only other ranks' bytes; cut logs lack rank lines."""
    lines = oldest("all_gather")
    for at, line in enumerate(lines):
        if (words := line.split())[0].isdecimal():
            words[4], words[8] = words[5], words[9]
            lines[at] = " ".join(words)
    first = tmp_path / "2020.log"
    first.write_text("\n".join(lines))
    (curve,) = import_logs([first]).curves
    assert (curve.collective, dict(curve.points)) == ("all_gather", MEASURED)
    two = [line for n in (16, 32) for line in log("all_reduce", n, n // 4)]
    last = [line for line in two if "Rank" not in line or " 15 " in line or " 31 " in line]
    second = tmp_path / "cut.log"
    second.write_text("\n".join(last))
    node = import_logs([second])
    assert (node.ranks, node.domain, dict(node.curves[0].points)) == (32, 4, MEASURED)


def as_json(size: int, us: float) -> dict[str, object]:
    rate = size / us / 1e3
    half = {"time": us, "alg_bw": rate, "bus_bw": rate * 1.75, "nwrong": 0.0}
    row = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "-1"}
    return {**row, "out_of_place": half, "in_place": None}


def test_json_of_both_vendors(tmp_path):
    devices = [
        {
            "rank": i,
            "group": 0,
            "pid": 1,
            "hostname": "a",
            "device": i,
            "device_hex": "0",
            "device_info": "NVIDIA H100",
        }
        for i in range(8)
    ]
    rows_of = [as_json(size, us) for size, us in MEASURED.items()]
    nvidia = {"version": 1, "args": ["./all_reduce_perf"], "config": {"devices": devices}, "results": rows_of}
    amd = [
        {"numCycle": 0, "name": "AllReduce", "nodes": 1, "ranks": 8, "ranksPerNode": 8, "gpusPerRank": 1}
        | {"size": size, "type": "float", "redop": "sum", "inPlace": place, "time": us * (1 + place / 50)}
        | {"algBw": size / us / 1e3, "busBw": 1.75 * size / us / 1e3, "wrong": "0"}
        for size, us in MEASURED.items()
        for place in (0, 1)
    ]
    path = tmp_path / "run.json"
    for document, gpu in ((nvidia, "h100"), (amd, "unknown")):
        path.write_text(json.dumps(document))
        warned: list[str] = []
        node = import_logs([path], warn=warned.append)
        assert (node.ranks, node.gpu, node.curves[0].collective) == (8, gpu, "all_reduce")
        assert dict(node.curves[0].points) == MEASURED
        assert warned == []
    amd = [{**one, "name": "Broadcast", "ranks": 16, "ranksPerNode": 8, "nodes": 2, "root": 0} for one in amd]
    path.write_text(json.dumps(amd))
    node = import_logs([path])
    assert (node.ranks, node.domain, node.curves[0].collective) == (16, 8, "broadcast")
    nvidia["out_of_bounds"] = {"count": 3, "okay": False}
    path.write_text(json.dumps(nvidia))
    with pytest.raises(InputError, match="3 results are wrong"):
        import_logs([path])


@pytest.mark.parametrize("wrong", [{"ranksPerNode": 0}, {"numCycle": float("inf")}, {"size": 1e999}], ids=str)
def test_json_with_numbers_that_nothing_can_have_is_refused(wrong, tmp_path):
    record = {"numCycle": 0, "name": "AllReduce", "ranks": 8, "ranksPerNode": 8, "size": 1 << 20}
    record |= {"type": "float", "redop": "sum", "inPlace": 0, "time": 20.0, "algBw": 52.4, "busBw": 91.8}
    path = tmp_path / "run.json"
    path.write_text(json.dumps([{**record, **wrong}]))
    with pytest.raises(InputError, match="has no table of nccl-tests"):
        import_logs([path])


@given(st.integers(0, 3000))
@examples(60)
def test_a_file_that_ends_anywhere_has_only_true_rows(end):
    text = "\n".join(log("all_reduce"))
    for table in read_tables(text[: len(text) - end]):
        for row in table.rows[:-1]:
            assert MEASURED[row.nbytes] == row.us


def test_rows_with_wrong_results_are_left_out_and_milliseconds_are_converted():
    lines = log("all_reduce")
    (wrong,) = (i for i, line in enumerate(lines) if line.split()[:1] == [str(SIZES[3])])
    words = lines[wrong].split()
    words[8] = "1e+06"
    lines[wrong] = "  ".join(words)
    (table,) = read_tables("\n".join(lines))
    assert [row.nbytes for row in table.rows] == [size for size in SIZES if size != SIZES[3]]
    lines = log("all_reduce")
    for i, line in enumerate(lines):
        if (words := line.split()) and words[0].isdecimal():
            words[5], words[9] = (f"{float(words[at]) / 1000:.5f}" for at in (5, 9))
            lines[i] = "  ".join(words)
    for text in ("\n".join(lines).replace("(us)", "(ms)"), "\n".join(lines)):  # the bandwidth says it, too
        (table,) = read_tables(text)
        assert [row.us for row in table.rows] == pytest.approx(list(MEASURED.values()), rel=1e-3)


def with_wrong(lines: list[str], sizes: tuple[int, ...], half: int) -> list[str]:
    """The log with wrong results in the rows of some sizes, out of place (0) or in place (1)."""
    found = []
    for line in lines:
        words = line.split()
        if words[:1] and words[0].isdecimal() and int(words[0]) in sizes:
            words[(8, 12)[half]] = "7"
            line = "  ".join(words)
        found.append(line)
    return found


NCCL_FAILURE = "node0: Test NCCL failure common.cu:1204 'unhandled cuda error / '"
CUDA_FAILURE = "node0: Test CUDA failure common.cu:291 'out of memory'"
MORE_FAILURE = " .. node0 pid 757466: Test failure common.cu:915"
FAILED = [line.replace(": 0 OK", ": 3 FAILED") for line in log("all_reduce")]
FAILED_RUNS = {
    "wrong out of place": (with_wrong(FAILED, SIZES[:2], 0), SIZES[2:], "skipped 2 rows with wrong results"),
    "wrong in place": (
        with_wrong(FAILED, SIZES[:2], 1),
        SIZES[2:],
        r"\(65536, 262144 bytes\); rows left: 6",
    ),
    "NaN": (with_wrong(log("all_reduce"), SIZES[:2], 0), SIZES[2:], "skipped 2 rows"),
    "no memory": (
        [*log("all_reduce")[:-5], CUDA_FAILURE, MORE_FAILURE],
        SIZES[:-1],
        "common.cu:291 'out of mem",
    ),
    "in a row": (
        [*log("all_reduce")[:-5], log("all_reduce")[-5].rpartition("0 ")[0] + NCCL_FAILURE, MORE_FAILURE],
        SIZES[:-1],
        "failed .Test NCCL failure common.cu:1204 'unhandled cuda error / '.; rows left: 7",
    ),
    "aborted": (
        log("all_reduce")[:-5],
        SIZES[:-1],
        "no summary at its end, as if it was aborted; rows left: 7",
    ),
    "failed, then well": (
        [*log("all_gather")[:12], NCCL_FAILURE, MORE_FAILURE, *log("all_reduce")],
        SIZES,
        "all_gather: the run failed .* rows left: 0",
    ),
    "one of two": (
        [*[line.replace(": 0 OK", ": 3 FAILED") for line in log("all_gather")], *log("all_reduce")],
        SIZES,
        "all_gather: skipped all rows: 3 results are wrong, and no row says which",
    ),
}
FAILED_RUNS["colored"] = (
    [f"\x1b[31m{line}\x1b[0m" for line in FAILED_RUNS["wrong in place"][0]],
    *FAILED_RUNS["wrong in place"][1:],
)
FAILED_RUNS["asterisk"] = (
    [line.replace("  7  ", "  2e-01*  ") for line in FAILED_RUNS["NaN"][0]],
    *FAILED_RUNS["NaN"][1:],
)
FAILED_RUNS["NaN"] = (
    [line.replace("  7  ", "  nan  ") for line in FAILED_RUNS["NaN"][0]],
    *FAILED_RUNS["NaN"][1:],
)


@pytest.mark.parametrize("run", FAILED_RUNS)
def test_what_a_failed_run_left_is_used_and_the_rest_is_named(run, tmp_path, capsys, monkeypatch):
    lines, sizes, words = FAILED_RUNS[run]
    monkeypatch.chdir(tmp_path)
    Path("out.log").write_text("\n".join(lines))
    warned: list[str] = []
    (curve,) = import_logs([Path("out.log")], warn=warned.append).curves
    assert (curve.collective, dict(curve.points)) == ("all_reduce", {size: MEASURED[size] for size in sizes})
    assert len(warned) == 1
    assert re.search(f"^out.log: .*{words}", warned[0])
    assert weft_node("import", "out.log", "--json") == 0
    said = capsys.readouterr()
    assert said.err == f"weft: {warned[0]}\n"
    assert json.loads(said.out)["name"] == "out"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (FAILED, "all_reduce: skipped all rows: 3 results are wrong, and no row says which"),
        (
            with_wrong(FAILED, SIZES, 0),
            r"skipped 8 rows with wrong results \(65536, 262144, 1048576, … bytes\)",
        ),
        (
            [*log("all_reduce")[:12], NCCL_FAILURE, MORE_FAILURE],
            "all_reduce: the run failed .Test NCCL failure",
        ),
        (
            [*log("all_reduce")[:4], CUDA_FAILURE, MORE_FAILURE],
            "all_reduce: the run failed .Test CUDA failure",
        ),
        ([*FAILED, *FAILED], "and 1 more"),
    ],
    ids=["summary", "all wrong", "NCCL", "CUDA", "twice"],
)
def test_a_log_with_nothing_to_trust_is_refused(lines, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out.log").write_text("\n".join(lines))
    assert weft_node("import", "out.log") == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert re.search(f"out.log: .*{words}.*; run nccl-tests again", said.err)
    assert [file.name for file in tmp_path.iterdir()] == ["out.log"]


OTHER_RUNS = {
    "program": (log("gather"), "gather: skipped all rows: profiles have no gather"),
    "ranks": (
        log("all_gather", 4),
        "all_gather: skipped all rows: it has 4 ranks, the node 8",
    ),
    "no ranks": (
        [line for line in log("broadcast") if "Rank" not in line],
        "broadcast: skipped all rows: its ranks are not listed; add --ranks N",
    ),
    "hosts": (
        log("all_reduce"),
        "all_reduce: skipped all rows: its ranks are on one host, the node's on 2",
    ),
    "GPU": (
        [line.replace("H100 80GB HBM3", "A100-SXM4-80GB") for line in log("all_gather", hosts=2)],
        "all_gather: skipped all rows: its GPU is a100-80gb, the node's is h100",
    ),
    "host times": (
        [line.replace("   time ", "cputime ") for line in log("all_gather", hosts=2)],
        r"all_gather: skipped all rows: they are times of the host \(-C 1\)",
    ),
    "numbers": (
        [
            re.sub(r"^( +65536 .* -1 ).*", r"\1 nan nan nan 0 -5.0 1.0 1.0 0", line)
            for line in log("reduce_scatter", hosts=2)
        ],
        r"reduce_scatter: skipped 1 rows with impossible or missing numbers \(65536 bytes\); rows left: 7",
    ),
}


OTHER_RUNS["bandwidth"] = (
    [
        re.sub(r"^( +1073741824 .* -1 +[0-9.]+ +[0-9.]+) +[0-9.]+(.*)", r"\1 9999999.5\2", line)
        for line in log("all_gather", hosts=2)
    ],
    r"all_gather: skipped 1 rows with impossible or missing numbers \(1073741824 bytes\); rows left: 7",
)


@pytest.mark.parametrize("run", OTHER_RUNS)
def test_runs_that_are_not_used_are_named(run, tmp_path):
    """A node's profile has the curves of one GPU and of one number of ranks and hosts."""
    lines, words = OTHER_RUNS[run]
    main_run, other = tmp_path / "main.log", tmp_path / "other.log"
    main_run.write_text("\n".join(log("all_reduce", hosts=2)))
    other.write_text("\n".join(lines))
    warned: list[str] = []
    node = import_logs([main_run, other], warn=warned.append)
    (curve,) = (curve for curve in node.curves if curve.collective == "all_reduce")
    assert (dict(curve.points), node.ranks, node.domain, node.gpu) == (MEASURED, 8, 4, "h100")
    (line,) = warned
    assert re.search(words, line)


def test_a_run_that_ended_well_is_imported_without_a_word(tmp_path):
    warned: list[str] = []
    for number, layout in enumerate(LAYOUTS.values()):
        path = tmp_path / f"{number}.log"
        path.write_text("\n".join(layout("all_reduce")))
        import_logs([path], warn=warned.append)
    assert warned == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no table of nccl-tests"),
        ("hello\n" * 50, "has no table of nccl-tests"),
        ("\x00\xff" * 999, "has no table of nccl-tests"),
        ('{"results": []}', "is JSON, but not a file of nccl-tests"),
        ("\n".join(log("all_reduce")[:12]), "has no table of nccl-tests"),
        ("\n".join(log("gather")), "no table of nccl-tests that says its collective"),
        (
            "\n".join([START, *ranks_of(1), *HEAD, *rows("all_reduce", 1)]),
            "build nccl-tests with MPI=1",
        ),
        ("\n".join(line for line in log("broadcast") if "Rank" not in line), "add --ranks N"),
        ("\n".join(log("all_reduce")).replace("   time ", "cputime "), "times of the host only"),
    ],
    ids=["empty", "prose", "bytes", "json", "no rows", "gather", "no MPI", "no ranks", "CPU time"],
)
def test_what_is_no_log_is_refused_in_one_line(text, words, tmp_path):
    path = tmp_path / "out.log"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as refused:
        import_logs([path])
    assert "\n" not in str(refused.value)


def test_groups_of_ranks_and_other_encodings(tmp_path):
    """With NCCL_TESTS_SPLIT="MOD 8" on two nodes each group has a rank of each."""
    listed = [line.replace("Group  0", f"Group {i % 8:2d}") for i, line in enumerate(ranks_of(16, hosts=2))]
    lines = [START, "all_reduce_perf", *listed, *HEAD, *rows("all_reduce", 2), *TAIL]
    assert listed[1] != ranks_of(16, hosts=2)[1]
    path = tmp_path / "split.log"
    path.write_text("\n".join(lines), encoding="utf-16")
    node = import_logs([path])
    assert (node.ranks, node.domain, len(node.curves[0].points)) == (2, 1, len(SIZES))


@pytest.mark.parametrize("n", [2, 8, 32, 128])
@pytest.mark.parametrize("program", ["all_reduce", "all_gather"])
def test_ranks_that_are_not_listed_follow_from_the_bandwidths(program, n, tmp_path):
    path = tmp_path / f"{program}_run.log"
    path.write_text("\n".join(line for line in without_name(program, n) if "Rank" not in line))
    given = 2 if (program, n) == ("all_reduce", 2) else 0  # both bandwidths are the same then
    node = import_logs([path], ranks=given)
    assert (node.ranks, node.curves[0].collective) == (n, program)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "nvidia geforce rtx 4090"),
        ("", "unknown"),
    ],
)
def test_the_gpu_is_known_by_its_title(title, name):
    assert gpu_name(title) == name


def weft_node(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["node", *words])
    return ended.value.code


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "all_reduce.log"
    path.write_text("\n".join(log("all_reduce")))
    assert weft_node("import", str(path), "--name", "mine", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert problems("node", document) == []
    assert json.loads((tmp_path / "mine.json").read_text()) == document
    assert weft_node("show", "mine.json") == 0
    shown = capsys.readouterr().out
    assert "measured" in shown
    assert "all_reduce.log" in shown
    assert weft_node("list", "--json") == 0
    assert problems("node-list", json.loads(capsys.readouterr().out)) == []


@pytest.mark.parametrize(
    "words",
    [
        ("import", "all_reduce.log", "--out", "all_reduce.log"),
        ("import", "all_reduce.log", "--out", "no/where.json"),
        ("import", "all_reduce.log", "--ranks", "1"),
        ("import", "all_reduce.log", "--name", "../mine"),
        ("import",),
        ("show",),
        ("show", "nonsense"),
        ("show", "all_reduce.log"),
        ("list", "dgx-h100"),
        ("nonsense",),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_one_line_and_exit_code_2(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "all_reduce.log"
    path.write_text(before := "\n".join(log("all_reduce")))
    assert weft_node(*words) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert [file.name for file in tmp_path.iterdir()] == ["all_reduce.log"]
    assert path.read_text() == before


def test_a_table_is_read_in_linear_time():
    hostile = ("x", " 1", "Rank 0 ", "size count type time ", "(B)(", "1" * 99 + " " * 99)
    (table,) = read_tables("\n".join([*log("all_reduce"), *(one * 200_000 for one in hostile)]))
    assert len(table.rows) == len(SIZES)


def test_many_ranks_are_counted_in_linear_time():
    """A quadratic count takes minutes."""
    lines = log("all_reduce")
    at = next(i for i, line in enumerate(lines) if "Rank" in line)
    (table,) = read_tables("\n".join([*lines[:at], *ranks_of(50_000, 50_000 // 8), *lines[at + 8 :]]))
    assert (table.ranks, table.hosts, len(table.rows)) == (50_000, 50_000 // 8, len(SIZES))


def test_numbers_that_nothing_can_have_are_left_out(tmp_path):
    lines = log("all_reduce")
    row = next(line for line in lines if line.split()[0] == "65536")
    hostile = [
        row.replace("65536", "9" * 5000),
        row.replace(" -1 ", " 1e999 "),
        row.replace("20.33", "1e999").replace("20.53", "1e999"),
        f"# Rank {'9' * 5000} Group 0 Pid 1 on node0 device 0 [0x00] NVIDIA H100",
        f"NCCL INFO {'9' * 5000} coll channels, 0 nvls channels, 0 p2p channels",
        "NCCL INFO 0 coll channels, 0 nvls channels, 0 p2p channels",
    ]
    made = []
    for number, more in enumerate(([], hostile)):
        path = tmp_path / f"{number}.log"
        path.write_text("\n".join([*lines[:-4], *more, *lines[-4:]]))
        made.append(import_logs([path], "mine"))
    assert made[0].curves[0].points == made[1].curves[0].points
    assert (made[0].ctas, made[0].ranks) == (made[1].ctas, made[1].ranks)


def test_paths_are_read_as_they_are(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        import_logs([tmp_path / "nothing.log"])
    with pytest.raises(InputError, match="cannot read"):
        import_logs([Path(tmp_path)])
    if Path("/dev/zero").exists():  # which has no end
        with pytest.raises(InputError, match="over 64 MiB"):
            import_logs([Path("/dev/zero")])
        with pytest.raises(InputError, match="over 4 MiB"):
            load_node("/dev/zero")
