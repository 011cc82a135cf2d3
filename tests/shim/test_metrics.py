"""`weft run --metrics`: correct figures for Prometheus from a separate process, and nothing in the job."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_nccl_routes import fake_nccl  # noqa: F401 (a fixture)
from test_top import start, until  # noqa: F401 (a fixture)

from weft.errors import UsageError
from weft.monitor.exporter import Address, metrics_address
from weft.monitor.metrics import JobCollector

prometheus = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "jobs"))
from ports import held_port  # noqa: E402

BOARD = Path(__file__).parents[2] / "examples/grafana/weft.json"
PAUSING = """
    import os, sys, time
    comm, gemm = kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), kernel("gemm")
    for _ in range(7):
        launch(comm, grid=12, stream=7)
        launch(gemm)
    open("modules", "w").write(" ".join(sys.modules) + " " + " ".join(os.environ))
    open("done", "w").close()
    while not os.path.exists("stop"):
        time.sleep(0.01)
"""


@pytest.fixture
def environment(environment):
    """The environment with this Python's import path, to find prometheus_client."""
    home = Path(prometheus.__file__).parents[1]
    return {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{home}"}


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


def scrape(port: int, host: str = "127.0.0.1") -> dict[str, list]:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def test_figures_equal_those_of_the_statistics_and_nothing_is_in_the_program(start, port):  # noqa: F811
    job = start(PAUSING, "--metrics", str(port), "--priority", "high")
    until((job.folder / "done").exists)
    found = scrape(port)
    text = repr(found)
    stats = job.stop()
    (launches,) = found["weft_kernel_launches"]
    assert launches.value == stats["launches"] == 14
    assert found["weft_collective_launches"][0].value == stats["comm_launches"] == 7
    assert found["weft_collective_ctas"][0].value == 12
    assert found["weft_policy_info"][0].labels["policy"] == "priority"
    assert launches.labels.keys() == {"job", "rank", "pid"}
    assert not re.search(r"python|/tmp|stats\.json|HOME", text)  # no command line and no path
    assert "prometheus" not in (job.folder / "modules").read_text().lower()
    with pytest.raises(OSError, match=r"refused|111"):
        scrape(port)


def test_it_is_served_on_the_loopback_only_and_a_port_in_use_is_refused(start, port, tmp_path):  # noqa: F811
    job = start(PAUSING, "--metrics", str(port))
    until((job.folder / "done").exists)
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    second = subprocess.run(
        [sys.executable, "-m", "weft", "run", "--metrics", str(port), "--", "touch", "began"],
        cwd=tmp_path,
        env=job.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (second.returncode, "give another port" in second.stderr) == (2, True)
    assert not (tmp_path / "began").exists()
    job.stop()


def test_the_exporter_ends_with_a_weft_run_that_is_killed(start, port):  # noqa: F811
    job = start(PAUSING, "--metrics", str(port))
    until((job.folder / "done").exists)
    assert scrape(port)
    job.process.kill()
    job.process.wait()

    def gone() -> bool:
        try:
            scrape(port)
        except (OSError, http.client.HTTPException):  # HTTPException: it ended in the middle of an answer
            return True
        time.sleep(0.05)
        return False

    until(gone)


@pytest.mark.parametrize(
    ("text", "env", "expected"),
    [
        ("9400", {}, Address("127.0.0.1", 9400)),
        ("9400", {"SLURM_LOCALID": "3"}, Address("127.0.0.1", 9403)),
        ("9400", {"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, Address("127.0.0.1", 9402)),
        ("9400", {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, Address("127.0.0.1", 9401)),
        ("9400", {"SLURM_LOCALID": ""}, Address("127.0.0.1", 9400)),
        ("9400", {"SLURM_LOCALID": "²"}, Address("127.0.0.1", 9400)),
        ("0.0.0.0:9400", {}, Address("0.0.0.0", 9400)),
        ("[::1]:9400", {}, Address("::1", 9400)),
    ],
)
def test_the_port_of_each_process(text, env, expected):
    assert metrics_address(text, env) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "70000", "host:9400", "9400x", "65535", "²"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError):
        metrics_address(text, {"LOCAL_RANK": "1"})


def test_without_the_library_the_fix_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'prometheus_client' else real(name, *more)\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "weft", "run", "--metrics", "9400", "--", "true"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "pip install prometheus_client" in done.stderr) == (2, True)


def test_every_metric_of_the_board_is_exported(start):  # noqa: F811
    board = json.loads(BOARD.read_text())
    used = set(re.findall(r"weft_\w+", json.dumps(board)))
    from weft.monitor.sample import JobSample, RankSample, TuningSample

    rank = RankSample(
        **{
            "rank": 0,
            "pid": 1,
            "command": "c",
            "alive": True,
            "launches": 1,
            "comm_launches": 1,
            "shaped": 0,
        },
        **{"comm_bytes": 1, "launches_per_s": 1, "collectives_per_s": 1, "comm_bytes_per_s": 1, "ctas": 8},
        **{"policy": "overlap", "steps": 3, "step_ms": 2.0, "step_p10_ms": 1.0, "step_p90_ms": 3.0},
    )
    tuning = TuningSample(phase="over", trying="", state="kept", text="", gain_pct=3.0)
    sample = JobSample(
        **{"job": "j", "folder": "f", "pid": 1, "command": "c", "state": "running", "elapsed_s": 1.0},
        **{"policy": {}, "policy_label": "overlap", "launches_per_s": 1, "collectives_per_s": 1},
        **{
            "comm_bytes_per_s": 1,
            "step_ms": 2.0,
            "step_spread_pct": 1.0,
            "exposed_pct": 10.0,
            "tuning": tuning,
        },
        **{"totals": {"shape_failures": 0}, "ranks": [rank]},
    )

    class Once:
        def sample(self):
            return sample

    registry = prometheus.CollectorRegistry()
    registry.register(JobCollector(Once()))
    text = prometheus.generate_latest(registry).decode()
    exported = set(re.findall(r"^(weft_\w+)\{", text, re.MULTILINE))
    assert used <= exported
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert 'weft_step_seconds{job="j",pid="1",rank="0"} 0.002' in text
