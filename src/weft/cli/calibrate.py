"""`weft calibrate`: measure this machine's GPU and write a profile for the simulator."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import typer


def calibrate(
    out: Path = typer.Option(Path("profile.json"), help="Where to write the profile."),  # noqa: B008
    gpu: str = typer.Option("", metavar="NAME", help="Preset to start from; default: by the GPU's name."),
    device: str = typer.Option("cuda", help="cuda, or sim:NAME to try it without a GPU."),
    budget: float = typer.Option(120.0, metavar="SECONDS", help="Time for the fit, after the measurements."),
    repeats: int = typer.Option(3, help="Measurements of each probe; their median counts."),
) -> None:
    """Measure what the simulator must know of this GPU and write a profile: `--device sim:profile.json`."""
    from weft.errors import UnavailableError, UsageError
    from weft.execute.calibrate import Probe, error, fit, probes, take
    from weft.execute.devices import has_gpu, open_executor
    from weft.sim.profile import by_title, profile
    from weft.workload import BASELINE_CTAS

    if budget <= 0 or repeats < 1:
        raise UsageError("--budget is seconds greater than zero, --repeats at least 1")
    if device == "cuda" and not has_gpu():
        raise UnavailableError(
            "weft calibrate measures a GPU and this machine has none; --device sim:h200-ghost tries it out"
        )
    executor = open_executor(device, baseline_ctas=BASELINE_CTAS)
    try:
        title = str(executor.info().get("gpu", ""))
        start = profile(gpu) if gpu else by_title(title)

        def measure(probe: Probe) -> float:
            return median(
                executor.measure(probe.workload, probe.policy, probe.mode).ms for _ in range(repeats)
            )

        readings, problems = take(measure, probes())
    finally:
        executor.close()
    found = fit(start, readings, ctas=BASELINE_CTAS, budget_s=budget, source=f"weft calibrate on {title}")
    found.save(out)
    print(f"{title}: {len(readings)} probes, mean error {100 * error(found, readings, BASELINE_CTAS):.1f}%")
    for problem in problems:
        print(f"not measured: {problem}")
    print(f"profile: {out}; use it with `weft tune WORKLOAD --device sim:{out}`")
