"""Every kind of simulated job that live tuning is checked with, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from live_inputs import (
    adaptive,
    attention,
    between,
    inputs,
    limited,
    log_normal,
    longer_later,
    misleading,
    sized_accumulation,
    sized_batches,
)
from live_machines import (
    Times,
    clock_levels,
    clock_ticks,
    congestion,
    cron,
    heap_growth,
    heat_wave,
    heavy,
    imbalance,
    loader,
    multiplied,
    pauses,
    phases,
    pink,
    saw_tooth,
    stragglers,
    switching,
    target_rate,
    throttling,
    time_slices,
    workers,
)
from live_noise import KINDS
from live_programs import (
    accumulation,
    adversarial_pair,
    checkpoints,
    curriculum,
    evaluation,
    larger_batches,
    profiled,
    recompilation,
    rollouts,
    serving,
    two_models,
    two_speeds,
    unfreezing,
)


@dataclass(frozen=True)
class Kind:
    """A kind of job: its steps and their noise-free time."""

    times: Times
    step_ms: float = 100.0
    waits: bool = False
    """Whether its total time gains less than its steps: steps wait, or have parts that no policy changes."""


def _of_the_clock() -> Iterator[tuple[str, Kind]]:
    """Kinds whose steps depend on the clock, on their number or on earlier steps."""
    for extra, mean_s, ms in ((0.1, 2, 30), (0.3, 3, 100), (0.08, 5, 300), (0.5, 1, 20), (0.05, 2, 10)):
        yield f"phases +{100 * extra:g}% of {mean_s} s, {ms} ms", Kind(phases(extra, mean_s), ms)
    for pause_ms, steps, ms in ((60, 40, 30), (200, 15, 100), (20, 5, 50)):
        yield f"pauses of {pause_ms} ms every {steps}, {ms} ms", Kind(pauses(pause_ms, steps), ms, waits=True)
    for ratio, depth, sigma, burst in (
        (0.9, 8, 0.5, 1),
        (1.0, 16, 0.2, 1),
        (1.1, 4, 0.3, 4),
        (0.97, 2, 0.8, 1),
        (0.95, 16, 0.3, 8),
    ):
        name = f"loader {ratio}, depth {depth}, {100 * sigma:g}%, burst {burst}"
        yield name, Kind(loader(ratio, depth, sigma, burst), waits=True)
    for steps, cost in ((7, 3), (20, 10), (50, 30), (13, 1)):
        yield f"evaluation every {steps}, cost {cost}", Kind(evaluation(steps, cost), waits=True)
    for counts, hold in (((1, 2, 4, 8), 25), ((4, 8), 10), ((1, 2, 3), 4)):
        yield (
            f"accumulation {'/'.join(map(str, counts))}, hold {hold}",
            Kind(accumulation(counts, hold), waits=True),
        )
    for steps, growth in ((30, 0.1), (10, 0.05), (60, 0.5)):
        yield f"batches +{100 * growth:g}% every {steps}", Kind(larger_batches(steps, growth))
    for steps, height in ((100, 0.04), (300, 0.06), (40, 0.03)):
        yield f"heat wave of {steps}, {100 * height:g}%", Kind(heat_wave(steps, height))
    for alpha, scale in ((1.5, 0.02), (2.5, 0.1)):
        yield f"heavy tails {alpha}, {100 * scale:g}%", Kind(heavy(alpha, scale))
    yield "two models 1.6, swap 5%", Kind(two_models(1.6, 0.05))
    yield "two models 3", Kind(two_models(3, 0))
    yield "two speeds, 2 and 200 ms", Kind(two_speeds(100, 40), 2)
    yield "busy host, 0.3 ms", Kind(time_slices(0.02, 4, 0.05), 0.3, waits=True)
    yield "busy host, 2 ms", Kind(time_slices(0.05, 1, 0.03), 2, waits=True)
    yield "busy host, 5 s", Kind(time_slices(0.2, 500, 0.005), 5000, waits=True)
    yield "quiet, 0.3 ms", Kind(time_slices(0, 0, 0.02), 0.3)
    yield "quiet, 5 s", Kind(time_slices(0, 0, 0.004), 5000)
    yield "clock of 1 µs, 0.3 ms", Kind(clock_ticks(0.001, 0.01), 0.3)
    yield "throttling", Kind(throttling)
    yield "growing heap", Kind(heap_growth, waits=True)
    yield "8 workers, epochs of 50", Kind(workers(8, 50), waits=True)
    yield "busy every minute", Kind(cron)
    yield "curriculum", Kind(curriculum)
    yield "GAN, 5 to 1", Kind(adversarial_pair(5, 0.0))
    yield "GAN, 2 to 1, slips", Kind(adversarial_pair(2, 0.1))
    yield "layers unfrozen", Kind(unfreezing)
    yield "recompilation", Kind(recompilation, waits=True)
    yield "rollouts and updates", Kind(rollouts)
    yield "serving", Kind(serving, 20)
    yield "checkpoints", Kind(checkpoints, waits=True)
    yield "profiled by itself", Kind(profiled, waits=True)
    yield "saw-tooth of heat", Kind(saw_tooth)
    yield "clock levels", Kind(clock_levels)
    yield "expert imbalance", Kind(imbalance)
    yield "rotating stragglers", Kind(stragglers)
    yield "congestion", Kind(congestion)
    yield "pink noise", Kind(pink)
    yield "switching costs 3%", Kind(switching(0.03, 0.0))
    yield "switching costs 10%, then 3%", Kind(switching(0.1, 0.03))
    yield "target of 100 ms", Kind(target_rate)  # a gain shows as larger batches: less time per sample


CLOCKED: dict[str, Kind] = dict(_of_the_clock())
SIZED: dict[str, Kind] = {
    "inputs 0.8 to 1.2": Kind(inputs(between(0.8, 1.2))),
    "inputs 0.8 to 1.2, 3%": Kind(inputs(between(0.8, 1.2), sigma=0.03)),
    "inputs 0.5 to 1.5, attention": Kind(inputs(between(0.5, 1.5), attention)),
    "inputs 0.5 to 1.5, half of the step": Kind(inputs(between(0.5, 1.5), lambda length: 0.5 + 0.5 * length)),
    "inputs of four kinds": Kind(inputs(lambda r, number: r.choice((0.7, 0.9, 1.0, 1.6)), sigma=0.003)),
    "inputs one step ahead": Kind(inputs(between(0.8, 1.2), ahead=True)),
    "inputs, log-normal": Kind(inputs(log_normal)),
    "inputs of 4 ranks": Kind(inputs(between(0.6, 1.4), ranks=4)),
    "inputs, 5 ms": Kind(inputs(between(0.8, 1.2)), 5),
}
"""Steps whose inputs vary in length; their copies from the host reveal it."""
UNTOLD: dict[str, Kind] = {
    "inputs of 1/2/3 micro-batches, hold 4": Kind(sized_accumulation((1, 2, 3), 4), waits=True),
    "inputs of 4/8 micro-batches, hold 10": Kind(sized_accumulation((4, 8), 10), waits=True),
    "inputs that grow 10% every 30": Kind(sized_batches(30, 0.1)),
    "inputs that grow 50% every 60": Kind(sized_batches(60, 0.5)),
    "inputs below a rising limit, 4 ranks": Kind(
        inputs(limited, lambda length: 0.2 + 0.5 * length + 0.6 * length**2, ranks=4)
    ),
    "inputs, twice as long later": Kind(inputs(longer_later)),
    "copies that explain nothing": Kind(misleading(by_time=False)),
    "copies that follow the time": Kind(misleading(by_time=True)),
    "inputs by the time before": Kind(adaptive),
}
"""Kinds whose copies from the host mislead, or change later."""
JOBS: dict[str, Kind] = {
    **{name: Kind(multiplied(noise)) for name, noise in KINDS.items()},
    **CLOCKED,
    **SIZED,
    **UNTOLD,
}
