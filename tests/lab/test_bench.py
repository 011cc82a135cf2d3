"""Suites, runner, result files and the command, with a model in place of a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from lab_fakes import ModelExecutor

from weft.bench import results, tables
from weft.bench.runner import Runner
from weft.bench.suites import GEMM, Candidate, Suite, SuiteCell, suite, suites
from weft.cli.bench import bench
from weft.errors import UnavailableError, UsageError, WeftError
from weft.execute import devices
from weft.execute.base import HungError
from weft.policy import CommRule, Policy
from weft.workload import Workload

PAPER_GRIDS = (8, 16, 32, 64, 128, 256, 512, 1024)


def small(*candidates: Candidate, share: float | None = None, cells: int = 1) -> Suite:
    base = (Candidate("sequential", mode="sequential"), Candidate("overlap"))
    return Suite(
        "small",
        "a test",
        tuple(
            SuiteCell(
                f"w{i}",
                Workload(name=f"w{i}", iterations=2),
                (*base, *candidates),
                comm_share=share,
                rounds=5,
            )
            for i in range(cells)
        ),
        8,
        100,
    )


HIGH = Candidate("priority", Policy(priority="high"))


def test_the_paper_suite_covers_the_papers_workloads():
    cells = {cell.name: cell for cell in suite("paper").cells}
    for name in ("cb-ar", "cb-a2a", "mb-ar", "mb-a2a"):
        for option in ("opt1", "opt2"):
            for grid in ("natural", *PAPER_GRIDS):
                labels = {c.label for c in cells[f"{name}-{option}-{grid}"].candidates}
                assert {"sequential", "overlap", "priority", "priority+head5"} <= labels
    assert {f"cb-ar-opt2-{n}-streams4" for n in PAPER_GRIDS} <= set(cells)
    assert any("res3" in c.label for c in cells["cb-ar-opt2-natural"].candidates)
    assert sum(cell.estimate_s(12) for cell in cells.values()) < suite("paper").budget_s <= 12 * 60


def test_the_modern_suite_covers_current_models():
    cells = suite("modern").cells
    assert len(cells) >= 16
    assert {cell.workload.collective for cell in cells} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    assert {cell.comm_share for cell in cells} == {0.5, 1.0}
    kinds = {cell.workload.compute.kind for cell in cells}
    assert {"gemm", "attention", "layer_norm", "triton_mlp"} <= kinds


def test_suites_are_consistent():
    for found in suites().values():
        names = [cell.name for cell in found.cells]
        assert len(set(names)) == len(names)
        for cell in found.cells:
            labels = [candidate.label for candidate in cell.candidates]
            assert labels[:2] == ["sequential", "overlap"]
            assert len(set(labels)) == len(labels)
            assert Workload.from_dict(json.loads(json.dumps(cell.workload.to_dict()))) == cell.workload
    assert sum(cell.estimate_s(12) for cell in suite("quick").cells) < 60
    with pytest.raises(UsageError, match="quick, paper, fig2, check, modern"):
        suite("slow")
    assert {cell.name for cell in suite("modern").only("attention*").cells} > {"attention-8b-ar-1"}
    with pytest.raises(UsageError, match="matches no workload"):
        suite("modern").only("nope*")


def test_residency_is_tried_only_for_grids_of_more_than_two_blocks_per_sm():
    tries = {cell.name: [one.label for one in cell.candidates] for cell in suite("fig2").cells}
    assert tries["cb-ar-opt2-16"] == ["sequential", "overlap", "priority"]
    assert tries["cb-ar-opt2-32"] == ["sequential", "overlap", "priority", "priority+res3", "priority+res2"]


def test_the_rule_names_the_kernel_that_is_launched():
    source = Path(devices.__file__).with_name("kernels.py").read_text()
    assert f"def {GEMM}(" in source


def test_rows_have_all_figures():
    runner = Runner(ModelExecutor(), small(HIGH), 100)
    ((_, rows),) = runner.run(set())
    sequential, plain, high = rows
    assert [row["candidate"] for row in rows] == ["sequential", "overlap", "priority"]
    assert high["chosen"]
    assert not plain["chosen"]
    assert high["time_ratio"] == pytest.approx(high["ms"] / sequential["ms"])
    refs = [high[name] for name in ("compute_ms", "comm_ms", "sequential_ms")]
    ideal = max(refs[:2]) + min(refs[:2]) / 2
    assert high["fraction_of_ideal"] == pytest.approx((refs[2] - high["ms"]) / (refs[2] - ideal))
    assert high["overlap_rate"] == 0.5
    assert high["fraction_of_own_ideal"] is not None
    assert len(high["again_samples_ms"]) == 6
    assert high["facts"] == {"sm_mhz": 1980.0}
    assert all(row["of"] == 3 for row in rows)
    json.dumps(rows, allow_nan=False)


def test_a_cell_with_its_own_ctas_has_references_with_them():
    asked = []

    class Seen(ModelExecutor):
        def measure(self, workload, policy, mode="overlap"):
            asked.append((mode, policy.max_ctas))
            return super().measure(workload, policy, mode)

    cell = next(cell for cell in suite("paper").cells if cell.name == "cb-ar-best-ctas8")
    rows = Runner(Seen(), suite("paper"), 100).cell(cell, 10)
    assert {ctas for mode, ctas in asked if mode in ("comm", "overlap", "sequential")} == {8}
    assert rows[0]["baseline_ctas"] == 8
    assert rows[0]["comm_ms"] / rows[0]["compute_ms"] == pytest.approx(0.95, rel=0.05)


def test_the_collective_is_sized_by_its_share_of_compute():
    executor = ModelExecutor()
    runner = Runner(executor, small(HIGH, share=0.5), 100)
    ((_, rows),) = runner.run(set())
    assert rows[0]["comm_ms"] / rows[0]["compute_ms"] == pytest.approx(0.5, rel=0.05)
    assert rows[0]["workload"]["bytes"] % 4 == 0


class Failing(ModelExecutor):
    def __init__(self, error, when=lambda workload, policy: policy.priority == "high"):
        super().__init__()
        self.error, self.when, self.tries = error, when, 0

    def measure(self, workload, policy, mode="overlap"):
        if self.when(workload, policy):
            self.tries += 1
            raise self.error
        return super().measure(workload, policy, mode)


def test_a_hang_is_reported_and_after_two_it_is_not_tried_again():
    executor = Failing(HungError("no end after 30 s"))
    found = list(Runner(executor, small(HIGH, cells=4), 100).run(set()))
    assert [rows[2]["status"] for _, rows in found] == ["hung"] * 4
    assert executor.tries == 2
    assert "not tried" in found[3][1][2]["problem"]
    assert all(rows[1]["chosen"] for _, rows in found)
    assert all(row["of"] == 3 for _, rows in found for row in rows)


@pytest.mark.parametrize(
    ("error", "word"),
    [(UsageError("no"), "refused"), (WeftError("no"), "failed"), (UnavailableError("no"), "unavailable")],
)
def test_one_candidate_that_cannot_run_keeps_the_others(error, word):
    ((_, rows),) = Runner(Failing(error), small(HIGH), 100).run(set())
    assert (rows[2]["status"], rows[2]["problem"]) == (word, "no")
    assert rows[1]["chosen"]


def test_a_missing_gpu_ends_the_suite_and_a_full_memory_does_not():
    from weft.execute.base import MemoryFullError

    executor = Failing(UnavailableError("NCCL 2.28 takes one rank per GPU"), when=lambda *_: True)
    with pytest.raises(UnavailableError, match="one rank per GPU"):
        list(Runner(executor, small(HIGH), 100).run(set()))
    executor = Failing(MemoryFullError("w0: does not fit"), when=lambda workload, _: workload.name == "w0")
    found = list(Runner(executor, small(HIGH, cells=2), 100).run(set()))
    assert [row["status"] for row in found[0][1]] == ["out of memory"] * 3
    assert found[1][1][2]["chosen"]


def test_the_budget_is_divided_and_missing_cells_are_reported():
    now = [0.0]

    class Slow(ModelExecutor):
        def measure(self, workload, policy, mode="overlap"):
            now[0] += 1.0
            return super().measure(workload, policy, mode)

    runner = Runner(Slow(), small(HIGH, cells=6), 60, clock=lambda: now[0])
    done = [cell.name for cell, _ in runner.run(set())]
    assert 1 <= len(done) < 6
    assert runner.missing == [f"w{i}" for i in range(len(done), 6)]


def test_result_files_survive_a_crash(tmp_path):
    path = tmp_path / "deep" / "s.jsonl"
    assert results.load_results(path) == ([], [])
    ((_, rows),) = Runner(ModelExecutor(), small(HIGH), 100).run(set())
    results.append(path, [{"header": "s"}])
    results.append(path, rows)
    with path.open("a") as file:
        file.write(json.dumps({**rows[0], "cell": "half"}) + "\n" + '{"cell": "torn')
    headers, loaded = results.load_results(path)
    assert headers == [{"header": "s"}]
    assert loaded == rows
    assert results.done_cells(loaded, "model") == {"w0"}
    assert results.done_cells(loaded, "another GPU") == set()
    results.append(path, [{**row, "cell": "later"} for row in rows])
    assert {row["cell"] for row in results.load_results(path)[1]} == {"w0", "later"}


def call(tmp_path, monkeypatch, *arguments, executor=None):
    """Runs the command as the command line would; returns the executor."""
    made = executor or ModelExecutor()
    monkeypatch.setattr(devices, "open_executor", lambda *_, **__: made)
    app = typer.Typer()
    app.command()(bench)
    app([*arguments, "--out", str(tmp_path)], standalone_mode=False)
    return made


def test_the_command_prints_one_json_object_and_resumes(tmp_path, monkeypatch, capsys):
    first = call(tmp_path, monkeypatch, "quick", "--json", "--only", "cublas*")
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert {"device", "suite", "rows"} <= set(document)
    needed = {"workload", "policy", "ms", "ci_ms", "time_ratio", "overlap_rate", "fraction_of_ideal"}
    assert all(needed <= set(row) for row in document["rows"])
    assert first.calls > 0
    second = call(tmp_path, monkeypatch, "quick", "--json", "--only", "cublas*")
    assert second.calls == 0
    assert json.loads(capsys.readouterr().out)["rows"] == document["rows"]
    third = call(tmp_path, monkeypatch, "quick", "--json", "--only", "cublas*", "--again")
    assert third.calls > 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(document["rows"])
    Policy(comm_rules=(CommRule(collective="all_reduce", ctas=4),)).save(tmp_path / "rules.json")
    options = ("quick", "--json", "--only", "cublas*", "--policy", str(tmp_path / "rules.json"))
    assert call(tmp_path, monkeypatch, *options).calls > 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == len(document["rows"]) + 1
    (ruled,) = [row for row in rows if row["candidate"] == "rules1"]
    assert ruled["policy"]["comm"]["rules"] == [{"collective": "all_reduce", "ctas": 4}]
    assert call(tmp_path, monkeypatch, *options).calls == 0
    capsys.readouterr()


def test_the_command_prints_plan_progress_and_table(tmp_path, monkeypatch, capsys):
    call(tmp_path, monkeypatch, "quick")
    captured = capsys.readouterr()
    assert "quick: five workloads" in captured.out
    assert "about" in captured.out.splitlines()[1]
    assert "cublas-8192-ar-1: " in captured.err
    assert "plain %" in captured.out
    assert "cublas-8192-ar-1" in captured.out
    header = json.loads((tmp_path / "quick.jsonl").read_text().splitlines()[0])
    assert {"machine", "command", "started", "weft"} <= set(header)


def test_the_plan_option_measures_nothing(tmp_path, monkeypatch, capsys):
    executor = call(tmp_path, monkeypatch, "paper", "--plan")
    assert executor.calls == 0
    assert "82 workloads" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("slow",), ("quick", "--budget", "-1"), ("quick", "--only", "zzz")])
def test_bad_arguments_leave_nothing_behind(arguments, tmp_path, monkeypatch):
    with pytest.raises(UsageError):
        call(tmp_path, monkeypatch, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_devices():
    with pytest.raises(UsageError, match="'tpu' is not known"):
        devices.resolve("tpu")
    with pytest.raises(UsageError, match="torchrun"):
        devices.open_executor("cpu")


def test_tables():
    ((_, rows),) = Runner(ModelExecutor(), small(HIGH), 100).run(set())
    cell = tables.by_cell(rows)["w0"]
    assert tables.chosen(cell)["candidate"] == "priority"
    assert tables.regret(cell) < 1
    assert tables.geometric_mean([0.5, 2.0, None]) == pytest.approx(1.0)
    assert tables.geometric_mean([0.5, -1.0]) is None
