"""The published steps of a process: steps timed together count as that many, even at the ring's end."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from weft.shim import step_times
from weft.shim.step_times import KEPT_STEPS, StepReader, StepWriter, step_file


@pytest.mark.parametrize("together", [1, 9, KEPT_STEPS - 1, KEPT_STEPS, 3 * KEPT_STEPS + 5])
def test_steps_that_were_timed_together_are_all_there(monkeypatch, tmp_path, together):
    monkeypatch.setenv("WEFT_JOB", str(tmp_path))
    now = Mock(return_value=1_000_000)
    monkeypatch.setattr(step_times, "time", Mock(monotonic_ns=now))
    writer, before = StepWriter(3, 8), KEPT_STEPS - 4
    writer.step()
    for _ in range(before):
        now.return_value += 2_000_000
        writer.step()
    now.return_value += 5_000_000 * together
    writer.step(together)
    reader = StepReader(next(tmp_path.glob(step_file(0).replace("0", "*"))))
    try:
        found = reader.read()
    finally:
        reader.close()
    assert found.count == before + together
    assert found.times_ms == tuple([2.0] * before + [5.0] * together)[-KEPT_STEPS:]
