"""The summary of an analysis in one sentence: what is exposed, why, and how much of it costs step time."""

from __future__ import annotations

from collections.abc import Mapping

from weft.trace.reasons import BY_KEY


def summary_sentence(
    *,
    exposed_us: float,
    comm_us: float,
    ranks: int,
    name: str,
    reasons_us: Mapping[str, float],
    saved_us: float | None = None,
    step_us: float | None = None,
    stepped: bool = False,
) -> str:
    """Figures are of the worst rank, called `name`; `reasons_us` is over all ranks, by key with `_us`."""
    if comm_us <= 0:
        return "No communication was found; if a kernel of yours communicates, name it with --comm."
    where = f" on {name}, the worst of {ranks} ranks" if ranks > 1 else ""
    if exposed_us <= 0:
        return f"All {duration(comm_us)} of communication is hidden behind compute{where}."
    said = f"{duration(exposed_us)} of {duration(comm_us)} communication "
    said += f"({100 * exposed_us / comm_us:.0f}%) is exposed{where}"
    total = sum(reasons_us.values())
    reason = max(reasons_us, key=lambda key: reasons_us[key], default="")
    if total > 0 and reasons_us[reason] > 0:
        part = 100 * reasons_us[reason] / total
        known = BY_KEY.get(reason.removesuffix("_us"))
        because = known.because if known else f"of {reason.removesuffix('_us').replace('_', ' ')}"
        said += f", {'mostly' if part > 50 else 'mainly'} because {because} ({part:.0f}% of it)"
    if saved_us is not None and step_us:
        of = "step" if stepped else "span"
        said += f"; {duration(saved_us)} could be recovered from the {duration(step_us)} {of}"
    return said + "."


def duration(us: float | None) -> str:
    """Microseconds in a suitable unit, to four digits; an en dash for None."""
    if us is None:
        return "\N{EN DASH}"
    size = abs(us)
    if size == 0:
        return "0"
    for limit, factor, unit in ((1.0, 1e3, "ns"), (1e3, 1.0, "µs"), (1e6, 1e-3, "ms")):
        if size < limit:
            return f"{us * factor:.4g} {unit}"
    return f"{us * 1e-6:.4g} s" if size < 1e10 else f"{us * 1e-6:.0f} s"
