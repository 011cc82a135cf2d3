"""Fit figures to measured steps: least squares of log errors, held near what is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.plan.figures import Figures
from weft.plan.published import Published
from weft.plan.step import predict

Logs = NDArray[np.float64]


@dataclass(frozen=True)
class Free:
    """One figure to fit, or several that stay equal."""

    paths: tuple[str, ...]
    """`gemm_tail`, `gemm.h100.fp8`, `links.congestion`, `software.megatron-2025.skew`; `scale.A.B`: matrix
    rates of GPU A against those of B."""
    prior: float
    spread: float
    """How far from `prior` it may well be, as a factor: 0.1 is about 10%."""
    most: float = math.inf


def with_value(figures: Figures, path: str, value: float) -> Figures:
    """Figures with one of them replaced."""
    parts = path.split(".", 1)
    if parts[0] == "gemm":
        gpu, precision = parts[1].split(".")
        family = {**figures.gemm.get(gpu, {}), precision: value}
        return replace(figures, gemm={**figures.gemm, gpu: family})
    if parts[0] == "scale":
        gpu, other = parts[1].split(".")
        family = {precision: value * share for precision, share in figures.gemm[other].items()}
        return replace(figures, gemm={**figures.gemm, gpu: family})
    if parts[0] == "software":
        name, field = parts[1].rsplit(".", 1)
        return figures.with_software(name, **{field: value})
    if parts[0] == "links":
        return replace(figures, links=replace(figures.links, **{parts[1]: value}))
    return figures.but(**{path: value})


def applied(figures: Figures, free: Sequence[Free], logs: Logs) -> Figures:
    """Figures with all fitted values, given as logarithms."""
    for one, log in zip(free, logs, strict=True):
        for path in one.paths:
            figures = with_value(figures, path, min(one.most, math.exp(log)))
    return figures


def log_errors(figures: Figures, rows: Sequence[Published]) -> Logs:
    """Log of predicted over measured step, row by row."""
    steps = [predict(row.job, figures, check_memory=False).step_s for row in rows]
    return np.array([math.log(step / row.step_s) for step, row in zip(steps, rows, strict=True)])


def series(rows: Sequence[Published]) -> list[list[int]]:
    """Rows that differ only in the number of replicas: what they differ by is the cost of scale."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(rows):
        job = row.job
        split = (job.tp, job.pp, job.cp, job.ep, job.interleave, job.recompute, job.hide)
        key = (row.source, job.software, job.precision, job.model.layers, job.model.hidden, job.seq_len)
        found.setdefault((*key, *split, job.micro_batches), []).append(i)
    return [group for group in found.values() if len(group) > 1]


def _targets(rows: Sequence[Published], noise: float, scale_noise: float) -> Logs:
    """A matrix from log errors to what is minimised: each error, and each difference within a series."""
    sizes = {source: sum(row.source == source for row in rows) for source in {row.source for row in rows}}
    mean = len(rows) / len(sizes)
    lines = [np.diag([math.sqrt(mean / sizes[row.source]) / noise for row in rows])]
    for group in series(rows):
        for i in group:
            line = np.zeros((1, len(rows)))
            line[0, group] -= 1 / len(group)
            line[0, i] += 1
            lines.append(line / scale_noise)
    return np.vstack(lines)


def fit(
    figures: Figures,
    free: Sequence[Free],
    rows: Sequence[Published],
    *,
    noise: float = 0.03,
    scale_noise: float = 0.01,
    rounds: int = 12,
) -> Figures:
    """Gauss-Newton on logarithms. `noise`, `scale_noise`: errors that are taken as they come, of a row and of
    the differences within a series.

    What is far off weighs less (Huber), sources count alike whatever their number of rows, and every figure
    is pulled towards its prior.
    """
    prior = np.log([one.prior for one in free])
    spread = np.array([one.spread for one in free])
    targets = _targets(rows, noise, scale_noise)
    logs: Logs = prior.copy()

    def errors(at: Logs) -> Logs:
        return log_errors(applied(figures, free, at), rows)

    def cost(at: Logs) -> float:
        r = np.abs(targets @ errors(at))
        huber = np.where(r < 2, r * r, 4 * r - 4)
        return float(huber.sum() + (((at - prior) / spread) ** 2).sum())

    best = cost(logs)
    for _ in range(rounds):
        base = errors(logs)
        slope = np.empty((len(rows), len(free)))
        for i in range(len(free)):
            moved = logs.copy()
            moved[i] += 0.02
            slope[:, i] = (errors(moved) - base) / 0.02
        off = targets @ base
        weight = np.sqrt(np.minimum(1.0, 2 / np.maximum(1e-9, np.abs(off))))
        left = np.vstack([(targets @ slope) * weight[:, None], np.diag(1 / spread)])
        right = np.concatenate([-off * weight, (prior - logs) / spread])
        step = np.clip(np.linalg.lstsq(left, right, rcond=None)[0], -0.5, 0.5)
        for shrink in (1.0, 0.5, 0.25, 0.1):
            found = cost(logs + shrink * step)
            if found < best:
                break
        else:
            break
        gain, best, logs = best - found, found, logs + shrink * step
        if gain < 1e-3 * best:
            break
    return applied(figures, free, logs)
