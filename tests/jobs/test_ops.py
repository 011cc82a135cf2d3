"""weft.ops on real processes over gloo: every schedule of every operation, and what happens when ranks differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch_programs import run_torch_program

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "ops_ranks.py"


def ranks(count: int, folder: Path, *checks: str, timeout_s: float = 60.0) -> None:
    output, errors = folder / "output", folder / "errors"
    code = run_torch_program(
        [PROGRAM, count, folder, timeout_s, *checks],
        {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_STORE": str(folder / "verdicts.sqlite")},
        output,
        errors,
        timeout_s=240,
    )
    assert code == 0, errors.read_text()[-4000:] + output.read_text()[-500:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, ["again_and_again", "tuned", "compiled"]),
        (3, ["again_and_again", "disagreements"]),
        (4, []),
        pytest.param(8, [], marks=pytest.mark.slow),
    ],
    ids=["2", "3", "4", "8"],
)
def test_every_schedule_equals_the_serial_reference(count, more, tmp_path):
    """Also, in the same processes: repeated calls, a stored verdict, torch.compile, ranks that disagree."""
    ranks(count, tmp_path, "every_schedule", "uneven_blocks", *more)


@pytest.mark.timeout(300)
def test_a_rank_that_changes_its_mind_later(tmp_path):
    ranks(2, tmp_path, "late_disagreement")


@pytest.mark.timeout(300)
def test_what_one_rank_changes_alone_and_calls_that_are_refused(tmp_path):
    ranks(3, tmp_path, "changes_alone", "odd_calls")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", ["peer_dies", "fails_midway", "first_rank_dies"])
def test_a_rank_that_leaves_or_fails_is_named_to_all_others(check, tmp_path, monkeypatch):
    if check == "first_rank_dies":
        monkeypatch.setenv("OPS_STORE", "tcp")
    ranks(3, tmp_path, check, timeout_s=20.0)
