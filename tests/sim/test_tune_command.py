"""`weft tune` on simulated GPUs: the document, the table, the files, the verdicts and the errors."""

from __future__ import annotations

import json
import random

import pytest

from weft.errors import UsageError
from weft.execute.base import PipelineSample
from weft.gpu.specs import spec
from weft.policy import Policy
from weft.shim.apply import not_applied
from weft.tuning.candidates import PLAIN, SEQUENTIAL, Candidate, candidates, residency_choices
from weft.tuning.lab import tune_workload
from weft.workload import Compute, Workload, named

SPELLED = [
    *("--gemm", "2048x2048x2048", "--dtype", "bf16", "--tile", "64x64x64", "--grid", "32x32"),
    *("--collective", "all_reduce", "--bytes", "64MiB", "--ranks", "2", "--iterations", "4"),
]


def test_the_json_document_has_all_keys(weft):
    code, out, _ = weft("tune", *SPELLED, "--device", "sim:h200-ghost", "--json")
    document = json.loads(out)
    assert code == 0
    assert {"device", "workload", "sequential_ms", "overlap_ms", "best_ms", "ideal_ms"} <= set(document)
    assert {"fraction_of_ideal", "policy", "verdict", "candidates", "simulated"} <= set(document)
    assert document["device"] == "sim:h200-ghost"
    assert document["simulated"] is True
    for row in document["candidates"]:
        assert {"policy", "ms", "ci_ms", "kept"} <= set(row)
    times = {row["candidate"]: row["ms"] for row in document["candidates"]}
    assert document["best_ms"] == times[document["verdict"]["candidate"]]
    assert (document["sequential_ms"], document["overlap_ms"]) == (times["sequential"], times["overlap"])
    assert document["candidates"][0]["mode"] == "sequential"
    assert Workload.from_dict(document["workload"]).compute.grid == (32, 32)


def test_auto_without_a_gpu_is_a_simulated_h100(weft, monkeypatch):
    monkeypatch.setattr("weft.execute.devices.has_gpu", lambda: False)
    _, out, _ = weft("tune", *SPELLED, "--json")
    assert json.loads(out)["device"] == "sim:h100"


def test_the_table_says_simulated_and_fits_a_terminal(weft, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = weft("tune", "cb-ar", "--iterations", 2, "--device", "sim:a100")
    assert "simulated" in out
    assert "sequential" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_policy_and_page_are_written(weft, tmp_path):
    policy, page = tmp_path / "policy.json", tmp_path / "page.html"
    words = ["tune", "cb-ar", "--iterations", 4, "--device", "sim:h200-ghost", "--ranks", 2]
    _, out, _ = weft(*words, "--out", policy, "--html", page, "--json")
    assert Policy.load(policy) == Policy.from_dict(json.loads(out)["policy"])
    assert "simulated" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "cb-ar", "--device", "sim:h900"], "no GPU preset named 'h900'"),
        (["tune", "nonsense"], "workload 'nonsense' is not known"),
        (["tune"], "no workload: give a name such as cb-ar"),
        (["tune", "cb-ar", "--gemm", "1x1x1"], "both the workload"),
        (["tune", "cb-ar", "--bytes", "many"], "size 'many' is not a size"),
        (["tune", "cb-ar", "--bytes", "0", "--device", "sim:h100"], "bytes 0 is not valid"),
        (["tune", "cb-ar", "--bytes", "0.2", "--device", "sim:h100"], "bytes 0 is not valid"),
        (["tune", *SPELLED, "--device", "sim:h200-ghost", "--ranks", 40], "would hang"),
        (
            ["tune", "cb-ar", "--reading", "lab", "--tile", "128x128x128", "--device", "sim:a40"],
            "fits on no SM of NVIDIA A40",
        ),
        (["tune", "cb-ar", "--device", "sim:h100", "--out", "/no/such/folder/p.json"], "cannot write"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(weft, words, said):
    code, out, err = weft(*words)
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


class Fixed:
    """An executor that returns given times."""

    device, simulated = "fixed", False

    def __init__(self, times, noise=0.0):
        self.times, self.noise, self.draw = times, noise, random.Random(7)

    def measure(self, workload, policy, mode="overlap"):
        key = mode if mode != "overlap" else ("high" if policy.priority == "high" else "overlap")
        if self.times[key] is None:
            raise UsageError(f"{key} cannot run")
        return PipelineSample(self.times[key] * (1 + self.draw.gauss(0, self.noise)))


TIMES = {"sequential": 20.0, "overlap": 15.0, "high": 12.0, "compute": 10.0, "comm": 10.0}
TRIED = [SEQUENTIAL, PLAIN, Candidate("priority", Policy(priority="high"))]


def test_a_policy_that_beats_both_baselines_is_chosen():
    verdict = tune_workload(Fixed(TIMES), named("cb-ar"), TRIED).verdict
    assert verdict.policy == Policy(priority="high")
    assert verdict.gain_pct == pytest.approx(20)
    assert not verdict.leave


@pytest.mark.parametrize("high", [15.0, 15.5, 40.0, None])
def test_a_policy_that_does_not_beat_them_is_left_alone(high):
    verdict = tune_workload(Fixed({**TIMES, "high": high}), named("cb-ar"), TRIED).verdict
    assert verdict.leave
    assert verdict.best_ms == 15.0
    assert "Leave it alone" in verdict.text


def test_a_gain_within_the_noise_is_left_alone():
    verdict = tune_workload(Fixed({**TIMES, "high": 14.99}, noise=0.05), named("cb-ar"), TRIED).verdict
    assert verdict.leave


def test_a_workload_that_is_fastest_sequentially_is_reported_as_such():
    tuned = tune_workload(Fixed({**TIMES, "overlap": 25.0, "high": 24.0}), named("cb-ar"), TRIED)
    assert tuned.verdict.leave
    assert "do not overlap" in tuned.text


def test_a_baseline_that_cannot_run_ends_the_tune():
    with pytest.raises(UsageError, match="sequential cannot run"):
        tune_workload(Fixed({**TIMES, "sequential": None}), named("cb-ar"), TRIED)


def test_residency_is_tried_only_for_the_triton_gemm_and_below_what_fits():
    assert residency_choices(named("cb-ar").compute, spec("h200")) == [3, 2]
    assert residency_choices(Compute(kind="layer_norm", shape=(64, 64)), spec("h200")) == []
    assert residency_choices(Compute(kind="gemm"), spec("h200")) == []


def test_candidates_start_with_the_baselines_and_are_distinct():
    found = candidates(named("cb-a2a"), spec("h100"), 16, 132)
    assert found[:2] == [SEQUENTIAL, PLAIN]
    assert len({c.label for c in found}) == len(found)
    assert len({c.policy for c in found[1:]}) == len(found) - 1
    assert all(not not_applied(c.policy) for c in found)  # only policies that `weft run` can apply


def test_candidates_have_every_head_start_and_sms_kept_free_for_cublas():
    gemm = Workload(compute=Compute(kind="gemm", shape=(8192, 8192, 8192)), ranks=2)
    found = {c.label: c.policy for c in candidates(gemm, spec("h200"), 8, 66, ranks_here=2)[2:]}
    assert {"head5", "placed", "ctas4+reserve8", "reserve16"} <= set(found)
    assert {p.head_start_mode for p in found.values()} == {"none", "timed", "placed"}
    assert not any(c.policy.sm_reserve for c in candidates(named("cb-ar"), spec("h200"), 8, 66))
