"""A frame of `weft top` with more jobs than the terminal has lines for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.monitor.jobs import RunningJob, describe_running
from weft.monitor.sample import TOP_VERSION, TopSample
from weft.monitor.watch_job import JobWatch
from weft.report.top import LINES_OF_A_JOB, Screen, top_frame
from weft.shim.inject import Job


@pytest.fixture
def twelve_jobs(tmp_path, monkeypatch) -> TopSample:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Job(tune=True, command=["train"]) as job:
        described: RunningJob = describe_running(job.folder)
        watch = JobWatch(described)
        one = watch.sample()
        watch.close()
    return TopSample(version=TOP_VERSION, time=0.0, jobs=[replace(one, job=f"job{n:02d}") for n in range(12)])


@pytest.mark.parametrize("height", [2, 5, 24])
def test_every_job_can_be_reached_by_scrolling(twelve_jobs, height):
    seen = set()
    for offset in range(LINES_OF_A_JOB * len(twelve_jobs.jobs) + 1):
        frame = top_frame(twelve_jobs, Screen(80, height, offset=offset))
        assert len(frame) == height
        assert frame[0].startswith("weft top  12 jobs")
        seen |= {line[:5] for line in frame if line.startswith("job")}
    assert seen == {job.job for job in twelve_jobs.jobs}


def test_where_all_jobs_fit_nothing_is_scrolled_away(twelve_jobs):
    frames = [top_frame(twelve_jobs, Screen(80, 60, offset=offset)) for offset in (0, 30)]
    assert frames[0] == frames[1]
    assert sum(line.startswith("job") for line in frames[0]) == 12
