"""`weft doctor` on a machine with a GPU: it finds everything, and priority is honoured."""

import json
import subprocess
import sys

import pytest

from weft.doctor import diagnose
from weft.errors import UnavailableError
from weft.gpu.driver import load_driver
from weft.gpu.priority import measure_priority
from weft.gpu.probe import probe


@pytest.fixture(scope="module")
def driver():
    try:
        return load_driver()
    except UnavailableError as error:
        pytest.skip(str(error))


def test_the_probe_sees_the_gpu(driver):
    gpus = probe()
    assert len(gpus) == driver.device_count() > 0
    assert [g.peers[g.index] for g in gpus] == ["self"] * len(gpus)
    assert all(g.spec.sms > 0 and g.memory_bytes > 1 << 30 and g.bus_id for g in gpus)


def test_priority_overtakes_a_full_gpu(driver):
    effect = measure_priority(driver)
    assert effect.conclusive, effect
    assert effect.ratio > 2, effect


def test_doctor_finds_the_machine(driver):
    findings = {check.name: check for check in diagnose()}
    for name in ("driver", "gpus", "priority", "placed"):
        assert findings[name].status == "ok", findings[name]
    assert "sooner" in findings["priority"].detail


def test_doctor_leaves_no_cuda_context_in_the_caller(driver):
    code = (
        "from weft.doctor import diagnose; diagnose();assert 'libcuda' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_launch_blocking_is_a_failure_here(driver):
    code = (
        "import json, os; os.environ['CUDA_LAUNCH_BLOCKING'] = '1';"
        "from weft.doctor import diagnose; print(json.dumps([c.to_dict() for c in diagnose()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    findings = {c["name"]: c for c in json.loads(done.stdout)}
    assert findings["env:CUDA_LAUNCH_BLOCKING"]["status"] == "fail"
