"""A job's figures for Prometheus: counters and gauges by rank; no command lines, paths or environments."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from weft.monitor.sample import JobSample, RankSample
from weft.monitor.watch_job import JobWatch

PHASES = ("waiting", "searching", "watching", "over")
_COUNTERS = {
    "weft_kernel_launches": ("GPU kernels launched", "launches"),
    "weft_collective_launches": ("Communication kernels launched", "comm_launches"),
    "weft_shaped_launches": ("Launches with limited residency", "shaped"),
    "weft_comm_bytes": ("Bytes that NCCL calls were asked to move", "comm_bytes"),
    "weft_steps": ("Training steps", "steps"),
}
_GAUGES = {
    "weft_step_seconds": ("Median of the latest steps", "step_ms", 1e-3),
    "weft_step_p10_seconds": ("10th percentile of the latest steps", "step_p10_ms", 1e-3),
    "weft_step_p90_seconds": ("90th percentile of the latest steps", "step_p90_ms", 1e-3),
    "weft_collective_ctas": (
        "Thread blocks of the collective launched most since the last scrape",
        "ctas",
        1.0,
    ),
}


class JobCollector:
    """The collector that `prometheus_client` calls at every scrape."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch, self._lock = watch, threading.Lock()

    def collect(self) -> Iterator[Any]:
        """The current figures, as metric families."""
        with self._lock:  # several may scrape at once
            sample = self._watch.sample()
        yield from _by_rank(sample)
        yield from _of_job(sample)


def _by_rank(sample: JobSample) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["job", "rank", "pid"]
    for name, (text, field) in _COUNTERS.items():
        family = CounterMetricFamily(name, text, labels=labels)
        for rank in sample.ranks:
            if getattr(rank, field) is not None:
                family.add_metric(_labels(sample, rank), getattr(rank, field))
        yield family
    for name, (text, field, scale) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=labels)
        for rank in sample.ranks:
            value = getattr(rank, field)
            if value is not None and rank.alive:
                family.add_metric(_labels(sample, rank), value * scale)
        yield family


def _of_job(sample: JobSample) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    info = GaugeMetricFamily("weft_policy_info", "The policy in force", labels=["job", "policy"])
    info.add_metric([sample.job, sample.policy_label], 1)
    yield info
    failures = CounterMetricFamily("weft_failures", "Controls that fell back", labels=["job", "kind"])
    for name, value in sample.totals.items():
        if name.endswith("_failures"):
            failures.add_metric([sample.job, name.removesuffix("_failures")], value)
    yield failures
    if sample.exposed_pct is not None:
        exposed = GaugeMetricFamily(
            "weft_exposed_ratio", "Exposed share of the recorded steps", labels=["job"]
        )
        exposed.add_metric([sample.job], sample.exposed_pct / 100)
        yield exposed
    if sample.tuning is not None:
        phase = GaugeMetricFamily("weft_tuning_phase", "What live tuning does", labels=["job", "phase"])
        for one in PHASES:
            phase.add_metric([sample.job, one], float(sample.tuning.phase == one))
        yield phase
        if sample.tuning.gain_pct is not None:
            gain = GaugeMetricFamily(
                "weft_tuning_gain_ratio", "Less time per step by the policy that tuning kept", labels=["job"]
            )
            gain.add_metric([sample.job], sample.tuning.gain_pct / 100)
            yield gain


def _labels(sample: JobSample, rank: RankSample) -> list[str]:
    return [sample.job, "" if rank.rank is None else str(rank.rank), str(rank.pid)]
