"""Small machines and launches for the tests of the simulator's core."""

from __future__ import annotations

import random
from dataclasses import replace

from weft.sim.core import SimMachine
from weft.sim.launches import Footprint, Launch, LaunchKind, Speed

MACHINE = SimMachine(
    name="toy",
    sms=4,
    warps_per_sm=16,
    blocks_per_sm=8,
    registers_per_sm=65536,
    shared_bytes_per_sm=100_000,
    latency_s=1e-6,
    cache_bytes_per_s=1e12,
    memory_bytes_per_s=1e12,
    sharpness=1e4,  # a sharp corner, so that times can be worked out by hand
)
SMALL = Footprint(warps=4, registers=8192, shared_bytes=20_000)


def kernel(blocks: int = 10, work: float = 1e6, **changes: object) -> Launch:
    """A launch whose blocks take 10 µs alone on an SM and 20 µs when two share it."""
    speed = Speed(sm_rate=1e11, block_rate=1e11)
    return replace(Launch(name="k", runs=((blocks, work),), footprint=SMALL, speed=speed), **changes)


def program(seed: int) -> list[Launch]:
    """A random program of kernels, pools, delays and two-rank collectives on several streams."""
    draw = random.Random(seed)
    launches: list[Launch] = []
    for _ in range(draw.randint(3, 9)):
        after = tuple((i, draw.choice([0, 1e-6])) for i in range(len(launches)) if draw.random() < 0.3)
        foot = Footprint(
            warps=draw.randint(1, 8),
            registers=draw.randint(1, 30) * 1024,
            shared_bytes=draw.randint(0, 50_000),
        )
        speed = Speed(
            sm_rate=draw.choice([1e10, 1e11]),
            block_rate=draw.choice([1e11, 1e18]),
            window_bytes=draw.choice([2e4, 1e5, 1e18]),
            miss=draw.choice([0, 0.5, 1]),
            start_s=draw.choice([0, 1e-7]),
        )
        common = {"footprint": foot, "speed": speed, "after": after, "priority": draw.randint(0, 1)}
        kind = draw.choice(["grid", "grid", "pool", "delay", "comm"])
        if kind == "grid":
            runs = tuple((draw.randint(1, 40), draw.choice([0, 1e5, 3e6])) for _ in range(draw.randint(1, 3)))
            launches.append(Launch(name="grid", runs=runs, **common))
        elif kind == "pool":
            launches.append(
                Launch(
                    name="pool",
                    kind=LaunchKind.POOL,
                    runs=((draw.randint(1, 8), 0.0),),
                    units=draw.randint(1, 60),
                    unit_bytes=1e6,
                    **common,
                )
            )
        elif kind == "delay":
            launches.append(Launch(name="delay", kind=LaunchKind.DELAY, seconds=3e-6, after=after))
        else:
            quiet = replace(speed, sm_rate=0.0, block_rate=1e10)
            first, channels = len(launches), draw.randint(1, 2)
            for _rank in range(2):
                launches.append(
                    Launch(
                        name="comm",
                        comm=True,
                        runs=((channels, 1e6),),
                        group=first,
                        **{**common, "speed": quiet, "footprint": SMALL},
                    )
                )
    return launches
