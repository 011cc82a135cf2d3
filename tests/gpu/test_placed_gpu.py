"""The exact head start and SMs kept free on a real GPU: bounded, correct, counted."""

from __future__ import annotations

import json

import pytest

PLACED = {"version": 1, "comm": {"head_start": "placed"}}
RESERVE = {"version": 1, "compute": {"sm_reserve": 16}}


@pytest.fixture
def pipeline(run_program, nccl, tmp_path):
    """Runs programs/placed.py under a policy; returns its output and the shim's counts."""

    def run(policy, *arguments, **env):
        file, stats = tmp_path / "policy.json", tmp_path / "stats.json"
        file.write_text(json.dumps(policy))
        done = run_program(
            "placed.py", *arguments, weft=("--policy", str(file), "--stats", str(stats)), env=env
        )
        return json.loads(done.stdout.splitlines()[-1]), json.loads(stats.read_text())

    return run


def test_results_are_those_of_plain_overlap_and_every_wait_ends_in_time(pipeline):
    plain, _ = pipeline({"version": 1})
    placed, stats = pipeline(PLACED)
    assert (placed["gemm"], placed["sums"]) == (plain["gemm"], plain["sums"])
    assert stats["placed_events"] == stats["comm_launches"] > 0
    assert stats["head_starts"] + stats["placed_ready"] > 0
    assert stats["placed_failures"] == stats["placed_timeouts"] == 0


def test_compute_goes_on_where_the_collectives_cannot_start(pipeline):
    """Each collective is queued behind a second of other work: compute must not wait for it."""
    placed, stats = pipeline(PLACED, "--blocked")
    compute_end = placed["rows"][-1][1]
    first_collective_end = placed["rows"][0][2]
    assert compute_end < first_collective_end
    assert stats["placed_timeouts"] > 0


def test_captured_collectives_replay_as_they_are(pipeline):
    plain, _ = pipeline({"version": 1}, "--graph")
    placed, stats = pipeline(PLACED, "--graph")
    assert placed["sums"] == plain["sums"]
    assert stats["placed_captured"] > 0


@pytest.mark.parametrize("library", [(), ("--bias",)], ids=["cublas", "cublaslt"])
def test_gemms_leave_sms_free_and_give_right_results(pipeline, library):
    plain, _ = pipeline({"version": 1}, *library)
    reserved, stats = pipeline(RESERVE, *library)
    assert reserved["sums"] == plain["sums"]
    assert reserved["error"] < 1e-2
    assert stats["sm_reserved"] > 0
    assert stats["sm_reserve_failures"] == 0


def test_reproducible_results_stay_bit_identical(pipeline):
    plain, _ = pipeline({"version": 1}, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    reserved, stats = pipeline(RESERVE, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert reserved["gemm"] == plain["gemm"]
    assert stats["sm_reserved"] == 0
    assert stats["sm_reserve_determinism"] > 0
