"""`weft run`: the program's exit code, signals and output are its own; bad input is one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.policy import Policy

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def weft(*arguments: str, env: dict[str, str] | None = None, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60, **kwargs)


@pytest.fixture
def temporary(tmp_path) -> Path:
    """The folder for the job's temporary files; nothing may remain in it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("code", [0, 1, 3, 77, 255])
def test_the_exit_code_is_the_programs(environment, temporary, code):
    done = weft("run", "--", "sh", "-c", f"exit {code}", env={**environment, "TMPDIR": str(temporary)})
    assert done.returncode == code
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT])
def test_a_program_that_dies_by_a_signal_is_seen_to(environment, temporary, number):
    done = weft(
        "run", "--", "sh", "-c", f"kill -{number.value} $$", env={**environment, "TMPDIR": str(temporary)}
    )
    assert done.returncode == -number
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_program_and_its_answer_stands(environment, temporary, number):
    script = f"trap 'exit 42' {number.value}; echo ready; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "weft", "run", "--", "sh", "-c", script]
    with subprocess.Popen(
        command,
        env={**environment, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup SIGHUP would be ignored
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        assert running.wait(timeout=60) == 42
    assert not list(temporary.iterdir())


def test_a_program_does_not_outlive_weft(environment, tmp_path):
    script = (
        f"echo $$ > {tmp_path}/pid; exec sleep 60"  # a killed weft cannot clean up: its files go to tmp_path
    )
    with subprocess.Popen(
        [sys.executable, "-m", "weft", "run", "--", "sh", "-c", script],
        env={**environment, "TMPDIR": str(tmp_path)},
    ) as running:
        pid_file = tmp_path / "pid"
        while not pid_file.exists() or not pid_file.read_text().endswith("\n"):
            assert running.poll() is None
            time.sleep(0.02)
        running.kill()
    pid = int(pid_file.read_text())
    for _ in range(1000):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":  # dead, not yet reaped by the process that adopted it
            return
        time.sleep(0.05)
    pytest.fail("the program still runs")


def test_standard_streams_and_arguments_pass_through(environment):
    code = "import sys; print(sys.argv[1:], sys.stdin.read())"
    done = weft(
        "run", "--", sys.executable, "-c", code, "--flag", "-x", "two words", env=environment, input="in"
    )
    assert done.stdout == "['--flag', '-x', 'two words'] in\n"


def test_children_of_children_are_counted_in_one_file(program):
    done = program(
        f"""
        import os, subprocess, sys
        inner = 'from driver import *; launch(kernel("gemm")); launch(kernel("{NCCL}"))'
        for rank in range(3):
            subprocess.run([sys.executable, "-c", inner], check=True, env=os.environ | {{"RANK": str(rank)}})
        """,
        Policy(residency=2),
    )
    assert done.stats["launches"] == 6
    assert done.stats["comm_launches"] == 3
    assert done.kernel("gemm")["launches"] == 3
    assert sorted(process["rank"] for process in done.stats["processes"]) == [0, 1, 2]


def test_a_forked_child_has_counters_and_the_policy_of_its_own(program):
    done = program(
        """
        import os
        launch(k := kernel("gemm"))
        pid = os.fork()
        if pid == 0:
            launch(k)
            os._exit(0 if records()[-1]["shared"] else 1)
        show(os.waitpid(pid, 0)[1])
        """,
        Policy(residency=2),
    )
    assert done.results == 0
    assert [process["launches"] for process in done.stats["processes"]] == [1, 1]


def test_a_program_that_execs_another_keeps_both_counts(program):
    done = program("""
        import os, sys
        launch(kernel("first"))
        os.execv(sys.executable, [sys.executable, "-c", 'from driver import *; launch(kernel("second"))'])
    """)
    assert {kernel["name"] for kernel in done.stats["kernels"]} == {"first", "second"}


def test_a_process_that_touches_no_gpu_is_said_to(weft_run):
    done = weft_run(["true"], Policy(residency=3))
    assert done.code == 0
    assert done.stats["launches"] == 0
    assert done.stderr == "weft: no launch was changed: no process of this job launched a GPU kernel\n"


def test_the_stats_file_has_the_contracts_keys(program):
    stats = program('launch(kernel("_Z4gemmPfS_i")); launch(kernel("nccl"))', Policy(residency=3)).stats
    assert {"launches", "comm_launches", "shaped", "shape_failures", "kernels", "policy"} <= set(stats)
    assert {kernel["name"]: kernel["kind"] for kernel in stats["kernels"]} == {
        "gemm(float*, float*, int)": "compute",
        "nccl": "comm",
    }
    assert {"name", "kind", "launches", "shaped", "blocks_per_sm"} <= set(stats["kernels"][0])


def test_the_collectives_ctas_are_set_for_nccl(weft_run):
    code = "import os, json; print(json.dumps([os.environ.get(f'NCCL_{n}_CTAS') for n in ('MAX', 'MIN')]))"
    for least, expected in ((None, None), ("16", "8"), ("2", "2"), ("many", "many")):
        env = {} if least is None else {"NCCL_MIN_CTAS": least}
        assert weft_run([sys.executable, "-c", code], Policy(max_ctas=8), env).results == ["8", expected]


def test_a_package_in_a_folder_with_a_space_is_preloaded_all_the_same(environment, tmp_path, monkeypatch):
    from weft.shim import inject

    folder = tmp_path / "my packages: weft"
    folder.mkdir()
    library = Path(shutil.copy(inject.library_path(), folder))
    monkeypatch.setattr(inject, "library_path", lambda: library)
    with inject.Job() as job:
        inject.check_preload(job.environment(environment))


def test_controls_that_no_launch_can_carry_are_said_not_to_be_applied(weft_run):
    done = weft_run(["true"], Policy(schedule="shard", engine="dma"))
    assert [word in done.stderr for word in ("schedule is not", "engine dma is not")] == [True] * 2


# --- the policy of the process itself ---------------------------------------------------------------------


def test_a_process_sets_its_own_policy_and_gives_it_back(program):
    done = program(
        """
        import weft
        k = kernel("gemm")
        def shaped():
            launch(k)
            return records()[-1]["shared"] > 0
        seen = [shaped()]
        with weft.overlap(weft.Policy(residency=2)):
            seen.append(shaped())
            with weft.overlap(weft.Policy()):
                seen.append(shaped())
            seen.append(shaped())
        seen.append(shaped())
        from weft.shim.stats import snapshot
        show([seen, snapshot()["launches"]])
        """,
        Policy(residency=4),
    )
    assert done.results == [[True, True, False, True, True], 5]
    assert done.kernel("gemm")["shaped"] == 4


def test_a_running_job_is_read_and_changed_from_outside(program):
    done = program(
        """
        import os, subprocess, sys
        k = kernel("gemm")
        launch(k)
        outside = (
            "import sys, weft; from weft.shim.inject import attach; job = attach(sys.argv[1]);"
            "print(job.collect()['launches']); job.set_policy(weft.Policy(residency=2))"
        )
        seen = subprocess.run([sys.executable, "-c", outside, os.environ["WEFT_JOB"]], capture_output=True, check=True)
        launch(k)
        show([int(seen.stdout), [r["shared"] > 0 for r in records()]])
        """
    )
    assert done.results == [1, [False, True]]


def test_a_job_that_is_not_there_is_named(tmp_path):
    from weft.errors import InputError
    from weft.shim.inject import attach

    with pytest.raises(InputError, match="not the folder of a running job"):
        attach(tmp_path)


def test_outside_weft_run_the_fix_is_told():
    code = "import weft\nwith weft.overlap(weft.Policy(residency=2)): pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "start it with `weft run -- " in done.stderr


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ((), 2, "put the program after `--`"),
        (("--priority", "high"), 2, "put the program after `--`"),
        (("--", "no-such-command-anywhere"), 127, "no-such-command-anywhere: command not found"),
        (("--", "/etc/passwd"), 2, "Permission denied"),
        (
            ("--residency", "0", "--", "true"),
            2,
            "compute.residency 0 is not valid; use an integer from 1 to 32",
        ),
        (("--residency", "-2", "--", "true"), 2, "compute.residency -2"),
        (("--residency", "33", "--", "true"), 2, "compute.residency 33"),
        (("--residency", "three", "--", "true"), 2, "'--residency'"),
        (("--head-start", "-5", "--", "true"), 2, "comm.head_start_us -5"),
        (("--head-start", "nan", "--", "true"), 2, "comm.head_start_us nan"),
        (("--priority", "low", "--", "true"), 2, "comm.priority 'low'"),
        (("--when", "never", "--", "true"), 2, "compute.when 'never'"),
        (("--policy", "/nowhere/policy.json", "--", "true"), 2, "/nowhere/policy.json"),
        (("--stats", "/nowhere/stats.json", "--", "true"), 2, "/nowhere/stats.json"),
        (("--nonsense", "--", "true"), 2, "--nonsense"),
    ],
)
def test_bad_input_is_one_line_with_the_fix(environment, temporary, arguments, code, told):
    done = weft("run", *arguments, env={**environment, "TMPDIR": str(temporary)})
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(temporary.iterdir())


def test_a_malformed_policy_is_named(environment, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1, "compute": {"residencyy": 3}}))
    done = weft("run", "--policy", str(path), "--", "true", env=environment)
    assert done.returncode == 2
    assert "unknown key 'residencyy'" in done.stderr
    assert str(path) in done.stderr


@pytest.mark.parametrize("library", ["/nowhere/libmissing.so", "libmissing.so.1"])
def test_a_preloaded_library_that_is_missing_is_the_loaders_business(environment, library):
    done = weft("run", "--quiet", "--", "sh", "-c", "exit 7", env={**environment, "LD_PRELOAD": library})
    assert done.returncode == 7
    assert f"object '{library}' from LD_PRELOAD cannot be preloaded" in done.stderr


def test_without_the_shim_the_fix_is_told(environment, monkeypatch):
    from weft.errors import UnavailableError
    from weft.shim import inject

    monkeypatch.setattr(inject, "LIBRARY", "libnot_built.so")
    with pytest.raises(UnavailableError, match="install a C compiler and reinstall weft"):
        inject.library_path()
