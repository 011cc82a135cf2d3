import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console

from weft.cli.doctor import doctor, show_findings
from weft.doctor import Check, child, diagnose, libraries, next_step
from weft.doctor.environment import RULES, check_environment
from weft.doctor.libraries import Torch
from weft.doctor.machine import Machine, run_command
from weft.errors import UnavailableError, UsageError

H200 = {
    "index": 0,
    "name": "NVIDIA H200",
    "vendor": "nvidia",
    "arch": "sm_90",
    "sms": 132,
    "memory_bytes": 141 << 30,
    "preset": "h200",
    "driver": "570.86 (CUDA 12.8)",
    "active_links": 18,
    "peers": ["self"],
}
CUDA = {"version": [12, 8], "green_contexts": True}
HONOURED = {"equal_ms": 2.4, "high_ms": 0.4, "block_ms": 0.4, "ratio": 6.0, "conclusive": True}

PLACED = {"waiter_ms": 0.02, "kernel_ms": 5.0, "works": True}


def answers(gpus=(H200,), cuda=CUDA, error=None, priority=HONOURED, placement=PLACED, nccl=23004):
    def ask(topic, *arguments):
        if topic == "gpus":
            return {"gpus": list(gpus), "cuda": cuda, "cuda_error": error}
        if topic == "priority":
            return priority
        if topic == "placement":
            return placement
        return {"version": nccl}

    return ask


def no_mps(command, text="", env=None):
    return (1, "", "Cannot find MPS control daemon process") if "mps" in command[0] else (0, "cc 12.2\n", "")


HEALTHY = Machine(
    env={},
    ask=answers(),
    run=no_mps,
    which=lambda name: f"/usr/bin/{name}",
    torch=lambda: Torch("2.9.0+cu128", "12.8", None, Path("/site/torch")),
    nccl=lambda torch: Path("/site/nvidia/nccl/lib/libnccl.so.2"),
    shim=lambda: Path("/site/weft/shim/libweft_shim.so"),
    preload=lambda env: None,
    filesystem_bytes=lambda path: 64 << 30,
    in_container=lambda: False,
)
BARE = replace(
    HEALTHY,
    ask=answers(gpus=(), cuda=None, error="no CUDA driver: libcuda.so.1: cannot open shared object file"),
    which=lambda name: None,
    torch=lambda: None,
    nccl=lambda torch: None,
)


def found(machine, name):
    (check,) = [c for c in diagnose(machine) if c.name == name]
    return check


def test_a_healthy_machine_is_all_ok():
    findings = diagnose(HEALTHY)
    assert {c.status for c in findings} == {"ok"}
    assert [c.name for c in findings] == [
        "driver",
        "gpus",
        "torch",
        "nccl",
        "copy engines",
        "collective rules",
        "compiler",
        "shim",
        "mps",
        "green contexts",
        "priority",
        "placed",
        "shared memory",
        "environment",
    ]
    assert "weft run" in next_step(findings)


def test_a_machine_without_a_gpu_has_no_failures():
    findings = diagnose(BARE)
    assert "fail" not in {c.status for c in findings}
    assert found(BARE, "priority").status == "skip"
    assert "weft analyze" in next_step(findings)


def test_a_driver_that_is_installed_and_broken_is_a_failure():
    broken = replace(
        HEALTHY,
        ask=answers(gpus=(), cuda=None, error="cuInit failed: system not yet initialized (CUDA error 802)"),
    )
    check = found(broken, "driver")
    assert check.status == "fail"
    assert "802" in check.detail
    assert "nvidia-smi" in check.fix
    assert found(broken, "priority").status == "skip"


def test_hidden_gpus_are_attributed_to_the_variable():
    error = "cuInit failed: no CUDA-capable device is detected (CUDA error 100)"
    machine = replace(HEALTHY, env={"CUDA_VISIBLE_DEVICES": ""}, ask=answers(gpus=(), cuda=None, error=error))
    check = found(machine, "driver")
    assert (check.status, check.fix) == ("warn", "unset CUDA_VISIBLE_DEVICES")


def test_a_crash_of_the_gpu_query_is_reported():
    def crash(topic, *arguments):
        raise UnavailableError("the test process was killed by SIGSEGV: no message")

    check = found(replace(HEALTHY, ask=crash), "driver")
    assert check.status == "fail"
    assert "SIGSEGV" in check.detail


def test_a_check_that_hangs_times_out():
    release = threading.Event()

    def hang(name):
        release.wait(20)

    findings = diagnose(replace(HEALTHY, which=hang), limit_s=0.2)
    release.set()
    stuck = {c.name: c for c in findings if "no answer" in c.detail}
    assert set(stuck) >= {"compiler", "mps", "clocks"}  # and on a busy machine others
    assert {c.status for c in stuck.values()} == {"fail"}
    assert {c.name for c in findings} > {"environment", "shim"}


def test_a_check_that_raises_is_a_failure_with_its_reason():
    check = found(replace(HEALTHY, torch=lambda: 1 / 0), "torch")
    assert check.status == "fail"
    assert "ZeroDivisionError" in check.detail


def test_pairs_without_peer_access_are_a_warning():
    gpus = [H200 | {"peers": ["self", "none"]}, H200 | {"index": 1, "peers": ["none", "self"]}]
    check = found(replace(HEALTHY, ask=answers(gpus)), "gpus")
    assert check.status == "warn"
    assert "topo" in check.fix


@pytest.mark.parametrize(("kind", "status"), [("nvlink", "ok"), ("pcie", "warn")])
def test_links_of_a_pair(kind, status):
    gpus = [H200 | {"peers": ["self", kind]}, H200 | {"index": 1, "peers": [kind, "self"]}]
    check = found(replace(HEALTHY, ask=answers(gpus)), "gpus")
    assert check.status == status
    assert check.detail.startswith("2 x NVIDIA H200 (sm_90, 132 SMs, 141 GiB)")
    assert kind in check.detail


def test_torch_newer_than_the_driver_fails():
    machine = replace(HEALTHY, torch=lambda: Torch("2.9.0+cu130", "13.0", None, Path("/t")))
    check = found(machine, "torch")
    assert check.status == "fail"
    assert "CUDA 12.8" in check.detail


def test_torch_for_the_cpu_on_a_gpu_machine_is_a_warning():
    machine = replace(HEALTHY, torch=lambda: Torch("2.9.0", None, None, Path("/t")))
    assert found(machine, "torch").status == "warn"


@pytest.mark.parametrize(
    ("number", "text", "absent"),
    [
        (23004, ("2.30.4", "copy-engine collectives and several ranks per GPU"), "no copy-engine"),
        (22803, ("2.28.3", "copy-engine collectives", "one rank per GPU only"), "no copy-engine"),
        (
            22105,
            ("2.21.5", "no copy-engine collectives (2.28)", "one rank per GPU only"),
            "several ranks per GPU",
        ),
        (2708, ("2.7.8", "no copy-engine"), "several ranks per GPU"),
    ],
)
def test_nccl_version_determines_its_features(number, text, absent):
    check = found(replace(HEALTHY, ask=answers(nccl=number)), "nccl")
    assert all(part in check.detail for part in text)
    assert absent not in check.detail


@pytest.mark.parametrize(
    ("number", "env", "status", "text"),
    [
        (23203, {}, "ok", ("2.32.3 takes a configuration with each call", "interface v6")),
        (23203, {"WEFT_NO_CALL_CONFIG": "1"}, "ok", ("WEFT_NO_CALL_CONFIG", "interface v6")),
        (
            23004,
            {"NCCL_TUNER_PLUGIN": "mine"},
            "ok",
            ("interface v6", "forwards questions to NCCL_TUNER_PLUGIN=mine"),
        ),
        (22803, {}, "ok", ("interface v5", "no chunk size", "not tested")),
        (22403, {}, "ok", ("interface v4", "not tested")),
        (22105, {}, "skip", ("2.21.5", "does not ask")),
    ],
)
def test_how_rules_for_collectives_would_reach_nccl(number, env, status, text):
    check = found(replace(HEALTHY, ask=answers(nccl=number), env=env), "collective rules")
    assert check.status == status
    assert all(part in check.detail for part in text), check.detail


def test_shim_that_is_not_built_or_does_not_load_fails():
    def missing():
        raise UnavailableError("the launch shim is not built on this machine")

    def unfit(env):
        assert env["LD_PRELOAD"] == "/site/weft/shim/libweft_shim.so:/lib/other.so"
        raise UsageError("LD_PRELOAD names /lib/other.so, which cannot be loaded")

    assert found(replace(HEALTHY, shim=missing), "shim").status == "fail"
    check = found(replace(HEALTHY, env={"LD_PRELOAD": "/lib/other.so"}, preload=unfit), "shim")
    assert (check.status, check.fix) == ("fail", "unset LD_PRELOAD")


def test_mps_running_and_not_running():
    running = replace(HEALTHY, run=lambda command, text="", env=None: (0, "", ""))
    assert "is running" in found(running, "mps").detail
    assert "not running" in found(HEALTHY, "mps").detail


def test_no_green_contexts_names_the_driver():
    machine = replace(HEALTHY, ask=answers(cuda=CUDA | {"green_contexts": False}))
    check = found(machine, "green contexts")
    assert check.status == "warn"
    assert "550" in check.fix


@pytest.mark.parametrize(
    ("changed", "status", "word"),
    [
        ({}, "ok", "6.0x sooner"),
        ({"ratio": 1.02, "high_ms": 2.35}, "warn", "not honoured"),
        ({"conclusive": False}, "warn", "inconclusive"),
    ],
)
def test_priority_status_follows_the_measured_ratio(changed, status, word):
    check = found(replace(HEALTHY, ask=answers(priority=HONOURED | changed)), "priority")
    assert check.status == status
    assert word in check.detail


@pytest.mark.parametrize(
    ("placement", "status", "word"),
    [
        (PLACED, "ok", "after 20 µs, the kernel after 5000 µs"),
        ({"waiter_ms": 5.1, "kernel_ms": 5.0, "works": False}, "warn", "wait for the whole collective"),
    ],
)
def test_a_wait_that_outlasts_the_collective_is_a_warning(placement, status, word):
    check = found(replace(HEALTHY, ask=answers(placement=placement)), "placed")
    assert (check.status, word in check.detail) == (status, True)
    assert status == "ok" or "--head-start 5" in check.fix


def test_a_driver_without_the_event_names_the_timed_head_start():
    def ask(topic, *arguments):
        if topic == "placement":
            raise UnavailableError("the driver has no launch-completion event")
        return answers()(topic, *arguments)

    check = found(replace(HEALTHY, ask=ask), "placed")
    assert check.status == "warn"
    assert "no launch-completion event" in check.detail


def test_amd_priority_is_not_assumed():
    gpu = H200 | {"vendor": "amd", "name": "AMD Instinct MI300X"}
    check = found(replace(HEALTHY, ask=answers((gpu,), cuda=None)), "priority")
    assert check.status == "warn"


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "fail"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("CUDA_LAUNCH_BLOCKING", "", None),
        ("HIP_LAUNCH_BLOCKING", "1", "fail"),
        ("AMD_SERIALIZE_KERNEL", "3", "fail"),
        ("AMD_SERIALIZE_KERNEL", "0", None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warn"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many", "warn"),
        ("GPU_MAX_HW_QUEUES", "1", "warn"),
        ("GPU_MAX_HW_QUEUES", "4", None),
        ("NCCL_MAX_CTAS", "2", "warn"),
        ("NCCL_MAX_CTAS", "16", None),
        ("NCCL_MAX_NCHANNELS", "1", "warn"),
        ("NCCL_MIN_NCHANNELS", "32", "warn"),
        ("NCCL_MIN_CTAS", "8", None),
        ("NCCL_P2P_DISABLE", "1", "warn"),
        ("NCCL_SHM_DISABLE", "1", "warn"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "warn"),
        ("TORCH_NCCL_BLOCKING_WAIT", "true", "warn"),
        ("TORCH_NCCL_HIGH_PRIORITY", "0", "warn"),
        ("TORCH_NCCL_HIGH_PRIORITY", "1", None),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", "warn"),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", None),
        ("TORCH_NCCL_CUDA_EVENT_CACHE", "0", "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", None),
        ("CUDA_MODULE_LOADING", "EAGER", "ok"),
        ("NCCL_DEBUG", "INFO", None),
    ],
)
def test_environment_rules(name, value, status):
    findings = [c for c in check_environment({name: value}) if c.name.startswith("env:")]
    if status is None:
        assert not findings
        return
    (check,) = findings
    assert (check.name, check.status) == (f"env:{name}", status)
    assert check.detail.startswith(f"{name}={value}: ")
    assert status == "ok" or check.fix


def test_one_connection_is_explained_for_megatron_and_fsdp():
    (check,) = check_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert "tensor parallelism" in check.detail
    assert "FSDP" in check.detail


def test_every_rule_has_an_answer_to_any_value():
    for name in RULES:
        for value in ("", " ", "0", "1", "-1", "1e9", "☃", "99999999999999999999"):
            findings = check_environment({name: value})
            assert {finding.status for finding in findings} <= {"ok", "warn", "fail"}
            assert all(finding.detail for finding in findings)
            assert {finding.name for finding in findings} & {f"env:{name}", "environment"}


def test_a_clean_environment_is_reported_as_clean():
    (check,) = check_environment({"PATH": "/bin"})
    assert (check.name, check.status) == ("environment", "ok")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_ends_with_the_next_step(width, tmp_path):
    machine = replace(HEALTHY, env=dict.fromkeys(RULES, "1") | {"TORCH_NCCL_AVOID_RECORD_STREAMS": "0"})
    findings = [*diagnose(machine), Check("odd", "warn", "[/bold] is no markup, " + "x" * 200)]
    with (tmp_path / "out").open("w+") as file:
        show_findings(findings, Console(file=file, width=width))
        file.seek(0)
        lines = file.read().splitlines()
    assert max(map(len, lines)) <= width
    assert "[/bold]" in "".join(lines)
    assert any(line.startswith("fail") and "environment" in line for line in lines)
    assert "Next: fix" in " ".join(lines[-2:])


def call(arguments, monkeypatch, machine):
    monkeypatch.setattr("weft.doctor.suite.Machine", lambda: machine)
    app = typer.Typer()
    app.command()(doctor)
    return app(args=arguments, prog_name="weft doctor", standalone_mode=False)


def test_json_is_one_object_and_nothing_else(monkeypatch, capsys):
    assert not call(["--json"], monkeypatch, HEALTHY)
    printed = capsys.readouterr()
    checks = json.loads(printed.out)["checks"]
    assert printed.err == ""
    assert len(checks) == 14
    assert all(set(c) == {"name", "status", "detail", "fix"} for c in checks)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_hard_failure_is_exit_code_1(monkeypatch, capsys, arguments):
    assert call(arguments, monkeypatch, replace(HEALTHY, env={"CUDA_LAUNCH_BLOCKING": "1"})) == 1
    assert "CUDA_LAUNCH_BLOCKING" in capsys.readouterr().out


def test_warnings_do_not_change_the_exit_code(monkeypatch, capsys):
    assert not call([], monkeypatch, replace(HEALTHY, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
    assert "1 warning above" in capsys.readouterr().out


def test_diagnose_works_on_the_machine_that_runs_the_tests():
    findings = diagnose()
    assert [c.name for c in findings][:2] == ["driver", "gpus"]
    assert all(c.status in ("ok", "warn", "fail", "skip") and c.detail for c in findings)


def test_child_reports_a_library_that_is_not_nccl(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_text("not a library")
    with pytest.raises(UnavailableError, match="does not load as NCCL"):
        child.ask_child("nccl", str(path))


def test_child_reports_the_version_of_the_library(tmp_path):
    library = fake(tmp_path, "int ncclGetVersion(int *v) { *v = 22803; return 0; }")
    assert child.ask_child("nccl", library) == {"version": 22803}


def test_a_crash_in_a_library_ends_the_child_only(tmp_path):
    library = fake(tmp_path, "int ncclGetVersion(int *v) { *(volatile int *)8 = 1; return *v; }")
    with pytest.raises(UnavailableError, match="killed by SIGSEGV"):
        child.ask_child("nccl", library)


def test_a_library_that_hangs_times_out(tmp_path):
    library = fake(tmp_path, "int ncclGetVersion(int *v) { for (;;) *(volatile int *)v = 1; }")
    with pytest.raises(UnavailableError, match="no answer within 1 s"):
        child.ask_child("nccl", library, limit_s=1.0)


def test_output_of_a_library_does_not_corrupt_the_answer(tmp_path):
    code = '#include <stdio.h>\nint ncclGetVersion(int *v) { puts("hello"); *v = 1; return 0; }'
    assert child.ask_child("nccl", fake(tmp_path, code)) == {"version": 1}


def fake(folder, code):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a fake library")
    (folder / "fake.c").write_text(code)
    library = folder / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True)
    return str(library)


def test_torch_is_read_without_importing_it(tmp_path, monkeypatch):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.9.0+cu128'\n"
        "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    torch = libraries.find_torch()
    assert torch == Torch("2.9.0+cu128", "12.8", None, folder)


def test_nccl_is_the_one_that_torch_would_load(tmp_path, monkeypatch):
    torch = Torch("2.9.0", "12.8", None, tmp_path / "torch")
    wheel = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert libraries.find_nccl(torch) == wheel
    own = tmp_path / "torch" / "lib" / "libnccl.so.2"
    own.parent.mkdir(parents=True)
    own.touch()
    assert libraries.find_nccl(torch) == own


def test_a_command_that_cannot_run_does_not_raise():
    assert run_command(["/no/such/command"])[0] == -1
    assert run_command([sys.executable, "-c", "print(input())"], "hi\n") == (0, "hi\n", "")


def test_doctor_does_not_import_torch():
    code = "import sys, weft.cli.doctor, weft.doctor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
