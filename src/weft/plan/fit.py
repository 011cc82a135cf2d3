"""Fit figures to measured steps: least squares of log errors, held near what is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.figures import Figures
from weft.plan.published import Published
from weft.plan.step import predict


@dataclass(frozen=True)
class Free:
    """One figure to fit, or several that stay equal."""

    paths: tuple[str, ...]
    """`gemm_tail`, `gemm.h100.fp8`, `software.megatron-2025.skew`."""
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
    if parts[0] == "software":
        name, field = parts[1].rsplit(".", 1)
        return figures.with_software(name, **{field: value})
    return replace(figures, **{path: value})


def applied(figures: Figures, free: Sequence[Free], logs: np.ndarray) -> Figures:
    """Figures with all fitted values, given as logarithms."""
    for one, log in zip(free, logs, strict=True):
        for path in one.paths:
            figures = with_value(figures, path, min(one.most, math.exp(log)))
    return figures


def log_errors(figures: Figures, rows: Sequence[Published]) -> np.ndarray:
    """Log of predicted over measured step, row by row."""
    steps = [predict(row.job, figures, check_memory=False).step_s for row in rows]
    return np.log(np.array(steps) / np.array([row.step_s for row in rows]))


def fit(
    figures: Figures,
    free: Sequence[Free],
    rows: Sequence[Published],
    *,
    noise: float = 0.03,
    rounds: int = 12,
) -> Figures:
    """Gauss-Newton on logarithms. `noise`: error of a row that is taken as it comes.

    Rows far off weigh less (Huber), sources count alike whatever their number of rows, and every figure is
    pulled towards its prior.
    """
    prior = np.log([one.prior for one in free])
    spread = np.array([one.spread for one in free])
    sizes = {source: sum(row.source == source for row in rows) for source in {row.source for row in rows}}
    mean = len(rows) / len(sizes)
    weight = np.array([math.sqrt(mean / sizes[row.source]) for row in rows]) / noise
    logs = prior.copy()

    def cost(at: np.ndarray) -> float:
        r = np.abs(log_errors(applied(figures, free, at), rows) * weight)
        huber = np.where(r < 2, r * r, 4 * r - 4)
        return float(huber.sum() + (((at - prior) / spread) ** 2).sum())

    best = cost(logs)
    for _ in range(rounds):
        base = log_errors(applied(figures, free, logs), rows)
        slope = np.empty((len(rows), len(free)))
        for i in range(len(free)):
            moved = logs.copy()
            moved[i] += 0.02
            slope[:, i] = (log_errors(applied(figures, free, moved), rows) - base) / 0.02
        scale = weight * np.sqrt(np.minimum(1.0, 2 / np.maximum(1e-9, np.abs(base * weight))))
        left = np.vstack([slope * scale[:, None], np.diag(1 / spread)])
        right = np.concatenate([-base * scale, (prior - logs) / spread])
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
