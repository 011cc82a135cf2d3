"""Collectives on copy engines (comm.engine dma), real NCCL, ranks on one GPU: correctness only.

A copy within one GPU runs on SMs, so no times are compared. Needs torch and NCCL 2.31.2 or newer, which
places two ranks on one GPU and lets two ranks copy (WEFT_TEST_NCCL). Every run has a deadline.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from test_frameworks_gpu import EXAMPLES, SIZES, start

from weft.policy import Policy

pytest.importorskip("torch")

STEPS = 24


@pytest.fixture(scope="module", params=["start", "live"])
def ghosts(request, nccl, tmp_path_factory):
    """Results with copies requested at the start, by communicator, and in a running job, by call."""
    folder = tmp_path_factory.mktemp("ghosts")
    policy = Policy(engine="dma") if request.param == "start" else Policy()
    policy.save(folder / "policy.json")
    program = Path(__file__).parent / "programs" / "engine_ghosts.py"
    command = [sys.executable, "-m", "weft", "run", "--policy", str(folder / "policy.json"), "--"]
    said = run([*command, sys.executable, str(program), request.param], {"WEFT_NCCL": nccl})
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    print(request.param, json.dumps(found, indent=1))
    if not all(found["windows"]):
        pytest.skip("this NCCL gives no symmetric windows to ranks on one GPU")
    return found


def run(command: list[str], env: dict[str, str], deadline_s: float = 60) -> str:
    said = start(command, {"NCCL_DEBUG": "WARN", **env}, deadline_s)
    print(said[-4000:])
    return said


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_what_lies_in_windows_is_copied_without_a_kernel(ghosts, name):
    found = ghosts[name]
    assert found["equal"]
    assert found["launched"] == 0, found
    assert found["engine"] == {"engine_copied": 10}, found


@pytest.mark.parametrize(
    ("name", "reason"), [("outside", "engine_no_window"), ("all_reduce", "engine_other_kind")]
)
def test_what_cannot_be_copied_is_launched_and_counted(ghosts, name, reason):
    found = ghosts[name]
    assert found["equal"]
    assert found["launched"] > 0
    assert found["engine"] == {reason: 10}, found


def torchrun(nccl: str, steps: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of an FSDP2 job with two ranks on this GPU."""
    script = [str(EXAMPLES / "fsdp2.py"), *SIZES, "--steps", str(steps)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *script,
    ]
    env = {
        "LD_PRELOAD": ":".join(filter(None, (nccl, os.environ.get("LD_PRELOAD")))),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "4",
        "WEFT_LOG": "debug",
    }
    return command, env


def test_fsdp2_gathers_by_copy_engines_with_the_same_losses(nccl, tmp_path):
    """An unmodified program under torchrun: once the policy is in force, no NCCL kernel gathers."""
    Policy(engine="dma").save(tmp_path / "dma.json")
    command, env = torchrun(nccl, STEPS)
    run([*command, "--losses", str(tmp_path / "plain")], env)
    weft = [sys.executable, "-m", "weft", "run", "--policy", str(tmp_path / "dma.json")]
    weft += ["--stats", str(tmp_path / "stats.json"), "--trace", str(tmp_path / "traces")]
    weft += ["--trace-after", "17", "--trace-steps", "2", "--"]
    run([*weft, *command, "--losses", str(tmp_path / "dma")], env, 90)
    stats = json.loads((tmp_path / "stats.json").read_text())
    kernels = {kernel["name"]: kernel["launches"] for kernel in stats["kernels"] if kernel["kind"] == "comm"}
    print(stats["engine"], kernels)
    assert (tmp_path / "dma").read_text() == (tmp_path / "plain").read_text()
    assert stats["engine"]["copied"] > stats["engine_no_window"], stats["engine"]  # the first steps'
    assert stats["engine_kernels"] == stats["engine_nodes"] == 0, stats["engine"]
    assert stats["engine"]["traced"] == {}
    traces = [json.loads(path.read_text()) for path in (tmp_path / "traces").glob("weft.*.json")]
    assert len(traces) == 2
    for trace in traces:
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        gathers = [name for name in names if "nccl" in name.lower() and "AllGather" in name]
        assert not gathers
        assert any("ReduceScatter" in name for name in names), sorted(set(names))[:20]


def test_live_tuning_tries_copy_engines_and_keeps_the_losses(nccl, tmp_path):
    """Ranks that share a GPU prove nothing about speed: it must be tried, and kept or undone on both."""
    command, env = torchrun(nccl, 160)
    run([*command, "--losses", str(tmp_path / "plain")], env)
    weft = [sys.executable, "-m", "weft", "run", "--tune", "--stats", str(tmp_path / "stats.json"), "--"]
    env |= {"WEFT_STORE": str(tmp_path / "store"), "WEFT_LOG": "info"}
    run([*weft, *command, "--losses", str(tmp_path / "tuned")], env, 120)
    stats = json.loads((tmp_path / "stats.json").read_text())
    tried = {found["label"]: found["note"] for found in stats["tuning"]["candidates"]}
    print(stats["tuning"]["text"], tried, stats["engine"])
    assert (tmp_path / "tuned").read_text() == (tmp_path / "plain").read_text()
    if any("dma" in label.split("+") and not note for label, note in tried.items()):
        assert stats["engine"]["copied"] > 0
    assert stats["engine_kernels"] == 0
