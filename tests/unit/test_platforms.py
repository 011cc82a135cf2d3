"""Machines without the shim: analyze, plan, report and the simulator need no POSIX-only features."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parents[1]
TRACES = Path(__file__).parents[1] / "data/traces"

# Removes what Windows lacks. sys.platform stays, since numpy and others would load the wrong files.
WINDOWS = """
import os, signal, sys
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in dir(os):
    if name in ("fork", "forkpty", "getuid", "geteuid", "getgid", "getpgid", "killpg", "mkfifo", "pread", "pwrite",
                "preadv", "sched_getaffinity", "setsid", "statvfs", "sysconf", "wait4", "getloadavg",
                "register_at_fork", "chown", "posix_spawn", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY"):
        delattr(os, name)
for name in dir(signal):
    if name.startswith("SIG") and name not in (
        "SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"
    ):
        delattr(signal, name)
"""
NO_LIBRARIES = """
import weft.sim.core
weft.sim.core.CORE_LIBRARY = "missing.so"
"""
MAC = """
import sys, sysconfig
from weft.cli.main import build_app
build_app()
sysconfig.get_config_vars()  # all that depends on the real platform is loaded by now
sys.platform = "darwin"
"""
MAIN = "from weft.cli.main import main\nmain(sys.argv[1:])\n"


def elsewhere(
    folder: Path, *words: str, setup: str = WINDOWS + NO_LIBRARIES, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `weft WORDS` in a process without what Windows lacks, and without compiled libraries."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "WEFT_STORE": str(folder / "store"), **more}
    command = [sys.executable, "-c", setup + MAIN, *words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=100
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("analyze", str(TRACES / "h200_ddp_2ranks"), "--html", "page.html", "--perfetto", "causes.json"),
        ("analyze", str(TRACES / "v100_dlrm_8ranks"), "--json"),
        ("plan", "--model", "llama3-8b", "--gpus", "16", "--tp", "2", "--html", "page.html"),
        ("plan", "--model", "llama3-8b", "--gpus", "16", "--sweep", "--limit", "4"),
        ("explore", "--gemm", "8192x8192x8192", "--device", "sim:h100"),
        ("store",),
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_commands_that_need_no_gpu_work_without_posix_and_without_libraries(tmp_path, words):
    done = elsewhere(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("analyze", str(TRACES / "h200_ddp_2ranks")),
        ("plan", "--model", "llama3-8b", "--gpus", "16", "--tp", "2"),
        ("explore", "--gemm", "8192x8192x8192", "--device", "sim:h100"),
    ],
    ids=lambda words: words[0],
)
def test_characters_that_a_code_page_lacks_are_replaced(tmp_path, words):
    done = elsewhere(tmp_path, *words, PYTHONIOENCODING="cp1252", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_reports_of_saved_results(tmp_path):
    done = elsewhere(tmp_path, "analyze", str(TRACES / "h200_ddp_2ranks"), "--json")
    (tmp_path / "analysis.json").write_text(done.stdout)
    done = elsewhere(tmp_path, "report", ".")
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "report.html").read_text()


def test_the_simulator_works_without_posix(tmp_path):
    words = ("bench", "quick", "--device", "sim:h100", "--only", "cb-ar*", "--out", ".", "--json")
    done = elsewhere(tmp_path, *words, setup=WINDOWS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]


def test_doctor_reports_instead_of_failing(tmp_path):
    done = elsewhere(tmp_path, "doctor", "--json")
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["checks"]


def test_run_says_that_it_needs_linux(tmp_path):
    done = elsewhere(tmp_path, "run", "--", "true", setup=MAC)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "weft run needs Linux" in done.stderr


def test_the_missing_core_is_one_line(tmp_path):
    done = elsewhere(tmp_path, "tune", "cb-ar", "--device", "sim:h100")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("schema", "policy"), ("schema", "top"), ("schema", "analyze"), ("schema",)]
)
def test_schemas_need_no_posix(tmp_path, words):
    done = elsewhere(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_what_only_linux_has_is_named(tmp_path):
    done = elsewhere(tmp_path, "top", setup=MAC)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "needs Linux" in done.stderr
