"""`weft explore`: the document, the table, the page, the losses, and one-line errors."""

from __future__ import annotations

import json

import pytest

from weft.policy import SCHEDULES

SHAPE = ["explore", "--gemm", "131072x2048x16384", "--collective", "all_gather", "--ranks", "8"]
MI300X = [*SHAPE, "--device", "sim:mi300x"]


def test_the_document_keeps_its_contract(weft):
    code, out, _ = weft(*MI300X, "--json")
    document = json.loads(out)
    assert code == 0
    assert [row["name"] for row in document["schedules"]] == list(SCHEDULES)
    for row in document["schedules"]:
        assert {"name", "ms", "speedup_vs_serial", "engine", "exposed_ms", "decomposition_ms"} <= set(row)
    rows = {row["name"]: row for row in document["schedules"]}
    assert rows["serial"]["speedup_vs_serial"] == 1
    assert document["best"] == min(rows.values(), key=lambda row: row["ms"])["name"]
    assert document["picked"] in SCHEDULES
    assert document["simulated"] is True
    assert (document["device"], document["topology"]) == ("sim:mi300x", "mesh")
    assert document["ideal_ms"] <= rows[document["best"]]["ms"]
    assert rows[document["best"]]["speedup_vs_serial"] <= document["bound"]


def test_auto_without_a_gpu_is_a_simulated_h100(weft, monkeypatch):
    monkeypatch.setattr("weft.execute.devices.has_gpu", lambda: False)
    _, out, _ = weft(*SHAPE, "--json")
    document = json.loads(out)
    assert (document["device"], document["topology"]) == ("sim:h100", "nvswitch")


def test_the_table_says_simulated_shows_both_timelines_and_fits(weft):
    code, out, _ = weft(*MI300X)
    assert code == 0
    for part in (
        "simulated",
        "hetero-fused-1d",
        "best (←)",
        "why:",
        "pick:",
        "compute |",
        "copies  |",
        "links",
    ):
        assert part in out
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_the_page_has_the_schedules_and_both_timelines(weft, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = weft(*MI300X, "--html", page)
    assert code == 0
    assert f"page: {page}" in out
    html = page.read_text()
    serial = next(line.split()[1] for line in out.splitlines() if line.lstrip().startswith("serial "))
    assert f"Serial</dt><dd>{serial} ms</dd>" in html
    for part in ("simulated", "uniform-fused-2d", "part0-timeline", "Where the time goes", "serial"):
        assert part in html


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_to_all", "all-gather"])
@pytest.mark.parametrize("topology", ["ring", "pcie"])
def test_other_collectives_and_topologies(weft, collective, topology):
    words = ["explore", "--gemm", "4001x3001x2003", "--ranks", 4, "--device", "sim:a100", "--dtype", "fp16"]
    code, out, _ = weft(*words, "--collective", collective, "--topology", topology, "--json")
    assert code == 0
    assert json.loads(out)["topology"] == topology


def test_losses_of_a_simulated_gpu(weft, tmp_path):
    page = tmp_path / "losses.html"
    code, out, _ = weft("explore", "--characterize", "--device", "sim:h200", "--html", page, "--json")
    document = json.loads(out)
    assert code == 0
    assert {(row["axis"], row["ways"]) for row in document["decomposition"]} == {
        ("M", 8), ("M", 64), ("K", 8), ("K", 64),
    }  # fmt: skip
    by = {row["engine"]: row for row in document["contention"]}
    assert all(5 < row["gemm_slowed_pct"] < 30 for row in by.values())
    assert all(-0.1 < row["copy_slowed_pct"] < 5 for row in by.values())
    overheads = [row["overhead_pct"] for row in document["copies"]]
    assert overheads == sorted(overheads, reverse=True)
    assert page.read_text().count("data:image/svg+xml") == 3


def test_losses_in_the_terminal(weft):
    _, out, _ = weft("explore", "--characterize", "--device", "sim:mi300x", "--gemm", "8192x8192x8192")
    assert "simulated" in out
    assert "8192x8192x8192" in out
    assert "Sharing the GPU" in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no GEMM: give its shape"),
        (["--gemm", "0x8x8"], "is not MxNxK"),
        (["--gemm", "8x8"], "is not MxNxK"),
        (["--gemm", "99999999999x8x8"], "M = 99999999999 is not valid"),
        (["--gemm", "16777216x16777216x64"], "fits on no GPU"),
        (["--gemm", "64x64x64", "--ranks", "1"], "ranks 1 is not valid"),
        (["--gemm", "64x64x64", "--ranks", "1000"], "ranks 1000 is not valid"),
        (["--gemm", "64x64x64", "--collective", "all_reduce"], "cannot be fused with a GEMM"),
        (["--gemm", "64x64x64", "--topology", "star"], "topology 'star' is not known"),
        (
            ["--gemm", "64x64x64", "--device", "sim:h100", "--topology", "pcie", "--ranks", "31"],
            "use 28 ranks",
        ),
        (["--gemm", "64x64x64", "--dtype", "int8"], "dtype 'int8' is not known"),
        (["--gemm", "64x64x64", "--device", "sim:"], "has no name"),
        (["--gemm", "64x64x64", "--device", "sim:h900"], "no GPU preset named 'h900'"),
        (["--gemm", "64x64x64", "--device", "tpu"], "device 'tpu' is not known"),
        (["--gemm", "64x64x64", "--device", "cpu"], "device cpu is not supported"),
        (["--gemm", "64x64x64", "--device", "sim:h100", "--html", "/no/such/folder/p.html"], "cannot write"),
        (["--characterize", "--device", "sim:h900"], "no GPU preset named 'h900'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(weft, words, said):
    code, out, err = weft("explore", *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
