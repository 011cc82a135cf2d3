"""Calibration without a GPU: another simulated GPU stands in for the real one."""

from __future__ import annotations

import pytest

from weft.cli import main as cli
from weft.errors import UsageError
from weft.execute.calibrate import FITTED, Probe, Reading, error, fit_profile, probes, take
from weft.execute.sim import SimExecutor
from weft.sim.profile import by_title, load_profile, profile

FEW = [p for p in probes() if p.mode == "comm" or p.name.startswith("gemm 64")]


def readings(model):
    run = SimExecutor("h200-ghost", model=model)
    return [Reading(p, run.measure(p.workload, p.policy, p.mode).ms) for p in FEW]


def test_the_fit_finds_figures_that_predict_the_measurements():
    truth = profile("h200").with_figures(cache_tb_s=7.0, latency_ns=800.0, ghost_all_reduce_gb_s=12.0)
    measured = readings(truth)
    before = error(profile("h200"), measured, 8)
    found = fit_profile(profile("h200"), measured, ctas=8, budget_s=20, source="a test")
    assert error(found, measured, 8) < before / 4
    run = SimExecutor("h200-ghost", model=found)
    for reading in measured:
        probe = reading.probe
        ms = run.measure(probe.workload, probe.policy, probe.mode).ms
        assert ms == pytest.approx(reading.ms, rel=0.1), probe.name
    assert found.sources["latency_ns"] == "a test"


def test_a_perfect_profile_is_left_unchanged():
    measured = readings(profile("h200"))
    assert fit_profile(profile("h200"), measured, ctas=8, budget_s=2).figures == profile("h200").figures


def test_every_fitted_figure_affects_some_probe():
    run = SimExecutor("h200-ghost")
    base = {p.name: run.measure(p.workload, p.policy, p.mode).ms for p in probes()}
    for name in FITTED:
        value = getattr(profile("h200").figures, name)
        changed = SimExecutor("h200-ghost", model=profile("h200").with_figures(**{name: 0.8 * value}))
        assert any(changed.measure(p.workload, p.policy, p.mode).ms != base[p.name] for p in probes()), name


def test_probes_that_cannot_run_are_named():
    def measure(probe: Probe) -> float:
        if probe is not FEW[0]:
            raise UsageError("no room")
        return 1.0

    found, problems = take(measure, FEW)
    assert len(found) == 1
    assert problems[0] == f"{FEW[1].name}: no room"
    with pytest.raises(UsageError, match="no probe could be measured"):
        take(measure, FEW[1:])


def test_a_driver_name_finds_its_profile():
    assert by_title("NVIDIA A100-SXM4-40GB").name == "a100"
    assert by_title("NVIDIA H200").name == "h200"
    with pytest.raises(UsageError, match="no simulator profile for GeForce"):
        by_title("GeForce")


def test_the_command_writes_a_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("weft.execute.calibrate.probes", lambda: FEW)
    monkeypatch.setattr("weft.execute.devices.has_gpu", lambda: True)
    monkeypatch.setattr("weft.execute.devices.open_executor", lambda *_, **__: SimExecutor("h200-ghost"))
    out = tmp_path / "mine.json"
    with pytest.raises(SystemExit) as end:
        cli.main(["calibrate", "--budget", "1", "--repeats", "1", "--out", str(out)])
    assert end.value.code == 0
    assert load_profile(out).name == "h200"
    assert "mean error" in capsys.readouterr().out


def test_a_simulated_gpu_is_refused(tmp_path, capsys):
    out = tmp_path / "mine.json"
    with pytest.raises(SystemExit) as end:
        cli.main(["calibrate", "--device", "sim:h200-ghost", "--out", str(out)])
    assert end.value.code == 2
    assert "is simulated" in capsys.readouterr().err
    assert not out.exists()


def test_without_a_gpu_the_error_names_it(monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMANDS", tuple({*cli.COMMANDS, "calibrate"}))
    monkeypatch.setattr("weft.execute.devices.has_gpu", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.main(["calibrate"])
    assert end.value.code == 2
    assert "this machine has none" in capsys.readouterr().err
