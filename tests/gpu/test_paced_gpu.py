"""Paced collectives on a GPU: correct results, the node's times, recognized by the shim. About 35 s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "benchmarks" / "node" / "smoke.py"


@pytest.fixture(scope="module")
def smoke():
    """The output of benchmarks/node/smoke.py under `weft run`."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "weft", "run", "--", sys.executable, str(SMOKE)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_results_are_those_of_ranks_with_equal_data(smoke):
    assert smoke["results"]["wrong"] == []


def test_collectives_last_as_long_as_on_the_node(smoke):
    rows = smoke["durations"]["rows"]
    assert len(rows) > 20
    for kind, size, limit, ctas, asked_us, took_us in rows:
        # Two events and the launch between them add a few microseconds.
        assert 0.95 * asked_us < took_us < 1.1 * asked_us + 15, (kind, size, limit, ctas)


def test_the_kernel_takes_an_sm_as_nccls_does_and_the_shim_knows_its_communicators(smoke):
    assert smoke["timer"]["registers"] in range(88, 97)
    assert smoke["timer"]["blocks_per_sm"] == 1
    assert {found["path"] for found in smoke["seen"]} == {"config"}
    assert max(found["collectives"] for found in smoke["seen"]) > 100


def test_ctas_saturate_where_published_ones_do(smoke):
    """A ring on 8 H100 reaches 347 of 353 GB/s with 16 CTAs; one step off on the ladder is 24 or 8."""
    assert smoke["saturation"]["saturates_at"] in (8, 16, 24)


def test_copy_engines_are_delays_that_take_no_cta(smoke):
    found = smoke["copies"]
    assert found["right"]
    for kind, size, engine, asked_us, took_us, kernels, copied in found["rows"]:
        assert 0.97 * asked_us < took_us < 1.1 * asked_us + 15, (kind, size, engine)
        assert (kernels == 0, copied > 0) == ((True, True) if engine == "dma" else (False, False))
    # The driver's local copy takes SMs for part of the time: less than a kernel with all CTAs all the time.
    assert found["gemm_slowed_pct"]["all_gather dma"] < 25


def test_fused_operations_with_peers_of_the_node(smoke):
    found = smoke["peers"]
    assert found["wrong"] == []
    serial = found["us"]["all_gather_matmul serial dma"]
    asked = found["gemm_us"] + found["transfer_us"]["copies"]
    assert 0.95 * asked < serial < 1.15 * asked + 60
    assert min(us for key, us in found["us"].items() if "all_gather" in key and "dma" in key) < serial


def test_fsdp2_gathers_without_ctas_and_with_the_same_losses_under_the_policy(tmp_path):
    from test_frameworks_gpu import SIZES, start

    from weft.policy import Policy

    ghosts = [sys.executable, "-m", "weft.comm.ghost", "--node", "dgx-h100"]
    job = [*ghosts, str(ROOT / "examples" / "fsdp2.py"), *SIZES, "--steps", "40"]
    for engine in ("sm", "dma"):
        Policy(engine=engine).save(tmp_path / f"{engine}.json")
        weft = [sys.executable, "-m", "weft", "run", "--policy", str(tmp_path / f"{engine}.json")]
        weft += ["--stats", str(tmp_path / "stats.json"), "--"]
        said = start([*weft, *job, "--losses", str(tmp_path / engine)], {}, 90)
    stats = json.loads((tmp_path / "stats.json").read_text())
    print(said[-2000:], stats["engine"])
    assert stats["engine"]["copied"] > 40, stats["engine"]
    assert stats["engine_kernels"] == 0, stats["engine"]
    assert stats["engine"]["represented_as"][0].startswith("delay with a local copy")
    assert (tmp_path / "dma").read_text() == (tmp_path / "sm").read_text()
