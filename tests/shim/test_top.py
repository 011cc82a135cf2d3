"""`weft top` on jobs with a fake driver and a fake NCCL: correct figures, changes from outside, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from building import HERE, compile_c
from jsonschema import Draft202012Validator
from test_nccl_routes import fake_nccl  # noqa: F401 (a fixture)

from weft.errors import InputError, UsageError
from weft.monitor import jobs
from weft.monitor.counters import COUNTER_CHUNK
from weft.monitor.watch_job import JobWatch
from weft.monitor.watch_jobs import JobsWatch
from weft.policy import CommRule, Policy, Rule
from weft.report.documents import json_schema
from weft.shim import job_folder, layout, policy_image
from weft.shim.inject import Job

BUSY = """
    import os, time
    comm, gemm = kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), kernel("gemm")
    def step():
        launch(comm, grid=12, stream=7)
        for _ in range(3):
            launch(gemm)
        finish(7)
    while not os.path.exists("stop"):
        step()
        time.sleep(0.005)
"""


class Running:
    """A job that runs until `stop()`."""

    def __init__(self, folder: Path, env: dict[str, str], source: str, *options: str, header: str = "driver"):
        code = f"from {header} import *\n" + textwrap.dedent(source)
        weft = [sys.executable, "-m", "weft", "run", "--stats", "stats.json", *options, "--"]
        self.folder, self.env = folder, {**env, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [*weft, sys.executable, "-c", code], cwd=folder, env=self.env, stderr=subprocess.PIPE, text=True
        )
        self.name = ""

    def await_counters(self) -> None:
        """Wait until a process of the job counts its launches."""
        while not (found := list(self.folder.glob("weft-job-*/[0-9]*.[0-9]*"))):
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.01)
        self.name = found[0].parent.name.removeprefix("weft-job-")

    @property
    def path(self) -> Path:
        return self.folder / f"weft-job-{self.name}"

    def top(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "weft", "top", *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def stop(self) -> dict:
        (self.folder / "stop").touch()
        assert self.process.wait(60) == 0, self.process.stderr.read()
        return json.loads((self.folder / "stats.json").read_text())


@pytest.fixture
def start(tmp_path, environment, fake_nccl):  # noqa: F811
    started: list[Running] = []

    def run(source: str = BUSY, *options: str, **more) -> Running:
        folder = tmp_path / f"job{len(started)}"
        folder.mkdir()
        env = {**environment, "LD_LIBRARY_PATH": f"{fake_nccl}:{environment['LD_LIBRARY_PATH']}"}
        started.append(Running(folder, env, source, *options, **more))
        started[-1].await_counters()
        return started[-1]

    yield run
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
        job.process.wait()
        job.process.stderr.close()


def watched(job: Running, enough: Callable[[dict], object]) -> tuple[dict, dict, dict]:
    """Three lines of `weft top JOB --json`: the first, the first for which `enough` is true, and the last."""
    with subprocess.Popen(
        [sys.executable, "-m", "weft", "top", job.name, "--json"],
        env=job.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as top:
        lines: list[dict] = []
        while not lines or not enough(lines[-1]):
            text = top.stdout.readline()
            assert text, top.stderr.read()
            lines.append(checked_line(text))
        job.stats = job.stop()
        rest, error = top.communicate(timeout=60)
    assert top.returncode == 0, error
    return lines[0], lines[-1], [lines[-1], *map(checked_line, rest.splitlines())][-1]


def checked_line(text: str) -> dict:
    """The only job in a line of `weft top --json`, once the line is valid by its schema."""
    document = json.loads(text)
    Draft202012Validator(json_schema("top")).validate(document)
    return document["jobs"][0]


def test_the_last_figures_are_those_of_the_statistics(start):
    # A second process starts and ends in the job's last moment.
    late = BUSY + "\n    if os.fork() == 0:\n        step()\n        os._exit(0)\n    os.wait()\n    step()\n"
    job = start(late, "--priority", "high", "--residency", "2", "--head-start", "5")
    first, later, last = watched(
        job, lambda line: line["collectives_per_s"] and line["launches_per_s"] > line["collectives_per_s"]
    )
    assert (first["state"], last["state"]) == ("running", "ended")
    assert last["totals"] == {name: job.stats[name] for name in last["totals"]}
    assert last["totals"].keys() >= {"launches", "comm_launches", "shaped", *layout.COUNTERS}
    assert len(last["ranks"]) == len(job.stats["processes"]) == 2
    by_process = {rank["pid"]: rank for rank in last["ranks"]}
    for process in job.stats["processes"]:
        for name in ("launches", "comm_launches", "shaped", "comm_bytes"):
            assert by_process[process["pid"]][name] == process[name]
    assert last["totals"]["shaped"] > 0
    assert first["policy"] == job.stats["policy"]
    assert first["policy_label"] == "priority+res2+head5"
    assert later["ranks"][0]["ctas"] == 12


STEPS = """
    n = Nccl()
    comm = n.init(2, 0)
    begun = []
    while len(begun) < 80 or not os.path.exists("stop"):
        begun.append(1e3 * time.monotonic())
        for count in COUNTS:
            n.all_reduce(comm, count)
        time.sleep(0.004)
    open("steps.json", "w").write(json.dumps(begun))
"""


@pytest.mark.parametrize("counts", [(256, 1024, 256), (512, 512, 512, 512)], ids=["different", "equal"])
def test_steps_and_bytes_come_from_the_calls_of_nccl(start, counts):
    job = start(STEPS.replace("COUNTS", str(counts)), header="nccl_driver")
    _, _, last = watched(job, lambda line: line["comm_bytes_per_s"])
    begun = json.loads((job.folder / "steps.json").read_text())
    assert last["totals"]["comm_bytes"] == job.stats["comm_bytes"] == 4 * sum(counts) * len(begun)
    # The last steps may not be recognized yet: of the 64 whose median is shown, at least 56 are these.
    own = sorted(after - before for before, after in pairwise(begun[-65:]))
    assert 0.8 * own[32 - 9] <= last["step_ms"] <= 1.25 * own[32 + 8]
    assert last["ranks"][0]["step_p10_ms"] <= last["step_ms"] <= last["ranks"][0]["step_p90_ms"]


TRACED = """
    import time
    ctypes.CDLL(None).weft_trace_set_clock(None)  # by real time
    gemm, comm = kernel("gemm"), kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    cost("gemm", 1000, sms=100)
    cost("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 700, sms=8)
    import os
    while not os.path.exists("stop"):
        launch(gemm, stream=0x10)
        launch(comm, grid=8, stream=0x20)
        sync()
        time.sleep(0.01)
"""


def test_the_exposed_share_is_that_of_the_trace(start):
    import weft

    job = start(
        TRACED, "--trace", "traces", "--trace-after", "0", "--trace-steps", "1", header="tracer_driver"
    )
    until(lambda: list(job.path.glob("trace.*")), 60)
    line = json.loads(job.top(job.name, "--json", "--samples", "1").stdout)["jobs"][0]
    job.stop()
    (rank,) = weft.analyze(job.folder / "traces").to_json()["ranks"]
    assert line["exposed_pct"] > 0
    assert line["exposed_pct"] == pytest.approx(
        100 * rank["exposed_comm_us"] / rank["span_us"], rel=0.02, abs=0.01
    )


# --- changes from outside -----------------------------------------------------------------------------------------

SEEN = """
    import os, time
    comm = kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    while not os.path.exists("stop"):
        launch(comm, grid=12, stream=7)
        open("seen.new", "w").write(str(records()[-1]["priority"]))
        os.rename("seen.new", "seen")
        time.sleep(0.02)
"""


def until(condition, seconds=60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_policy_is_put_in_force_and_taken_back_while_the_job_runs(start, tmp_path):
    job = start(SEEN)
    Policy(priority="high", rules=(Rule("*gemm*", 2),)).save(tmp_path / "policy.json")
    seen = job.folder / "seen"
    until(seen.exists)
    plain = seen.read_text()
    done = job.top(job.name, "--policy", str(tmp_path / "policy.json"), "--json")
    changed = json.loads(done.stdout)
    Draft202012Validator(json_schema("top-change")).validate(changed)
    assert changed["before"] == {"version": 1}
    assert changed["policy"]["comm"] == {"priority": "high"}
    until(lambda: seen.read_text() != plain)
    line = json.loads(job.top(str(job.path), "--json", "--samples", "1").stdout)
    assert line["jobs"][0]["policy"] == json.loads((tmp_path / "policy.json").read_text())
    assert "-> overlap" in job.top(str(job.process.pid), "--off").stdout
    until(lambda: seen.read_text() == plain)
    stats = job.stop()
    assert stats["policy_changes"] == 2


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(max_ctas=8), "comm.max_ctas concerns all ranks at once"),
        (Policy(priority="high", engine="dma"), "comm.engine concerns all ranks at once"),
        (Policy(comm_rules=(CommRule(ctas=8),)), "comm.rules concerns all ranks at once"),
        (Policy(bucket_mb=2), "framework.bucket_mb concerns all ranks at once"),
    ],
)
def test_controls_that_ranks_must_share_are_refused_and_nothing_is_half_applied(
    start, tmp_path, policy, reason
):
    job = start()
    policy.save(tmp_path / "policy.json")
    done = job.top(job.name, "--policy", str(tmp_path / "policy.json"), check=False)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert job.stop()["policy_changes"] == 0


def test_off_says_which_control_stays(start, tmp_path):
    rules = (CommRule(collective="all_reduce", ctas=4),)
    policy = Policy(max_ctas=8, priority="high", comm_rules=rules)
    policy.save(tmp_path / "policy.json")
    job = start(BUSY, "--policy", str(tmp_path / "policy.json"))
    done = job.top(job.name, "--off")
    kept = 'comm.max_ctas 8, comm.rules [{"collective": "all_reduce", "ctas": 4}]'
    assert f"{kept} stays in force" in done.stdout
    line = json.loads(job.top(job.name, "--json", "--samples", "1").stdout)
    assert line["jobs"][0]["policy"] == replace(policy, priority="default").to_dict()
    job.stop()


def test_a_job_under_tuning_is_left_unchanged(start):
    job = start(BUSY, "--tune")
    done = job.top(job.name, "--off", check=False)
    assert (done.returncode, "being tuned" in done.stderr) == (2, True), done.stderr
    assert job.stop()["policy_changes"] == 0


def test_a_process_with_a_policy_of_its_own_is_left_unchanged(start):
    own = "\n    from weft.shim import binding\n    from weft.policy import Policy\n"
    job = start(own + "    binding.set_policy(Policy(residency=3))" + BUSY)
    until(lambda: JobWatch(jobs.select_job(str(job.path))).own_policies())
    done = job.top(job.name, "--off", check=False)
    assert (done.returncode, "has a policy of its own" in done.stderr) == (2, True), done.stderr
    sample = json.loads(job.top(job.name, "--json", "--samples", "1").stdout)["jobs"][0]
    assert (sample["policy_label"], sample["ranks"][0]["policy"]) == ("overlap", "res3")
    job.stop()


# --- which jobs ---------------------------------------------------------------------------------------------------


def test_several_jobs_are_found_and_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job(command=["first"]) as one, Job(command=["second"]) as two:
        found = {job.folder: job for job in jobs.running_jobs()}
        assert found[one.folder].command == ("first",)
        assert found[two.folder].command == ("second",)
        watch = JobsWatch()
        shown = {sample.folder for sample in watch.sample().jobs}
        assert shown >= {str(one.folder), str(two.folder)}
        watch.close()
    assert not {one.folder, two.folder} & {job.folder for job in jobs.running_jobs()}


def test_a_job_of_another_user_is_refused_and_not_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job() as job:
        monkeypatch.setattr(os, "getuid", lambda: job.folder.stat().st_uid + 1)
        for name in (str(job.folder), job.folder.name, job.folder.name.removeprefix("weft-job-")):
            with pytest.raises(UsageError, match="belongs to another user"):
                jobs.select_job(name)
        with pytest.raises(UsageError, match="belongs to another user"):
            jobs.select_job(str(os.getpid()))
        assert job.folder not in [found.folder for found in jobs.running_jobs()]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_root_does_not_attach_to_another_users_job(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job() as job:
        os.chown(job.folder, 12345, 12345)
        with pytest.raises(UsageError, match="belongs to another user"):
            jobs.select_job(str(job.folder))


def test_a_job_that_is_over_or_none_at_all_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(UsageError, match="no running job 'nonsense'; running jobs of this user: "):
        jobs.select_job("nonsense")
    with pytest.raises(InputError, match="not the folder of a job"):
        jobs.select_job(str(tmp_path))
    left = tmp_path / "weft-job-left"
    left.mkdir()
    (left / "control").write_bytes(policy_image.control_image(Policy()))
    with pytest.raises(InputError, match="is over"):
        jobs.select_job("left")


def test_a_job_that_ends_before_it_is_watched_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job() as job:
        found = jobs.select_job(str(job.folder))
    with pytest.raises(InputError, match="is over, or cannot be read"):
        JobsWatch(found)


def test_a_killed_job_is_told_from_one_that_ended(start):
    job = start()
    watch = JobsWatch(jobs.select_job(str(job.path)))
    assert watch.sample().jobs[0].state == "running"
    until(lambda: watch.sample().jobs[0].totals["launches"] > 0)
    job.process.send_signal(signal.SIGKILL)
    job.process.wait()
    sample = watch.sample().jobs[0]
    assert (sample.state, watch.over) == ("killed", True)
    assert sample.totals["launches"] > 0
    watch.close()


# --- the reading --------------------------------------------------------------------------------------------------


def test_the_readers_layout_is_the_shims():
    import ctypes

    assert COUNTER_CHUNK.itemsize == ctypes.sizeof(layout.CChunk)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(priority="high", head_start_us=7.5, residency=3, when="overlap"),
        Policy(rules=(Rule("*gemm*", 2), Rule("*norm*", None)), sm_reserve=8),
        Policy(head_start="placed"),
        Policy(head_start="placed", head_start_us=20),
        Policy(comm_rules=(CommRule(ctas=4), CommRule(collective="send_recv", ctas=2))),
        Policy(
            comm_rules=(CommRule(collective="all_gather", max_bytes=1 << 20, algorithm="ring", cluster=0),)
        ),
        Policy(comm_rules=(CommRule(min_bytes=5, protocol="ll128", chunk=8192, cta_policy="zero"),)),
    ],
)
def test_a_policy_is_read_back_from_the_shims_memory(policy):
    assert policy_image.decode_policy(policy_image.encode_policy(policy)) == policy
    assert policy_image.decode_policy(policy_image.encode_policy(None, track=True)) is None


MANY = """
    import os, time
    gemm, comm = kernel("gemm"), kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    for i in range(60):
        kernel(f"other{i}")
    for rank in range(64):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            for i in range(60):
                launch(kernel(f"k{i}"))
            for _ in range(rank + 1):
                launch(comm, grid=8)
            open(f"ready.{rank}", "w").close()
            while not os.path.exists("stop"):
                time.sleep(0.05)
            os._exit(0)
    launch(gemm)
    for _ in range(64):
        os.wait()
"""


def additions(_: int) -> float:
    """CPU time of a Python loop, as a measure of this machine's speed."""
    before, total = time.process_time(), 0
    for number in range(100_000):
        total += number
    return time.process_time() - before


def test_64_ranks_are_watched_for_about_a_hundredth_of_a_core(start):
    job = start(MANY)
    until(lambda: len(list(job.folder.glob("ready.*"))) == 64, 60)
    watch = JobsWatch(jobs.select_job(str(job.path)))
    spent = []
    for _ in range(12):
        before = time.process_time()
        sample = watch.sample().jobs[0]
        spent.append(time.process_time() - before)
    ranks = [rank for rank in sample.ranks if rank.rank is not None]
    assert [rank.rank for rank in ranks] == list(range(64))
    assert [rank.comm_launches for rank in ranks] == list(range(1, 65))
    # CPU time, of the second between two samples: 0.008 where 100,000 additions took 0.0025, and machines differ.
    assert min(spent) < 8 * min(map(additions, range(12)))
    watch.close()
    stats = job.stop()
    assert stats["launches"] == sample.totals["launches"] == 64 * 60 + sum(range(1, 65)) + 1


def test_watching_adds_no_instruction_to_the_job(fake_driver, environment, tmp_path):
    import shutil
    import threading

    from test_instructions import instructions

    if shutil.which("valgrind") is None:
        pytest.skip("needs valgrind")
    hammer = compile_c(tmp_path / "hammer", str(HERE / "hammer.c"), f"-L{fake_driver}", "-lcuda", "-lpthread")
    counts = []
    for watched_too in (False, True):
        with Job(Policy(priority="high", residency=3)) as job:
            over = threading.Event()

            def look(job=job, over=over):
                watch = JobsWatch(jobs.describe_running(job.folder))
                while not over.wait(0.01):
                    watch.sample()
                watch.close()

            thread = threading.Thread(target=look if watched_too else lambda: None)
            thread.start()
            counts.append(instructions([str(hammer), "1", "20000"], job.environment(environment)))
            over.set()
            thread.join()
    assert counts[1] == pytest.approx(counts[0], rel=1e-3)


def test_a_rank_that_only_published_steps_is_shown_also_after_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job() as job:
        code = (
            "from weft.shim.step_times import StepWriter\n"
            "writer = StepWriter(3, 8)\n"
            "for _ in range(9): writer.step()\n"
        )
        env = {**os.environ, "WEFT_JOB": str(job.folder), "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        watch = JobWatch(jobs.describe_running(job.folder))
        (rank,) = watch.sample().ranks
    assert (rank.rank, rank.steps, rank.alive) == (3, 8, False)
    assert rank.step_ms > 0
    assert watch.sample().ranks == [rank]
    watch.close()


def test_a_torn_or_foreign_file_is_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job() as job:
        for name, data in (("1.0", b""), ("2.0", b"weftprc"), ("calls.3.0", b""), ("steps.4", b"x" * 9)):
            (job.folder / name).write_bytes(data)
        for name in ("5.0", "calls.6.0", "steps.7", "trace.8.0"):
            os.mkfifo(job.folder / name)  # opening a FIFO waits for a writer
        (job.folder / "9.0").mkdir()
        for name in ("calls.x", "calls.", "tuning.x.json", "tuning.", "steps.²"):
            (job.folder / name).write_text("?")
        (job.folder / "tuning.0.json").write_text("{half")
        (job.folder / "job.json").write_text("[]")
        watch = JobWatch(jobs.describe_running(job.folder))
        before = len([*Path("/proc/self/fd").iterdir()])
        for _ in range(3):
            sample = watch.sample()
        assert (sample.state, sample.ranks, sample.totals["launches"]) == ("running", [], 0)
        assert len([*Path("/proc/self/fd").iterdir()]) <= before  # fewer, where another test's are collected
        watch.close()
    assert job_folder.in_use(job.folder) is False


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"facts": [1], "state": "kept", "gain_pct": "much"}',
        '{"facts": {"step_ms": "a", "exposed_ms": 1}}',
        '{"facts": {"step_ms": 1, "exposed_ms": NaN}, "state": "kept", "gain_pct": 1e400}',
    ],
)
def test_a_result_of_tuning_with_other_contents_has_no_figures(tmp_path, monkeypatch, text):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job(tune=True) as job:
        (job.folder / "tuning.0.json").write_text(text)
        job_folder.describe_job(job.folder, {"tune": True, "pid": 10**30, "started": 1e400})
        watch = JobWatch(jobs.describe_running(job.folder))
        sample = watch.sample()
        (job.folder / job_folder.OUTCOME).write_text('{"tuning": null}')
    assert (sample.pid, sample.elapsed_s, sample.exposed_pct) == (None, None, None)
    assert sample.tuning.gain_pct is None
    assert watch.sample().state == "ended"
    watch.close()


def test_digits_that_are_no_number_name_no_job():
    with pytest.raises(UsageError, match="no running job '²'"):
        jobs.select_job("²")
