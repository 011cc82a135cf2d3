"""Fit the constants to measured steps: least squares of log errors, held near what is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.plan.figures import Figures
from weft.plan.published import Published
from weft.plan.step import predict

Logs = NDArray[np.float64]
Extra = Callable[[Figures], Logs]
"""Further log errors that are fitted along, such as those of single collectives."""
NOISE = 0.03
"""Error of a published step that is taken as it comes."""
OPEN_NOISE = 0.12
"""The same where the publication leaves part of the configuration open."""
SCALE_NOISE = 0.02
"""The same for differences within a series."""
EXTRA_NOISE = 0.25
"""Error of a single collective that is taken as it comes: published curves of one machine differ by this."""


@dataclass(frozen=True)
class Free:
    """One constant to fit."""

    name: str
    prior: float
    """What is known of it beforehand."""
    spread: float
    """How far from `prior` it may well be, as a factor: 0.1 is about 10%."""
    most: float = math.inf


def applied(figures: Figures, free: Sequence[Free], logs: Logs) -> Figures:
    """Figures with all fitted values, given as logarithms."""
    values = {one.name: min(one.most, math.exp(log)) for one, log in zip(free, logs, strict=True)}
    return figures.but(**values)


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
    """A matrix from log errors to what is minimised: each error, and each difference within a series.

    A source of many rows counts more than one of few, but not in proportion.
    """
    sizes = {source: sum(row.source == source for row in rows) for source in {row.source for row in rows}}
    mean = len(rows) / len(sizes)
    doubt = [OPEN_NOISE / NOISE if row.assumed else 1.0 for row in rows]
    scale = [(mean / sizes[row.source]) ** 0.25 / noise for row in rows]
    lines = [np.diag([one / much for one, much in zip(scale, doubt, strict=True)])]
    for group in series(rows):
        for i in group:
            line = np.zeros((1, len(rows)))
            line[0, group] -= 1 / len(group)
            line[0, i] += 1
            lines.append(line / scale_noise)
    return np.vstack(lines)


@dataclass(frozen=True)
class Fitted:
    """Constants that fit, and how the errors move with them there."""

    figures: Figures
    logs: Logs
    errors: Logs
    """Log errors of the rows, then of the extra measurements."""
    slope: Logs
    """Change of each error with each constant's logarithm."""


def _step(
    free: Sequence[Free], rows: Sequence[Published], errors: Logs, slope: Logs, logs: Logs, noise: float
) -> tuple[Logs, float]:
    """The Gauss-Newton step from here, and the cost here. What is far off weighs less (Huber)."""
    prior, spread = np.log([one.prior for one in free]), np.array([one.spread for one in free])
    main, count = _targets(rows, noise, SCALE_NOISE), len(rows)
    off = np.concatenate([main @ errors[:count], errors[count:] / EXTRA_NOISE])
    tilted = np.vstack([main @ slope[:count], slope[count:] / EXTRA_NOISE])
    size = np.abs(off)
    cost = np.where(size < 2, size * size, 4 * size - 4).sum() + (((logs - prior) / spread) ** 2).sum()
    weight = np.sqrt(np.minimum(1.0, 2 / np.maximum(1e-9, size)))
    left = np.vstack([tilted * weight[:, None], np.diag(1 / spread)])
    right = np.concatenate([-off * weight, (prior - logs) / spread])
    return np.clip(np.linalg.lstsq(left, right, rcond=None)[0], -0.5, 0.5), float(cost)


def fit(
    figures: Figures,
    free: Sequence[Free],
    rows: Sequence[Published],
    *,
    noise: float = NOISE,
    rounds: int = 12,
    extra: Extra | None = None,
    start: Figures | None = None,
) -> Fitted:
    """Gauss-Newton on logarithms. `noise`: the error of a row that is taken as it comes. `start`: where to
    begin; the priors otherwise. Every constant is pulled towards its prior.
    """
    logs: Logs = np.log([getattr(start.constants, one.name) if start else one.prior for one in free])

    def errors(at: Logs) -> Logs:
        known = applied(figures, free, at)
        found = log_errors(known, rows)
        return np.concatenate([found, extra(known)]) if extra else found

    def slope_at(at: Logs, base: Logs) -> Logs:
        columns = [(errors(at + 0.02 * one) - base) / 0.02 for one in np.eye(len(free))]
        return np.column_stack(columns)

    base = errors(logs)
    slope = slope_at(logs, base)
    for _ in range(rounds):
        step, best = _step(free, rows, base, slope, logs, noise)
        for shrink in (1.0, 0.5, 0.2):
            there = logs + shrink * step
            moved = errors(there)
            found = _step(free, rows, moved, slope, there, noise)[1]
            if found < best:
                break
        else:
            break
        logs, base = there, moved
        if best - found < 2e-3 * best:
            break
        slope = slope_at(logs, base)
    return Fitted(applied(figures, free, logs), logs, base, slope)


def without(
    source: str, whole: Fitted, free: Sequence[Free], rows: Sequence[Published], noise: float = NOISE
) -> Figures:
    """Constants fitted to all publications but one: the errors are taken as linear around the fit to all."""
    kept = [i for i, row in enumerate(rows) if row.source != source]
    which = [*kept, *range(len(rows), len(whole.errors))]
    others = [rows[i] for i in kept]
    logs, errors, slope = whole.logs, whole.errors[which], whole.slope[which]
    moved: Logs = np.zeros_like(logs)
    for _ in range(20):
        step, _ = _step(free, others, errors + slope @ moved, slope, logs + moved, noise)
        moved = moved + step
        if np.abs(step).max() < 1e-4:
            break
    return applied(whole.figures, free, logs + moved)
