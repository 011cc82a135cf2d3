"""Kinds of noise in step times, as factors on the time of a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

Noise = Callable[[random.Random], Iterator[float]]


def scatter(sigma: float) -> Noise:
    return each(lambda r: math.exp(r.gauss(0, sigma)))


def each(draw: Callable[[random.Random], float]) -> Noise:
    """Independent steps."""

    def noise(r: random.Random) -> Iterator[float]:
        while True:
            yield draw(r)

    return noise


def student(scale: float) -> Noise:
    """Heavy tails: Student's distribution with two degrees of freedom."""
    return each(lambda r: math.exp(scale * r.gauss(0, 1) / math.sqrt(r.expovariate(1))))


def autocorrelated(sigma: float, rho: float) -> Noise:
    def noise(r: random.Random) -> Iterator[float]:
        x = 0.0
        while True:
            x = rho * x + math.sqrt(1 - rho * rho) * r.gauss(0, sigma)
            yield math.exp(x + r.gauss(0, 0.003))

    return noise


def pattern(factors: Sequence[float], sigma: float = 0.003) -> Noise:
    """A cycle that begins at a random place."""

    def noise(r: random.Random) -> Iterator[float]:
        i = r.randrange(len(factors))
        while True:
            i += 1
            yield factors[i % len(factors)] * math.exp(r.gauss(0, sigma))

    return noise


def every(steps: int, extra: float) -> Noise:
    return pattern([1 + extra] + [1] * (steps - 1))


def bimodal(share: float, extra: float) -> Noise:
    return each(lambda r: (1 + extra * (r.random() < share)) * math.exp(r.gauss(0, 0.003)))


def stalls(share: float, mean: float) -> Noise:
    return each(
        lambda r: (1 + (r.expovariate(1 / mean) if r.random() < share else 0)) * math.exp(r.gauss(0, 0.004))
    )


def states(extra: float, switch: float) -> Noise:
    """Two states that each last a while."""

    def noise(r: random.Random) -> Iterator[float]:
        slow = r.random() < 0.5
        while True:
            slow ^= r.random() < switch
            yield (1 + extra * slow) * math.exp(r.gauss(0, 0.003))

    return noise


def drift(per_step: float, sigma: float = 0.003) -> Noise:
    def noise(r: random.Random) -> Iterator[float]:
        i = 0
        while True:
            i += 1
            yield math.exp(per_step * i + r.gauss(0, sigma))

    return noise


def wave(length: float, height: float) -> Noise:
    def noise(r: random.Random) -> Iterator[float]:
        i = r.random() * length
        while True:
            i += 1
            yield (1 + height * math.sin(2 * math.pi * i / length)) * math.exp(r.gauss(0, 0.002))

    return noise


def bursts(share: float, length: int, extra: float) -> Noise:
    """Now and then several slow steps in a row."""

    def noise(r: random.Random) -> Iterator[float]:
        left = 0
        while True:
            left = left - 1 if left else length * (r.random() < share)
            yield (1 + extra * (left > 0)) * math.exp(r.gauss(0, 0.004))

    return noise


def boundaries(sigma: float, each_other: bool = True) -> Noise:
    """The next step makes up for a longer one; without `each_other`, only within pairs of steps."""

    def noise(r: random.Random) -> Iterator[float]:
        owed, second = 0.0, False
        while True:
            more = 0.0 if second and not each_other else r.gauss(0, sigma)
            yield max(0.05, 1 + more - owed)
            owed, second = more, not second

    return noise


def growing(sigma: float) -> Noise:
    """The scatter itself grows and shrinks."""

    def noise(r: random.Random) -> Iterator[float]:
        i = r.random() * 40
        while True:
            i += 1
            yield math.exp(r.gauss(0, sigma * (1.05 + math.sin(i / 6))))

    return noise


KINDS: dict[str, Noise] = {
    **{f"scatter {100 * s:g}%": scatter(s) for s in (0.003, 0.01, 0.03, 0.1, 0.3)},
    **{
        f"autocorrelation {rho}, {100 * s:g}%": autocorrelated(s, rho)
        for s, rho in ((0.01, 0.9), (0.03, 0.95), (0.03, 0.5), (0.02, -0.6), (0.1, 0.99))
    },
    **{f"drift {100 * d:g}% a step": drift(d) for d in (0.001, -0.001, -0.005)},
    "lengths 0.5 to 1.5": each(lambda r: r.uniform(0.5, 1.5)),
    "lengths 0.8 to 1.2": each(lambda r: r.uniform(0.8, 1.2)),
    "lengths of four kinds": each(lambda r: r.choice((0.7, 0.9, 1.0, 1.6)) * math.exp(r.gauss(0, 0.003))),
    **{
        f"{100 * p:g}% of steps +{100 * e:g}%": bimodal(p, e)
        for p, e in ((0.5, 0.2), (0.1, 0.5), (0.5, 0.02), (0.25, 0.05))
    },
    "5% stalls of 50%": stalls(0.05, 0.5),
    "20% stalls of 20%": stalls(0.2, 0.2),
    **{
        f"two states +{100 * e:g}%, switch {100 * s:g}%": states(e, s)
        for e, s in ((0.05, 0.05), (0.03, 0.1), (0.1, 0.03))
    },
    **{
        f"every {p} steps +{100 * e:g}%": every(p, e)
        for p in (2, 3, 4, 5, 6, 7, 8, 10, 16)
        for e in (0.015, 0.05, 0.5)
    },
    **{
        f"cycle {', '.join(f'{f:g}' for f in factors)}": pattern(factors)
        for factors in (
            (1, 1.02, 1.02, 1),
            (1, 1.01, 1, 0.99),
            (1, 1.1, 1.2, 1.1),
            (1, 1.1, 1.2, 1.3),
            (1, 1, 2, 2),
            (1, 2),
            (1, 2, 3),
            (1, 1, 1, 2),
            (1, 1.3, 1, 1.3, 1, 5),
        )
    },
    "Cauchy": each(lambda r: math.exp(max(-1, min(3, 0.01 * math.tan(math.pi * (r.random() - 0.5)))))),
    "Pareto 1.1": each(lambda r: 1 + min(50, 0.02 * (r.paretovariate(1.1) - 1))),
    "boundaries that move by 2%": boundaries(0.02),
    "pairs of steps, 30%": boundaries(0.3, each_other=False),
    "wave of 20 steps": wave(20, 0.1),
    "wave of 3.7 steps": wave(3.7, 0.1),
    "bursts of 4": bursts(0.05, 4, 0.3),
    "growing scatter": growing(0.03),
}
