"""`weft analyze` as a user sees it: stdout and stderr, exit codes, files that are complete or absent."""

from __future__ import annotations

import gzip
import json

import pytest
from trace_building import GEMM, NCCL, TraceBuilder

from weft.cli.main import main

US = 1_000


def run(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *map(str, args)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def folder(tmp_path):
    """A folder with the traces of two ranks of a run."""
    for rank in range(2):
        built = TraceBuilder(rank=rank)
        for i in range(4):
            built.gpu(GEMM, i * 1_000 * US, (i * 1_000 + 600) * US, launch=i * 1_000 * US - 50 * US)
            built.collective((i * 1_000 + 500) * US, (i * 1_000 + 900) * US, launch=i * 1_000 * US - 40 * US)
        (tmp_path / "before").mkdir(exist_ok=True)
        built.write(tmp_path / "before" / f"rank{rank}.json.gz")
    return tmp_path / "before"


CONTRACT = {
    "path", "rank", "device", "span_us", "compute_us", "comm_us", "overlap_us", "overlap_pct", "exposed_comm_us",
    "memory_us", "idle_us", "steps", "collectives", "attribution", "price_of_overlap",
}  # fmt: skip


def test_json_is_one_object_and_nothing_else(capsys, folder):
    code, out, err = run(capsys, folder, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert set(document) >= {"ranks", "summary", "advice"}
    for rank in document["ranks"]:
        assert set(rank) >= CONTRACT
        assert set(rank["attribution"]) == {
            "launched_late_us", "behind_compute_us", "slower_rank_us", "nothing_to_hide_behind_us",
        }  # fmt: skip
        assert set(rank["collectives"][0]) >= {
            "name", "kind", "count", "bytes", "total_us", "exposed_us", "median_us", "busbw_gbps", "attribution",
        }  # fmt: skip
        assert (rank["comm_us"], rank["overlap_us"], rank["exposed_comm_us"]) == (1600.0, 400.0, 1200.0)
    assert set(document["advice"][0]) >= {"control", "title", "detail", "collective", "gain_us", "command"}


def test_the_terminal_shows_the_figures(capsys, folder):
    code, out, _ = run(capsys, folder)
    assert code == 0
    assert "exposed" in out.lower()
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["missing.json"], ["--comm", "("], [], ["--no-such-flag"]])
def test_a_wrong_argument_is_one_line_and_exit_code_2(capsys, tmp_path, folder, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "--comm" in arguments:
        arguments = [folder, *arguments]
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("weft: ")
    assert err.count("\n") == 1


def test_files_are_written_whole_or_not_at_all(capsys, folder, tmp_path):
    page, perfetto = tmp_path / "page.html", tmp_path / "perfetto.json"
    code, _, err = run(capsys, folder, "--html", page, "--perfetto", perfetto)
    assert code == 0
    assert "page.html" in err
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert perfetto.stat().st_size > 100
    code, out, err = run(capsys, folder, "--json", "--html", tmp_path / "no" / "page.html")
    assert (code, out) == (2, "")
    assert "cannot write" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["before", "page.html", "perfetto.json"]


def test_a_perfetto_file_is_compressed_where_its_name_says_so(capsys, folder, tmp_path):
    plain, packed = tmp_path / "p.json", tmp_path / "p.json.gz"
    assert run(capsys, folder, "--perfetto", plain)[0] == 0
    assert run(capsys, folder, "--perfetto", packed)[0] == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


def test_two_folders_are_before_and_after(capsys, folder, tmp_path):
    after = tmp_path / "after"
    after.mkdir()
    for rank in range(2):
        built = TraceBuilder(rank=rank)
        built.gpu(GEMM, 0, 600 * US)
        built.gpu(NCCL, 0, 500 * US, stream=20)
        built.write(after / f"rank{rank}.json")
    code, out, _ = run(capsys, folder, after, "--json")
    document = json.loads(out)
    assert code == 0
    assert set(document) >= {"before", "after", "change"}
    assert document["change"]["exposed_comm_us"]["delta"] == -1200.0
    code, out, _ = run(capsys, folder, after, "--html", tmp_path / "change.html")
    assert code == 0
    assert out
    assert (tmp_path / "change.html").exists()
    assert run(capsys, folder, after, "--perfetto", tmp_path / "p.json")[0] == 2


def test_two_files_are_two_ranks(capsys, folder):
    code, out, _ = run(capsys, folder / "rank0.json.gz", folder / "rank1.json.gz", "--json")
    assert code == 0
    assert [rank["rank"] for rank in json.loads(out)["ranks"]] == [0, 1]


def test_names_that_are_no_text(capsys, tmp_path):
    """File names of any bytes and kernel names of any characters are escaped on both streams."""
    import os
    from pathlib import Path

    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/rank0-\xff.json"))
    built = TraceBuilder()
    built.gpu("kernel \ud800 \x1b[31m <script>alert(1)</script> \n", 0, 1_000)
    built.collective(500, 2_000)
    built.write(path)
    for flags in (["--json"], [], ["--html", tmp_path / "page.html"]):
        code, out, _ = run(capsys, path, *flags)
        assert code == 0
        assert "\x1b[31m" not in out
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


def test_an_output_never_destroys_an_input(capsys, folder, tmp_path):
    import os

    trace = folder / "rank0.json.gz"
    before = trace.read_bytes()
    link, pipe, alias = tmp_path / "link.html", tmp_path / "pipe", tmp_path / "hard.json.gz"
    link.symlink_to(trace)
    os.mkfifo(pipe)
    os.link(trace, alias)
    for flags in (
        ["--html", trace], ["--perfetto", trace], ["--html", link], ["--html", alias], ["--html", pipe],
        ["--html", "/dev/null"], ["--html", folder], ["--html", tmp_path / "x", "--perfetto", tmp_path / "x"],
    ):  # fmt: skip
        code, out, err = run(capsys, folder, *flags)
        assert (code, out, err.count("\n")) == (2, "", 1), flags
        assert str(flags[1]) in err
    assert trace.read_bytes() == before


def test_a_full_disk_and_a_closed_stdout_are_one_line(folder):
    import os
    import subprocess
    import sys
    from pathlib import Path

    command = [sys.executable, "-m", "weft", "analyze", str(folder)]
    for redirect in (">/dev/full", ">&-"):
        for flag in ("", "--json"):
            done = subprocess.run(
                ["sh", "-c", f'exec "$@" {flag} {redirect}', "sh", *command],
                capture_output=True, text=True, timeout=60, check=False,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            )  # fmt: skip
            assert done.returncode == 2, (redirect, flag, done.stderr)
            assert done.stderr.startswith("weft: ")
            assert done.stderr.count("\n") == 1


def test_warnings_name_a_repeated_rank_a_stray_time_and_ranks_without_communication(capsys, tmp_path):
    first, again, silent = TraceBuilder(rank=0), TraceBuilder(rank=0), TraceBuilder(rank=1)
    for built in (first, again):
        for i in range(200):
            built.gpu(GEMM, i * 1_000, i * 1_000 + 600)
        built.collective(0, 900)
    first.gpu(GEMM, 10**15, 10**15 + 5)
    silent.gpu(GEMM, 0, 1_000)
    for name, built in (("a", first), ("b", again), ("c", silent)):
        built.write(tmp_path / f"{name}.json")
    code, out, _ = run(capsys, tmp_path, "--json")
    told = " ".join(json.loads(out)["warnings"])
    assert code == 0
    assert "rank 0 appears 2 times" in told
    assert "1 of 202 GPU events are 1e+06 s away" in told
    assert "no communication in rank 1" in told
    code, out, _ = run(capsys, tmp_path)
    assert "\N{EN DASH}" in out


def test_cycles_of_one_rank_are_kept_apart(capsys, tmp_path):
    from trace_building import BASE_NS

    for cycle in range(3):
        for rank in range(2):
            built = TraceBuilder(rank=rank, clock_ns=BASE_NS + cycle * 10**9)
            for i in range(4):
                built.gpu(GEMM, i * 1_000 * US, (i * 1_000 + 600) * US)
                built.collective((i * 1_000 + 500) * US, (i * 1_000 + 900) * US)
            built.write(tmp_path / f"host_{rank}.{2 - cycle}.pt.trace.json")
    code, out, _ = run(capsys, tmp_path, "--json")
    ranks = json.loads(out)["ranks"]
    assert code == 0
    assert [(rank["rank"], rank["cycle"]) for rank in ranks] == [(r, c) for r in range(2) for c in range(3)]
    assert all(rank["matched_collectives"] == 4 for rank in ranks)
    assert not json.loads(out)["warnings"]
