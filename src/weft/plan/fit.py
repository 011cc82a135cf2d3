"""Fit the constants to measured steps: least squares of log errors, with priors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.plan.figures import Figures
from weft.plan.published import Published
from weft.plan.step import predict

LogValues = NDArray[np.float64]
Extra = Callable[[Figures], LogValues]
"""Further log errors to include in the fit, such as those of single collectives."""
NOISE = 0.03
"""Expected relative error of a published step."""
OPEN_NOISE = 0.12
"""The same if the publication leaves part of the configuration open."""
SCALE_NOISE = 0.02
"""The same for differences within a series."""
EXTRA_NOISE = 0.25
"""Expected relative error of a single collective: published curves of one machine differ by this much."""


@dataclass(frozen=True)
class Free:
    """One constant to fit."""

    name: str
    prior: float
    """Prior value."""
    spread: float
    """Standard deviation of the prior's logarithm: 0.1 is about 10%."""
    most: float = math.inf
    """Upper bound."""


def applied(figures: Figures, free: Sequence[Free], logs: LogValues) -> Figures:
    """Figures with all fitted values, given as logarithms."""
    values = {one.name: min(one.most, math.exp(log)) for one, log in zip(free, logs, strict=True)}
    return figures.but(**values)


def log_errors(figures: Figures, rows: Sequence[Published]) -> LogValues:
    """Logarithm of the predicted over the measured step time of each row."""
    steps = [predict(row.job, figures, check_memory=False).step_s for row in rows]
    return np.array([math.log(step / row.step_s) for step, row in zip(steps, rows, strict=True)])


def series(rows: Sequence[Published]) -> list[list[int]]:
    """Groups of rows that differ only in the number of replicas; their differences show the cost of scale."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(rows):
        job = row.job
        split = (job.tp, job.pp, job.cp, job.ep, job.interleave, job.recompute, job.hide)
        key = (row.source, job.software, job.precision, job.model.layers, job.model.hidden, job.seq_len)
        found.setdefault((*key, *split, job.micro_batches), []).append(i)
    return [group for group in found.values() if len(group) > 1]


def _targets(rows: Sequence[Published], noise: float, scale_noise: float) -> LogValues:
    """Matrix from log errors to the residuals of the fit: each error, and each difference within a series.

    A source with many rows counts more than one with few, but less than in proportion.
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
    """Fitted constants, and the gradient of the errors at the fit."""

    figures: Figures
    logs: LogValues
    errors: LogValues
    """Log errors of the rows, then of the extra measurements."""
    slope: LogValues
    """Derivative of each error with respect to each constant's logarithm."""


def _step(
    free: Sequence[Free],
    rows: Sequence[Published],
    errors: LogValues,
    slope: LogValues,
    logs: LogValues,
    noise: float,
) -> tuple[LogValues, float]:
    """The Gauss-Newton step from `logs`, and the cost there. Outliers weigh less (Huber)."""
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
    """Gauss-Newton on logarithms; every constant is pulled towards its prior.

    `noise`: expected relative error of a row. `start`: initial constants; None: the priors.
    """
    logs: LogValues = np.log([getattr(start.constants, one.name) if start else one.prior for one in free])

    def errors(at: LogValues) -> LogValues:
        known = applied(figures, free, at)
        found = log_errors(known, rows)
        return np.concatenate([found, extra(known)]) if extra else found

    def slope_at(at: LogValues, base: LogValues) -> LogValues:
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
    """Constants fitted without one publication, assuming that errors are linear around the fit to all."""
    kept = [i for i, row in enumerate(rows) if row.source != source]
    which = [*kept, *range(len(rows), len(whole.errors))]
    others = [rows[i] for i in kept]
    logs, errors, slope = whole.logs, whole.errors[which], whole.slope[which]
    moved: LogValues = np.zeros_like(logs)
    for _ in range(20):
        step, _ = _step(free, others, errors + slope @ moved, slope, logs + moved, noise)
        moved = moved + step
        if np.abs(step).max() < 1e-4:
            break
    return applied(whole.figures, free, logs + moved)
