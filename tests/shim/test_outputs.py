"""weft's outputs: devices and pipes are written to, not replaced; job folders are small and removed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from building import ROOT
from test_run import weft

from weft.errors import OutputError
from weft.files import why_not_writable, write_whole
from weft.shim import job_folder
from weft.shim.inject import Job


def is_device(path):
    return stat.S_ISCHR(path.stat().st_mode)


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.write_bytes(b"x")
    except OSError:
        pytest.skip("cannot make a device here")
    return path


def test_a_device_stays_a_device(device, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(device)
    for path in (device, link):
        assert why_not_writable(path) == ""
        write_whole(path, "text")
        assert weft("run", "--quiet", "--stats", str(path), "--", "true").returncode == 0
    assert is_device(device)
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "null"]


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert weft("run", "--quiet", "--stats", str(pipe), "--", "true").returncode == 0
    reader.join(60)
    assert json.loads(read[0])["launches"] == 0
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("path", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"])
def test_standard_output_takes_the_statistics_after_the_program(tmp_path, path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    out = tmp_path / "out"
    script = f"{sys.executable} -m weft run --quiet --stats {path} -- echo first"
    for command in (
        f"{script} > {out}",
        f"{script} | cat > {out}",
        f"echo before > {out}; {script} >> {out}",
    ):
        subprocess.run(["sh", "-c", command], env=env, check=True)
        text = out.read_text()
        assert "first\n{" in text
        assert json.loads(text[text.index("{") :])["launches"] == 0
    assert text.startswith("before\n")


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    dangling.symlink_to(tmp_path / "later")
    write_whole(link, "new")
    write_whole(dangling, "made")
    assert (target.read_text(), (tmp_path / "later").read_text()) == ("new", "made")
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_names_of_any_length_and_loops_of_links_are_dealt_with(tmp_path):
    write_whole(tmp_path / ("x" * 255), "long")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OutputError, match="loop"):
        write_whole(loop, "x")
    assert "it is a folder" in why_not_writable(tmp_path)
    assert "no folder" in why_not_writable(tmp_path / "nowhere" / "file")


def test_a_failure_leaves_the_old_content(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OutputError, match="No space left"):
        write_whole(full, "x" * 100)
    assert is_device(full)


def test_the_policy_file_is_not_overwritten(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1}))
    done = weft("run", "--policy", str(path), "--stats", str(path), "--", "true")
    assert done.returncode == 2
    assert "is the policy file" in done.stderr
    assert json.loads(path.read_text()) == {"version": 1}


@pytest.mark.parametrize("stats", ["/dev/full", "{folder}/gone/stats.json"])
def test_what_fails_after_the_end_does_not_change_the_exit_code(tmp_path, stats):
    folder = tmp_path / "gone"
    folder.mkdir()
    path = stats.format(folder=tmp_path)
    done = weft("run", "--stats", path, "--", "sh", "-c", f"rm -rf {folder}; exit 7")
    assert done.returncode == 7
    assert "weft: the report failed" in done.stderr


def test_an_interrupt_during_the_report_does_not_change_the_exit_code(tmp_path):
    pipe, ended = tmp_path / "pipe", tmp_path / "ended"
    os.mkfifo(pipe)  # nobody reads it: the report waits
    program = [
        "sh",
        "-c",
        f"trap '' INT; touch {ended}; exit 7",
    ]  # a signal before its end changes nothing
    command = [sys.executable, "-m", "weft", "run", "--quiet", "--stats", str(pipe), "--", *program]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}) as running:
        while not ended.exists():
            time.sleep(0.05)
        while running.poll() is None:
            time.sleep(0.2)
            running.send_signal(signal.SIGINT)
        assert running.returncode == 7


# --- job folders ------------------------------------------------------------------------------------------------


def test_a_process_takes_little_room(program):
    source = """
        import os
        launch(kernel("gemm"))
        folder = os.environ["WEFT_JOB"]
        sizes = [os.stat(os.path.join(folder, name)).st_blocks * 512 for name in os.listdir(folder) if name not in ("control", "job.json", "outcome.json")]
        for i in range(100):
            launch(kernel(f"k{i}"))
        show([sizes, [os.stat(os.path.join(folder, name)).st_blocks * 512 for name in os.listdir(folder) if name not in ("control", "job.json", "outcome.json")]])
    """
    (small,), (larger,) = program(source).results
    assert small <= 32 * 1024
    assert larger <= 160 * 1024


def test_a_folder_left_by_a_weft_that_was_killed_is_removed_by_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "weft", "run", "--quiet", "--", "sh", "-c", "echo on; exec sleep 100"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"on\n"
        with Job() as job:  # another job must not remove a folder that is in use
            assert len(list(tmp_path.glob("weft-job-*"))) == 2
            assert job.folder.parent == tmp_path
        running.kill()
    assert len(list(tmp_path.glob("weft-job-*"))) == 1
    assert weft("run", "--quiet", "--", "true").returncode == 0
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_job_folder_of_ours_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    (tmp_path / "weft-job-link").symlink_to(outside)
    (tmp_path / "weft-job-file").write_text("a file")
    (tmp_path / "weft-other").mkdir()
    with Job():
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "outside",
        "weft-job-file",
        "weft-job-link",
        "weft-other",
    ]
    assert (outside / "file").exists()


def test_a_running_job_is_locked_and_kept_recent(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job() as job:
        number = os.open(job.folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(number)
        for path in (job.folder, job.folder / "control"):
            os.utime(path, (0, 0))
        job.keep_alive()
        assert all(time.time() - path.stat().st_mtime < 60 for path in (job.folder, job.folder / "control"))


def test_without_any_folder_the_policy_still_holds(environment, monkeypatch, fake_driver):
    monkeypatch.setattr(job_folder, "_parents", lambda: iter(()))
    source = "from driver import *\nlaunch(kernel('gemm')); print(records()[-1]['shared'])"
    from weft.policy import Policy

    with Job(Policy(residency=2)) as job:
        assert "nothing is counted" in job.problem
        done = subprocess.run(
            [sys.executable, "-c", source],
            env=job.environment(environment),
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(done.stdout) > 0
        job.set_policy(Policy())
        done = subprocess.run(
            [sys.executable, "-c", source],
            env=job.environment(environment),
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(done.stdout) == 0
        assert job.collect()["launches"] == 0
