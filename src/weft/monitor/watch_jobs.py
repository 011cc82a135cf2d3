"""Watches all jobs, or one: finds new jobs, samples running ones, drops those that ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from weft.errors import InputError
from weft.monitor.folder_events import FolderEvents
from weft.monitor.jobs import RunningJob, running_jobs
from weft.monitor.sample import TOP_VERSION, TopSample
from weft.monitor.watch_job import JobWatch

_log = logging.getLogger("weft.monitor")

_SCAN_EVERY_S = 2.0
_SHOWN_AFTER_S = 30.0  # how long a job is shown after it ended


class JobsWatch:
    """The watched jobs. `only`: the one job to watch; None: every job of this user."""

    def __init__(self, only: RunningJob | None = None) -> None:
        self.events = FolderEvents()
        self._only = only
        self._watches: dict[str, JobWatch] = {}
        self._ended_s: dict[str, float] = {}
        self._scanned_s = -_SCAN_EVERY_S
        if only is not None:
            self._add(only)

    @property
    def over(self) -> bool:
        """Whether the only watched job has ended, and was sampled after that."""
        return self._only is not None and str(self._only.folder) in self._ended_s

    def sample(self) -> TopSample:
        now = time.monotonic()
        if self._only is None and now - self._scanned_s >= _SCAN_EVERY_S:
            self._scanned_s = now
            for job in running_jobs():
                self._add(job)
        jobs = []
        for folder, watch in list(self._watches.items()):
            jobs.append(watch.sample())
            if watch.state != "running":
                ended = self._ended_s.setdefault(folder, now)
                if self._only is None and now - ended > _SHOWN_AFTER_S:
                    self._watches.pop(folder).close()
        return TopSample(version=TOP_VERSION, time=time.time(), jobs=jobs)

    def wait(self, seconds: float, also: Sequence[int] = ()) -> bool:
        """Wait, opening files that appear meanwhile. True if the wait ended early, by input on `also`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self.events.wait(left, also):
                return time.monotonic() < end
            for watch in self._watches.values():
                watch.discover()
        return False

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self.events.close()

    def _add(self, job: RunningJob) -> None:
        folder = str(job.folder)
        if folder in self._watches or folder in self._ended_s:
            return
        self.events.watch_folder(job.folder)  # before its files are opened, so that none is missed
        try:
            self._watches[folder] = JobWatch(job)
        except InputError as error:
            if self._only is not None:
                raise
            _log.debug("%s ended before it was watched: %s", folder, error)
