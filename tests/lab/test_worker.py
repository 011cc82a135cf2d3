"""The worker process: results, hangs and crashes, with a model in place of a GPU."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from weft.errors import UnavailableError, UsageError
from weft.execute.base import HungError, WorkerDiedError, WrongResultError
from weft.execute.worker import RemoteExecutor, worker_environment
from weft.policy import CommRule, Policy, Rule
from weft.workload import Compute, Workload

FACTORY = "lab_fakes:ModelExecutor"
HIGH = Policy(priority="high", rules=(Rule("weft_gemm", 3),), head_start_us=5)
WORKLOAD = Workload(name="w", iterations=2)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def remote(behaviour="", **options):
    return RemoteExecutor(FACTORY, options={"behaviour": behaviour}, under_shim=False, **options)


def test_the_worker_gives_the_same_results_as_in_process():
    with remote() as executor:
        assert executor.device == "model"
        assert executor.info() == {"gpu": "model"}
        sample = executor.measure(WORKLOAD, HIGH)
        assert sample.ms > 0
        assert sample.facts == {"sm_mhz": 1980.0}
        timeline = executor.timeline(WORKLOAD, Policy())
        assert timeline.figures().overlap_pct == 50.0


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ("hang", HungError, "not finished after 1 s"),
        ("die", WorkerDiedError, "exit code 3"),
        ("crash", WorkerDiedError, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("wrong", WrongResultError, "w: wrong"),
    ],
)
def test_a_failure_costs_one_measurement(monkeypatch, behaviour, kind, words):
    with remote(behaviour) as executor:
        before = executor.measure(WORKLOAD, Policy()).ms
        with monkeypatch.context() as short:
            if behaviour == "hang":  # all other behaviours answer, however slow the machine
                short.setattr(executor, "_deadline_s", 1.0)
            with pytest.raises(kind, match=words):
                executor.measure(WORKLOAD, HIGH)
        assert executor.measure(WORKLOAD, Policy()).ms == pytest.approx(before, rel=0.1)
        assert executor.restarts == 1


def test_no_process_is_left_behind():
    executor = remote()
    pid = executor._process.pid
    executor.close()
    executor.close()
    assert not Path(f"/proc/{pid}").exists()
    gc.collect()  # close now what other tests left open, not during the count
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        remote().close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_worker_that_cannot_start_names_the_reason():
    with pytest.raises(WorkerDiedError, match="no_such_module"):
        RemoteExecutor("no_such_module:Executor", under_shim=False)
    with pytest.raises(WorkerDiedError, match="unexpected keyword"):
        RemoteExecutor(FACTORY, options={"colour": 1}, under_shim=False)


def test_without_a_gpu_the_error_names_it():
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UnavailableError, match="no GPU"):
        RemoteExecutor(under_shim=False)


def test_a_function_cannot_be_sent_to_a_worker():
    with remote() as executor, pytest.raises(UsageError, match="module:function"):
        executor.measure(Workload(compute=Compute(kind="callable", call=print)), Policy())


def test_environment_has_one_nccl_and_no_inherited_limits(tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.touch()
    env = worker_environment(
        {"NCCL_MAX_CTAS": "64", "WEFT_NCCL": str(library), "LD_PRELOAD": "/x.so", "HOME": "/h"}
    )
    assert "NCCL_MAX_CTAS" not in env
    assert env["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert env["LD_PRELOAD"] == f"/x.so:{library}"
    assert env["HOME"] == "/h"


def test_under_the_shim(tmp_path):
    pytest.importorskip("weft.shim.inject")
    library = Path(__import__("weft.shim", fromlist=["x"]).__file__).with_name("libweft_shim.so")
    if not library.is_file():
        pytest.skip("the shim is not built")
    with RemoteExecutor(FACTORY, options={"behaviour": ""}) as executor:
        assert executor.measure(WORKLOAD, HIGH).ms > 0
        mapped = Path(f"/proc/{executor._process.pid}/maps").read_text()
        assert str(library) in mapped
        assert b"NCCL_TUNER_PLUGIN=" not in Path(f"/proc/{executor._process.pid}/environ").read_bytes()
        assert executor.measure(WORKLOAD, Policy(comm_rules=(CommRule(ctas=4),))).ms > 0
        given = Path(f"/proc/{executor._process.pid}/environ").read_bytes()
        assert b"NCCL_TUNER_PLUGIN=STATIC_PLUGIN" in given  # NCCL asks the shim's plugin
        assert executor.restarts == 0


def test_a_suite_through_worker_and_executor():
    """All of `weft bench` except the GPU."""
    pytest.importorskip("torch")
    from weft.bench.runner import Runner
    from weft.bench.suites import suite

    with RemoteExecutor("lab_fakes:make_lab", under_shim=False) as executor:
        runner = Runner(executor, suite("check"), 60)
        rows = [row for _, found in runner.run(set()) for row in found]
    assert len(rows) == 16
    assert all(row["status"] == "ok" for row in rows), [row["problem"] for row in rows]
    assert all(row["ms"] > 0 for row in rows)
    assert sum(row["chosen"] for row in rows) == len({row["cell"] for row in rows})
    assert executor.restarts == 0
