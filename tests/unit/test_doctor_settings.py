"""What `weft doctor` knows about NCCL releases, compile flags, clocks, containers, commands, traces and jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import contract
import pytest
from test_doctor import H200, HEALTHY, answers

import weft
from weft.doctor import diagnose, libraries
from weft.doctor.command_checks import understand
from weft.doctor.libraries import Torch
from weft.doctor.nccl_checks import REGRESSIONS
from weft.doctor.torch_checks import OVERLAP, OVERLAP_PASSES, inductor_default
from weft.doctor.traffic_checks import StepCalls, job_checks, traffic_checks, traffic_of_trace
from weft.shim.inject import Job


def warnings(machine, name, **more):
    return [c for c in diagnose(machine, **more) if c.name == name and c.status in ("warn", "fail")]


def with_nccl(number, **env):
    return replace(HEALTHY, ask=answers(nccl=number), env=env)


# --- NCCL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "env", "issues"),
    [
        (22105, {}, ["1566"]),
        (22203, {}, []),
        (22409, {}, ["1997"]),
        (22907, {}, ["1997", "2094"]),
        (22907, {"TORCH_SYMMMEM": "NCCL"}, ["1997", "2094", "2058", "2198", "2241"]),
        (23004, {}, []),
        (23004, {"NCCL_CTA_POLICY": "2"}, ["2198", "2241"]),
        (23102, {}, ["2421"]),
        (23203, {"TORCH_SYMMMEM": "NCCL"}, []),
    ],
)
def test_releases_with_reported_regressions_cite_the_report(number, env, issues):
    found = warnings(with_nccl(number, **env), "nccl regression")
    assert [check.detail.rsplit("/", 1)[1].rstrip(")") for check in found] == issues
    assert all(check.fix for check in found)


def test_every_report_is_a_public_issue_and_every_range_is_one():
    for known in REGRESSIONS:
        assert known.report.startswith("https://github.com/NVIDIA/nccl/issues/")
        assert known.first <= known.last


@pytest.mark.parametrize(
    ("number", "env", "said"),
    [
        (22703, {}, "NCCL 2.27.3 has no zero-CTA policy"),
        (22803, {"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE=0 rules out symmetric windows"),
        (22803, {"NCCL_WIN_ENABLE": "0"}, "NCCL_WIN_ENABLE=0 rules out"),
        (22803, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1 rules out"),
        (22803, {"NCCL_CUMEM_ENABLE": "1"}, "registered as symmetric windows"),
    ],
)
def test_a_request_for_zero_ctas_that_is_not_in_force_is_told(number, env, said):
    (check,) = warnings(with_nccl(number, NCCL_CTA_POLICY="ZERO", **env), "zero CTAs")
    assert said in check.detail
    assert check.fix


def test_zero_ctas_without_nvlink_are_not_in_force_and_without_a_request_nothing_is_said():
    pair = [{**H200, "peers": ["self", "pcie"]}, {**H200, "peers": ["pcie", "self"]}]
    machine = replace(HEALTHY, ask=answers(gpus=pair, nccl=22803), env={"NCCL_CTA_POLICY": "2"})
    assert "without NVLink" in warnings(machine, "zero CTAs")[0].detail
    assert warnings(with_nccl(22803, NCCL_CTA_POLICY="1"), "zero CTAs") == []


@pytest.mark.parametrize(
    ("number", "peer", "said"),
    [
        (22703, "nvlink", "needs 2.28"),
        (22803, "pcie", "no NVLink"),
        (23002, "nvlink", "not between two ranks"),
        (23200, "nvlink", "comm.engine dma); reductions stay on SMs"),
    ],
)
def test_which_collectives_copy_engines_can_serve_is_told(number, peer, said):
    pair = [{**H200, "peers": ["self", peer]}, {**H200, "peers": [peer, "self"]}]
    machine = replace(HEALTHY, ask=answers(gpus=pair, nccl=number))
    (check,) = [found for found in diagnose(machine) if found.name == "copy engines"]
    assert (check.status, said in check.detail) == ("ok", True), check.detail


def test_one_gpu_represents_copy_engines_by_a_delay():
    machine = replace(HEALTHY, ask=answers(gpus=[{**H200, "peers": ["self"]}], nccl=23200))
    (check,) = [found for found in diagnose(machine) if found.name == "copy engines"]
    assert "a delay with a local copy" in check.detail


# --- torch ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torches(tmp_path):
    """Stand-ins for two torch releases with their defaults."""

    def make(version, passes):
        folder = tmp_path / version / "torch"
        (folder / "_inductor").mkdir(parents=True)
        text = f"import os\n{OVERLAP} = False\n{OVERLAP_PASSES}: list[str] = {passes!r}\n"
        (folder / "_inductor/config.py").write_text(text)
        return Torch(version, "12.8", None, folder)

    return make("2.9.0", ["reorder_compute_for_overlap", "sink_waits"]), make("2.10.0", [])


def test_an_overlap_flag_without_passes_is_a_no_op(torches, tmp_path):
    _, since = torches
    script = tmp_path / "train.py"
    script.write_text(f"torch._inductor.config.{OVERLAP} = True\n")
    command = [sys.executable, str(script)]
    told = {}
    for torch in torches:
        origin = torch.folder / "__init__.py"
        machine = replace(
            HEALTHY,
            torch=lambda torch=torch: torch,
            run=lambda words, text="", env=None, origin=origin: (0, f"torch at {origin}\n", ""),
            which=lambda name: name,
        )
        told[torch.version] = warnings(machine, "compile flags", command=command)
    assert told["2.9.0"] == []
    (check,) = told["2.10.0"]
    assert f"{script} sets {OVERLAP}" in check.detail
    assert "torch/_inductor/config.py:3" in check.detail
    assert OVERLAP_PASSES in check.fix
    script.write_text(f"c.{OVERLAP} = True\nc.{OVERLAP_PASSES} = ['sink_waits_iterative']\n")
    assert warnings(replace(HEALTHY, torch=lambda: since), "compile flags", command=command) == []


def test_the_installed_torch_is_read_and_not_imported():
    torch = libraries.find_torch()
    if torch is None:
        pytest.skip("torch is not installed")
    found = inductor_default(torch, OVERLAP)
    assert found is not None
    lines = (torch.folder / "_inductor/config.py").read_text().splitlines()
    assert lines[found.line - 1].startswith(OVERLAP)
    assert inductor_default(torch, "nonsense") is None


# --- the host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "status"), [(64 << 20, "warn"), (1 << 30, "ok"), (None, "skip")])
def test_shared_memory_of_a_container(size, status):
    machine = replace(HEALTHY, filesystem_bytes=lambda path: size, in_container=lambda: True)
    (check,) = [c for c in diagnose(machine) if c.name == "shared memory"]
    assert check.status == status
    if status == "warn":
        assert "/dev/shm has 64 MiB, in a container" in check.detail
        assert "--shm-size" in check.fix


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0, 1980, 1980, 1980, 0x0000000000000001", None),
        ("0, 1200, 1980, [N/A], 0x0000000000000002", "held by locked clocks"),
        (
            "1, 1200, 1980, 1200, 0x0000000000000002",
            "GPU 1 runs at 1200 of 1980 MHz, held by application clocks of 1200",
        ),
        ("0, 900, 1980, 1980, 0x0000000000000044", "the power cap and hardware thermal limits"),
    ],
)
def test_clocks_that_are_held_down(row, said):
    def run(command, text="", env=None):
        return (0, f"{row}\n", "") if "--query-gpu" in command[-2] else (1, "", "")

    found = warnings(replace(HEALTHY, run=run), "clocks")
    assert [said in check.detail for check in found] == ([] if said is None else [True])


# --- a command --------------------------------------------------------------------------------------------------------


def checked(tmp_path, source, *front, env=None, machine=HEALTHY):
    script = tmp_path / "train.py"
    script.write_text(source)
    ready = replace(
        machine,
        env=env or {},
        which=lambda name: f"/usr/bin/{name}" if name == "torchrun" else None,
        run=lambda command, text="", env=None: (1, "", ""),
    )
    return diagnose(ready, command=[*front, "torchrun", "--nproc-per-node", "8", str(script)])


def test_a_command_is_taken_apart(tmp_path):
    started = understand(["env", "A=1", "B=x=y", "torchrun", "train.py", "--tp", "2"], {"A": "0", "C": "3"})
    assert (started.env, started.script) == ({"A": "1", "B": "x=y", "C": "3"}, Path("train.py"))
    assert started.words[0] == "torchrun"


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["-u", "A"], {"C": "3"}),
        (["-uA", "--unset=C", "B=1"], {"B": "1"}),
        (["-i", "B=1"], {"B": "1"}),
        (["--chdir", "/", "-C/", "B=1"], {"A": "0", "C": "3", "B": "1"}),
    ],
)
def test_options_of_env_are_not_the_program(options, left):
    started = understand(["env", *options, "torchrun", "-u", "A"], {"A": "0", "C": "3"})
    assert (started.env, started.words) == (left, ("torchrun", "-u", "A"))


@pytest.mark.parametrize("value", ["...", "1.2.3", "."])
def test_what_only_looks_like_a_bucket_size_is_no_failure(tmp_path, value):
    found = checked(tmp_path, f"# DDP(model, bucket_cap_mb={value})\n")
    assert not [c for c in found if c.status == "fail"]


def test_a_script_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "train.py")
    assert understand(["python", str(tmp_path / "train.py")], {}).source == ""


def test_variables_of_the_command_and_of_its_script_are_checked(tmp_path):
    source = "import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'\nos.environ.setdefault(\"NCCL_P2P_DISABLE\", \"1\")\n"
    found = {c.name: c for c in checked(tmp_path, source, "env", "TORCH_NCCL_BLOCKING_WAIT=1")}
    assert found["env:CUDA_LAUNCH_BLOCKING"].detail.startswith("the script sets CUDA_LAUNCH_BLOCKING=1")
    assert found["env:NCCL_P2P_DISABLE"].status == "warn"
    assert found["env:TORCH_NCCL_BLOCKING_WAIT"].detail.startswith("the command has")


def test_variables_in_a_shell_script_are_checked(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\nexport CUDA_LAUNCH_BLOCKING=1\nNCCL_P2P_DISABLE=0\ntorchrun x.py\n")
    machine = replace(
        HEALTHY, which=lambda name: f"/bin/{name}", run=lambda command, text="", env=None: (1, "", "")
    )
    found = [c for c in diagnose(machine, command=["bash", str(script)]) if c.name.startswith("env:")]
    assert [c.detail.split(":")[0] for c in found] == ["the script sets CUDA_LAUNCH_BLOCKING=1"]


@pytest.mark.parametrize(
    ("source", "value", "arch", "said"),
    [
        (
            "from torch.distributed.fsdp import fully_shard",
            "1",
            "sm_90",
            "with FSDP: all streams share one queue",
        ),
        ("from torch.distributed.fsdp import fully_shard", "8", "sm_90", None),
        ("import megatron.core", None, "sm_90", "Megatron's tensor and context parallelism ask for 1"),
        ("import megatron.core", "1", "sm_90", None),
        ("import megatron.core", None, "sm_100", None),
        ("print('no framework')", None, "sm_90", None),
    ],
)
def test_connections_depend_on_the_framework(tmp_path, source, value, arch, said):
    machine = replace(HEALTHY, ask=answers(gpus=({**H200, "arch": arch},)))
    front = ["env", f"CUDA_DEVICE_MAX_CONNECTIONS={value}"] if value else []
    findings = checked(tmp_path, source, *front, machine=machine)
    found = [c for c in findings if c.name == "env:CUDA_DEVICE_MAX_CONNECTIONS" and c.status == "warn"]
    assert [said in check.detail for check in found] == ([] if said is None else [True])


def test_settings_of_buckets_and_prefetch_in_a_script(tmp_path):
    source = "DDP(model, bucket_cap_mb=1)\nFSDP(model, forward_prefetch=False, backward_prefetch=None)"
    found = [c for c in checked(tmp_path, source) if c.name in ("buckets", "prefetch")]
    assert [c.name for c in found] == ["buckets", "prefetch", "prefetch"]
    assert not [c for c in checked(tmp_path, "DDP(m, bucket_cap_mb=25)") if c.name == "buckets"]


def test_programs_that_do_not_exist_and_interpreters_that_are_not_wefts(tmp_path):
    assert (
        "not on PATH"
        in warnings(replace(HEALTHY, which=lambda name: None), "command", command=["x"])[0].detail
    )
    assert "no program" in warnings(HEALTHY, "command", command=["env", "A=1"])[0].detail
    missing = warnings(HEALTHY, "command", command=["torchrun", "gone.py"])
    assert "gone.py does not exist here" in missing[0].detail
    other = tmp_path / "site/torch"
    other.mkdir(parents=True)
    (other / "version.py").write_text("__version__ = '2.4.0'\n")
    run = lambda command, text="", env=None: (0, f"torch at {other}/__init__.py\n", "")  # noqa: E731
    (found,) = warnings(
        replace(HEALTHY, run=run, which=lambda name: "/opt/bin/python3"), "command", command=["python3"]
    )
    assert "/opt/bin/python3 has torch 2.4.0; weft itself sees torch 2.9.0+cu128" in found.detail


def test_the_command_line_reports_on_a_command_of_this_machine(tmp_path):
    (tmp_path / "train.py").write_text("import os\nos.environ['NCCL_SHM_DISABLE'] = '1'\n")
    done = contract.run_weft("doctor", "--json", "--", sys.executable, "train.py", cwd=tmp_path)
    checks = json.loads(done.stdout)["checks"]
    assert [c["detail"] for c in checks if c["name"] == "env:NCCL_SHM_DISABLE"]
    refused = contract.run_weft("doctor", "--job", "nonsense")
    assert (refused.returncode, "no running job" in refused.stderr) == (2, True)


# --- traces and jobs ----------------------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    ("traffic", "name", "status"),
    [
        (StepCalls("all_reduce", (500 * MIB,), 60.0), "buckets", "warn"),
        (StepCalls("all_reduce", (500 * MIB,), 5.0), "buckets", "ok"),
        (StepCalls("all_reduce", (1024,) * 200), "buckets", "warn"),
        (StepCalls("all_reduce", (25 * MIB,) * 40, 40.0), "buckets", "warn"),
        (StepCalls("all_reduce", (25 * MIB,) * 40), "buckets", "ok"),
        (StepCalls("all_reduce", (128 * MIB,) * 26, 41.0), "buckets", "ok"),
        (StepCalls("all_gather", (64 * MIB,) * 32, 60.0, 80.0), "prefetch", "warn"),
        (StepCalls("all_gather", (64 * MIB,) * 32, 60.0, 10.0), "prefetch", "ok"),
        (StepCalls("all_gather", (64 * MIB,) * 32), "prefetch", "ok"),
        (StepCalls("broadcast", (1,)), "buckets", "skip"),
    ],
)
def test_what_calls_say_about_settings(traffic, name, status):
    (check,) = traffic_checks([traffic], "trace")
    assert (check.name, check.status) == (name, status)
    assert bool(check.fix) == (status == "warn")


def test_real_traces_are_read_for_buckets_and_prefetch():
    found = {one.kind: one for one in traffic_of_trace(weft.analyze(contract.TRACES / "h200_fsdp_2ranks"))}
    assert len(found["all_gather"].sizes) == 16
    assert found["all_gather"].exposed_pct > 50
    checks = traffic_checks(list(found.values()), "trace")
    assert [c.name for c in checks if c.status == "warn"] == ["prefetch", "prefetch"]
    ddp = traffic_of_trace(weft.analyze(contract.TRACES / "h200_ddp_2ranks"))
    assert [(one.kind, len(one.sizes)) for one in ddp] == [("all_reduce", 26)]


def test_a_running_job_is_read_for_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job(command=["sleep"]) as job:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            env={"RANK": "0", "NCCL_P2P_DISABLE": "1"},
        )
        try:
            (check,) = [c for c in job_checks(str(job.folder)) if c.status == "warn"]
        finally:
            child.communicate(b"\n")
    assert check.name == "env:NCCL_P2P_DISABLE"
