"""`weft report DIR`: finds results, writes the page atomically, and says plainly when there is nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import analysis_document, bench_document, small_timeline, tune_document

from weft.cli.report import report
from weft.errors import InputError, UsageError
from weft.ops.case import Case
from weft.ops.characterize import simulated
from weft.ops.explore import explore
from weft.report.find import COMMANDS_SHOWN, find_results, result_kind
from weft.report.folder import NO_TIMELINE
from weft.reproduce.figure import HELD_OUT, INSPECTED, Reproduced, Reproduction, Target


def write(folder: Path, name: str, *documents: object) -> None:
    (folder / name).write_text("\n".join(json.dumps(document) for document in documents) + "\n")


def test_documents_are_known_by_their_keys() -> None:
    analysis = analysis_document([small_timeline()])
    assert result_kind(analysis) == "analysis"
    assert result_kind({"before": analysis, "after": analysis, "change": {}}) == "comparison"
    assert result_kind(bench_document()) == "bench"
    assert result_kind(tune_document()) == "tune"
    for foreign in (
        {},
        [],
        3,
        None,
        {"rows": [1]},
        {"rows": [{"a": 1}]},
        {"ranks": 3, "advice": []},
        {"candidates": []},
    ):
        assert result_kind(foreign) is None
    assert result_kind({"before": {}, "after": {}}) is None


def test_the_page_of_a_folder_has_every_result(tmp_path, capsys) -> None:
    write(tmp_path, "a.json", analysis_document([small_timeline()]))
    write(tmp_path, "b.json", {**tune_document(), "device": "sim:h100"})
    write(tmp_path, "rows.jsonl", {"device": "NVIDIA H200", "suite": "night"}, *bench_document()["rows"])
    write(tmp_path, "foreign.json", {"hello": 1})
    (tmp_path / "notes.txt").write_text("no result")
    report(tmp_path, None)
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "report.html")
    assert said.err == f"weft: skipped foreign.json: not a result of {COMMANDS_SHOWN}\n"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for expected in ("Analysis", "Tune cb-ar", "Bench night", NO_TIMELINE, 'class="badge">simulated<'):
        assert expected in page
    assert page.count("<article") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.json", "b.json", "foreign.json", "notes.txt", "report.html", "rows.jsonl",
    ]  # fmt: skip


def reproduction() -> Reproduction:
    cells = [Reproduced(id="fig2", cell=f"{x}x{y}", published=0.9, ours=x / 4, basis=INSPECTED)
             for x in (1, 2) for y in (1, 2)]  # fmt: skip
    claim = Reproduced(id="claim", cell="gain", published=None, ours=None, basis=HELD_OUT, note="no GPU")
    ranged = replace(claim, cell="range", ours=1.5, ours_range=(1.0, 2.0), sign_right=True, unit="%")
    return Reproduction(
        paper="2606.09200",
        title="A paper",
        device="sim:a40-paper",
        simulated=True,
        figures=(*cells, claim, ranged),
        summary={"mean": 0.1},
        bars=(Target(name="mean error", value=0.1, target="below 0.2", met=True, note="of all cells"),),
        assumptions=("eight CTAs",),
        findings=("the sign holds",),
    )


def test_explorations_and_reproductions_are_shown(tmp_path, capsys) -> None:
    case = Case(operation="all_gather_matmul", m=1024, n=1024, k=1024, ranks=2, gpu="h100")
    write(tmp_path, "explore.json", explore(case).to_dict())
    write(tmp_path, "losses.json", simulated("h100", [(1024, 1024, 1024)], "bf16"))
    write(tmp_path, "reproduce.json", reproduction().to_dict())
    report(tmp_path, None)
    assert capsys.readouterr().err == ""
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<article") == 3
    for expected in (
        "Explore all_gather_matmul 1024x1024x1024",
        "Losses on",
        "arXiv:2606.09200",
        "1.5 (1 to 2)",
    ):
        assert expected in page


def test_a_reproduction_is_read_back_as_it_was() -> None:
    assert Reproduction.from_dict(json.loads(json.dumps(reproduction().to_dict()))) == reproduction()


@pytest.mark.parametrize("damage", [{"figures": [{}]}, {"bars": None}, {"figures": [3]}, {"summary": 1}])
def test_a_damaged_reproduction_is_skipped_with_the_reason(tmp_path, damage) -> None:
    write(tmp_path, "bench.json", bench_document())
    write(tmp_path, "broken.json", {**reproduction().to_dict(), **damage})
    (reason,) = find_results(tmp_path).skipped
    assert reason.startswith("broken.json: not a result of `weft reproduce`")


def test_out_says_where(tmp_path, capsys) -> None:
    write(tmp_path, "bench.json", bench_document())
    target = tmp_path / "deep.html"
    report(tmp_path, target)
    assert capsys.readouterr().out.strip() == str(target)
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(UsageError, match="cannot write"):
        report(tmp_path, tmp_path / "missing" / "x.html")


def test_a_bench_that_was_interrupted_is_still_shown(tmp_path) -> None:
    rows = bench_document()["rows"]
    lines = [json.dumps(row) for row in rows[:3]] + [json.dumps(rows[3])[:20]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (result,) = find_results(tmp_path).results
    assert (result.kind, len(result.document["rows"])) == ("bench", 3)


def test_the_result_file_of_a_bench_is_understood(tmp_path) -> None:
    def row(device: str, cell: str, candidate: str, ms: float | None, **more: object) -> dict:
        blank = {"suite": "night", "workload": {"gemm": [1, 2, 3]}, "policy": {"version": 1}, "status": "ok"}
        ratio = None if ms is None else ms / 10
        return {
            **blank,
            "device": device,
            "cell": cell,
            "candidate": candidate,
            "ms": ms,
            "time_ratio": ratio,
            **more,
        }

    rows = [
        row("sim:h100", "cb-ar", "overlap", 8.0, simulated=True),
        row("NVIDIA H200", "cb-ar", "overlap", 9.5),
        row("NVIDIA H200", "cb-ar", "overlap", 9.0),
        row("NVIDIA H200", "cb-ar", "priority", 7.0, chosen=True, ci_ms=[6.9, 7.1]),
        row("NVIDIA H200", "cb-ar", "all SMs", None, status="hung", problem="did not end in 60 s"),
    ]
    lines = [json.dumps({"header": "night", "device": "NVIDIA H200"}), *map(json.dumps, rows)]
    (tmp_path / "night.jsonl").write_text(lines[0] + '\n{"broken": \n' + "\n".join(lines[1:]) + "\n")
    modelled, measured = find_results(tmp_path).results
    assert [len(modelled.document["rows"]), len(measured.document["rows"])] == [1, 3]
    assert [row["ms"] for row in measured.document["rows"]] == [9.0, 7.0, None], "the last run counts"
    report(tmp_path, None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('class="badge">simulated<') == 1
    assert page.count("<h1") == 2
    for expected in ("Bench night", "cb-ar", "priority", "did not end in 60 s", "7 ms ±0.1"):
        assert expected in page


def test_an_empty_or_foreign_folder_is_one_clear_line(tmp_path) -> None:
    with pytest.raises(InputError, match="no results in"):
        report(tmp_path, None)
    write(tmp_path, "x.json", [1, 2])
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"none of its 4 \.json") as caught:
        report(tmp_path, None)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(InputError, match="is not a folder"):
        report(tmp_path / "absent", None)


def chrome_trace() -> dict:
    """Two kernels and an all-reduce as a profiler writes them."""
    spans = (
        ("gemm", 0.0, 30.0, 7),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20.0, 40.25, 20),
        ("gemm", 70.0, 5.0, 7),
    )
    return {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur,
             "args": {"device": 0, "stream": stream, "correlation": i}}
            for i, (name, ts, dur, stream) in enumerate(spans)
        ]
    }  # fmt: skip


def test_the_timeline_comes_from_the_traces_if_they_still_agree(tmp_path) -> None:
    analyze = pytest.importorskip("weft.trace").analyze
    (tmp_path / "trace").mkdir()
    source = tmp_path / "trace" / "rank0.json"
    source.write_text(json.dumps(chrome_trace()))
    write(tmp_path, "a.json", analyze(source).to_json())
    report(tmp_path, None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'class="timeline"' in page
    assert NO_TIMELINE not in page
    changed = chrome_trace()
    changed["traceEvents"][0]["dur"] = 31.0
    source.write_text(json.dumps(changed))
    report(tmp_path, None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'class="timeline"' not in page
    assert NO_TIMELINE in page
