"""Occupancy over time adds up to the work that ran, and appears in the page."""

from __future__ import annotations

import base64
import re
import struct
import zlib

import numpy as np
import pytest

from weft.execute.sim import SimExecutor
from weft.policy import Policy
from weft.report.occupancy import picture
from weft.sim.core import simulate_launches
from weft.workload import named


def test_blocks_and_time_are_conserved():
    executor, workload, policy = (
        SimExecutor("h100"),
        named("cb-ar").but(iterations=2),
        Policy(priority="high"),
    )
    found = executor.occupancy(workload, policy)
    changes = simulate_launches(
        executor.profile.machine(), executor.launches(workload, policy), log=True
    ).changes
    # Each block contributes its end minus its start, wherever the bins lie.
    block_seconds = -(changes["time"] * changes["change"]).sum()
    width = found.total_s / found.compute.shape[1]
    assert (found.compute + found.comm).sum() * width == pytest.approx(block_seconds, rel=1e-9)
    assert found.compute.min() >= -1e-9
    assert found.compute.shape == found.comm.shape == (executor.profile.spec.sms, 480)
    assert found.comm.max() > 0.9


def test_the_chart_has_a_row_for_each_sm_and_a_colour_for_each_kind():
    compute = np.array([[4.0, 0.0], [2.0, 0.0]])
    comm = np.array([[0.0, 1.0], [0.0, 0.0]])
    made = picture("plain", 0.001, compute, comm, most=4)
    data = base64.b64decode(made.uri.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (2, 2)
    start = data.index(b"IDAT") + 4
    (length,) = struct.unpack(">I", data[start - 8 : start - 4])
    lines = np.frombuffer(zlib.decompress(data[start : start + length]), np.uint8).reshape(2, 9)
    rows = lines[:, 1:].reshape(2, 2, 4)
    assert rows[0, 0].tolist() == [68, 119, 170, 255]
    assert rows[0, 1, :3].tolist() == [221, 170, 51]
    assert 0 < rows[1, 0, 3] < 255
    assert rows[1, 1, 3] == 0
    assert "2 SMs over 1.00 ms" in made.caption


def test_the_page_of_a_simulated_tune_shows_both(tmp_path, capsys):
    from weft.cli.main import main

    page = tmp_path / "tune.html"
    with pytest.raises(SystemExit) as ended:
        main(["tune", "cb-ar", "--device", "sim:h100", "--iterations", "2", "--html", str(page)])
    assert ended.value.code == 0
    text = page.read_text()
    assert len(re.findall(r'<img src="data:image/png;base64,', text)) == 2
    assert "img-src data:;" in text
    assert len(text) < 3_000_000
