"""`weft calibrate`: measure the GPU of this machine and write a simulator profile."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import typer

from weft.cli.output import check_output, check_seconds


def calibrate(
    out: Path = typer.Option(Path("profile.json"), help="File to write."),  # noqa: B008
    gpu: str = typer.Option(
        "", metavar="NAME", help="Profile to start from; default: the one with the GPU's name."
    ),
    device: str = typer.Option("cuda", help="cuda or auto; both need a GPU."),
    budget: float = typer.Option(120.0, metavar="SECONDS", help="Time for the fit after the measurements."),
    repeats: int = typer.Option(3, help="Measurements of each probe; the median is used."),
) -> None:
    """Measure this GPU and write a simulator profile of it.

    Other commands use it with `--device sim:profile.json`.
    """
    from weft.errors import UnavailableError, UsageError
    from weft.execute.calibrate import Probe, error, fit_profile, probes, take
    from weft.execute.devices import has_gpu, open_executor
    from weft.sim.profile import by_title, profile
    from weft.workload import BASELINE_CTAS

    check_seconds("--budget", budget)
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: give 1 or more")
    check_output("--out", out)
    if gpu.endswith(".json") and Path(gpu).resolve() == out.resolve():
        raise UsageError(f"--out {out} is the profile to start from; name another file")
    if device.startswith("sim:"):
        raise UsageError(
            f"device {device!r} is simulated: its profile cannot be measured; run weft calibrate where "
            "the GPU is, with --device cuda"
        )
    start = profile(gpu) if gpu else None
    if device in ("auto", "cuda") and not has_gpu():
        raise UnavailableError(
            "calibrate needs a GPU, and this machine has none; simulated GPUs have profiles already "
            "(weft tune --device sim:NAME)"
        )
    executor = open_executor(device, baseline_ctas=BASELINE_CTAS)
    try:
        title = str(executor.info().get("gpu", ""))
        start = start or by_title(title)

        def measure(probe: Probe) -> float:
            return median(
                executor.measure(probe.workload, probe.policy, probe.mode).ms for _ in range(repeats)
            )

        readings, problems = take(measure, probes())
    finally:
        executor.close()
    found = fit_profile(
        start, readings, ctas=BASELINE_CTAS, budget_s=budget, source=f"weft calibrate on {title}"
    )
    found.save(out)
    print(f"{title}: {len(readings)} probes, mean error {100 * error(found, readings, BASELINE_CTAS):.1f}%")
    for problem in problems:
        print(f"not measured: {problem}")
    print(f"profile: {out}; use it with `weft tune WORKLOAD --device sim:{out}`")
