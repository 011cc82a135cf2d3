"""Real traces with figures known to the nanosecond: V100 to H200 and MI300X, PyTorch 1.12 to 2.9."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft

TRACES = Path(__file__).parents[1] / "data/traces"

# Per rank: communication, compute, overlap, exposed (µs) and overlap in percent.
EXPECTED = {
    "a100_world8.json.gz": [(163535.000, 281336.000, 75614.000, 87921.000, 46.2372)],
    "a100_nccl_sizes.json.gz": [(46876.493, 115655.847, 7317.025, 39559.468, 15.6092)],
    "a100_world16.json.gz": [(187870.000, 210998.000, 2553.000, 185317.000, 1.3589)],
    "mi300x_resnet.json.gz": [(71516.523, 25739.303, 15891.299, 55625.224, 22.2205)],
    "v100_dlrm_8ranks": [
        (5798, 1034, 261, 5537, 4.5016),
        (11336, 1246, 280, 11056, 2.4700),
        (3492, 1068, 275, 3217, 7.8751),
        (9774, 1240, 324, 9450, 3.3149),
        (6587, 1126, 37, 6550, 0.5617),
        (6251, 1041, 40, 6211, 0.6399),
        (3558, 1051, 269, 3289, 7.5604),
        (1746, 1059, 166, 1580, 9.5074),
    ],
    "h200_ddp_2ranks": [
        (48199.269, 46387.432, 28588.178, 19611.091, 59.3125),
        (31032.513, 47920.187, 21403.719, 9628.794, 68.9719),
    ],
    "h200_fsdp_2ranks": [
        (76180.847, 32642.678, 21681.382, 54499.465, 28.4604),
        (75946.283, 33139.678, 23451.265, 52495.018, 30.8788),
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_figures_are_exact_and_causes_add_up(name):
    document = weft.analyze(TRACES / name).to_json()
    assert [rank["rank"] for rank in document["ranks"]] == (
        list(range(len(EXPECTED[name]))) if len(EXPECTED[name]) > 1 else [document["ranks"][0]["rank"]]
    )
    for rank, expected in zip(document["ranks"], EXPECTED[name], strict=True):
        keys = ("comm_us", "compute_us", "overlap_us", "exposed_comm_us", "overlap_pct")
        assert tuple(rank[key] for key in keys) == expected
        # Add up in whole nanoseconds, since the document's microseconds have three decimals.
        ns = [round(us * 1000) for us in rank["attribution"].values()]
        assert sum(ns) == round(rank["exposed_comm_us"] * 1000)
        of_collectives = [round(c["exposed_us"] * 1000) for c in rank["collectives"]]
        assert sum(of_collectives) == round(rank["exposed_comm_us"] * 1000)
        assert not rank["partial"]


def test_ranks_on_one_host_share_a_clock():
    document = weft.analyze(TRACES / "v100_dlrm_8ranks").to_json()
    assert all(abs(rank["clock_offset_us"]) < 5 for rank in document["ranks"])
    waiting = sum(rank["attribution"]["slower_rank_us"] for rank in document["ranks"])
    assert waiting > 0.9 * sum(rank["exposed_comm_us"] for rank in document["ranks"])


def test_bytes_and_bus_bandwidth_of_a_real_all_reduce():
    (row,) = weft.analyze(TRACES / "h200_ddp_2ranks").to_json()["ranks"][0]["collectives"]
    assert (row["kind"], row["count"], row["bytes"]) == ("all_reduce", 26, 3221487616)
    assert row["busbw_gbps"] == pytest.approx(3221487616 / 48199269, abs=1e-3)


def test_a_cap_on_ctas_and_a_collective_behind_compute_are_found():
    advice = {item["control"]: item for item in weft.analyze(TRACES / "h200_fsdp_2ranks").to_json()["advice"]}
    low, high = advice["priority"]["gain_us"]
    assert 0 < low < high
    assert "--priority high" in advice["priority"]["command"]
    assert "NCCL_MIN_CTAS" in advice["min_ctas"]["command"]  # NCCL_MAX_CTAS alone only lowers the number


def test_nothing_to_gain_is_an_answer():
    first = weft.analyze(TRACES / "v100_dlrm_8ranks").to_json()["advice"][0]
    assert (first["control"], first["gain_us"]) == ("none", [0.0, 0.0])
    assert "waited behind compute" in first["detail"]
