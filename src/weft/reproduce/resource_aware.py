"""arXiv:2606.09200 (resource-aware overlap): all its figures, on the paper's simulated nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from weft.reproduce.claims import claim_rows, every_row
from weft.reproduce.figure import OnProgress, Reproduced, Reproduction, Target
from weft.reproduce.time_ratio import (
    PAPER_GPUS,
    SharedFigures,
    TableErrors,
    fig2_cells,
    leave_one_out,
    own_link_mae,
    table_errors,
)
from weft.sim.profile import PAPER_CTAS, PAPER_NODE, PCIE_SHARE

PAPER = "2606.09200"
TITLE = "Resource-aware computation-communication overlap (Cui, Pericàs)"
MOST_MAE = {"a40": 0.04, "a100": 0.05, "h100": 0.05, "mi250x": 0.06}
MOST_FAR = 10
MOST_LEFT_OUT = 0.06

ASSUMPTIONS = (
    "Four compute streams take ten iterations in turn: ratios under 0.5 cannot come from one stream. The "
    "paper drops the first third of its runs as warm-up; simulated runs are all alike.",
    "The GEMM is a textbook kernel: vector units, 256 threads, one tile in shared memory, load, barrier, "
    "compute. It reads its operands from shared memory, which has the same words in a clock on every GPU, "
    "and reaches 80% of what that and the fp32 peak allow. It waits for two loads in each step.",
    f"Collectives have {PAPER_CTAS} CTAs on every node: half of a PCIe link on the NVIDIA nodes (two GPUs "
    f"behind one uplink), {100 * PCIE_SHARE:.0f}% of the xGMI links that leave the package on MI250X.",
    "On an MI250X the blocks of every launch take the compute units in turn from the first one, so the "
    "streams' small grids share compute units; NVIDIA GPUs take the emptiest SM.",
    "These assumptions were made with Fig. 2 in view; no cell has a figure of its own. What differs between "
    "GPUs: their data sheet, the latency of memory (assumed), the vendor's link and order of placement.",
)


def reproduce_overlap(progress: OnProgress, *, everything: bool = False) -> Reproduction:
    """All published cells and claims; `everything` adds the four workloads under every control."""
    cells = fig2_cells(progress)
    left_out = leave_one_out(progress)
    claims = claim_rows(progress)
    more = every_row(progress) if everything else []
    errors = {
        gpu: table_errors([c for c in cells if c.id == f"fig2/{PAPER_GPUS[gpu]}"]) for gpu in PAPER_GPUS
    }
    return Reproduction(
        paper=PAPER,
        title=TITLE,
        device=", ".join(f"sim:{gpu}{PAPER_NODE}" for gpu in PAPER_GPUS),
        simulated=True,
        figures=(*cells, *claims, *more),
        summary=_summary(errors, left_out, claims),
        bars=tuple(_bars(errors, left_out)),
        assumptions=ASSUMPTIONS,
        findings=(*_findings(errors, left_out, claims), _nvlink_finding()),
    )


def _nvlink_finding() -> str:
    found = own_link_mae()
    listed = ", ".join(f"{PAPER_GPUS[gpu]} {error:.3f}" for gpu, error in found.items())
    return (
        "Why PCIe: with collectives at NVLink's rate the mean errors are "
        f"{listed}, because such collectives are too short to leave the published ratios at large grids."
    )


def _summary(
    errors: Mapping[str, TableErrors],
    left_out: Mapping[str, tuple[float, SharedFigures]],
    claims: Sequence[Reproduced],
) -> dict[str, Any]:
    tables = {}
    for gpu, title in PAPER_GPUS.items():
        found = {key: round(value, 4) for key, value in asdict(errors[gpu]).items()}
        error, chosen = left_out[gpu]
        tables[title] = {**found, "left_out_mae": round(error, 4), "left_out_choice": asdict(chosen)}
    signs = [one.sign_right for one in claims if one.sign_right is not None]
    top = next(one for one in claims if one.id == "claim/headline")
    return {
        "tables": tables,
        "headline_pct": {"published": top.published, "ours": top.ours, "range": top.ours_range},
        "claims_right": sum(signs),
        "claims": len(signs),
    }


def _bars(
    errors: Mapping[str, TableErrors], left_out: Mapping[str, tuple[float, SharedFigures]]
) -> list[Target]:
    found = []
    for gpu, title in PAPER_GPUS.items():
        own = errors[gpu]
        found += [
            _bar(f"{title}: mean error", own.mae, MOST_MAE[gpu]),
            _bar(f"{title}: cells off by more than 0.1", own.far, MOST_FAR),
            _bar(f"{title}: mean error at X*Y >= 4096, and of a constant", own.large_mae, own.constant_mae),
            _bar(f"{title}: mean error with its table left out", left_out[gpu][0], MOST_LEFT_OUT),
        ]
    return found


def _bar(name: str, value: float, most: float) -> Target:
    return Target(name=name, value=round(value, 4), target=f"<= {most:.4g}", met=value <= most)


def _findings(
    errors: Mapping[str, TableErrors],
    left_out: Mapping[str, tuple[float, SharedFigures]],
    claims: Sequence[Reproduced],
) -> list[str]:
    top = next(one for one in claims if one.id == "claim/headline")
    low, high = top.ours_range or (0.0, 0.0)
    inside = "which contains" if low <= (top.published or 0.0) <= high else "which does not contain"
    found = [
        "Fig. 2: mean errors "
        + ", ".join(
            f"{title} {errors[gpu].mae:.3f} ({left_out[gpu][0]:.3f} with its own table left out)"
            for gpu, title in PAPER_GPUS.items()
        )
        + ".",
        f"Headline, cb-ar on A40: {low:.0f} to {high:.0f}% less time over the bus figures with a source, "
        f"{inside} the paper's {top.published}%.",
    ]
    found.append(
        "Large grids: with four compute streams a collective without priority waits for three queued GEMMs; "
        "where it is longer than one GEMM, only one or two of ten are hidden, whatever the GPU. So three "
        "NVIDIA GPUs with different rates and links have the same published ratio, 0.95."
    )
    worse = [gpu for gpu in PAPER_GPUS if errors[gpu].large_mae > errors[gpu].constant_mae]
    if worse:
        own = [(PAPER_GPUS[gpu], errors[gpu]) for gpu in worse]
        means = [f"{title} ({e.large_ours:.3f} for {e.large_published:.3f} on average)" for title, e in own]
        found.append(
            f"Large grids: worse than a constant on {', '.join(means)}. The published ratios there vary by "
            "about 0.02 around one value, which depends only on how long the collective takes relative to "
            "the GEMM and on how much of it starts late; neither time is published."
        )
    over = [one for one in claims if one.id == "claim/headline-is-on-A40" and one.sign_right is False]
    if over:
        listed = ", ".join(f"{one.cell.split()[-1]} {one.ours:.0f}%" for one in over)
        found.append(
            f"Not reproduced: priority gains more than the paper's 25.5% on other GPUs ({listed}). "
            "Collectives slow enough for their tables are slow enough to gain as much as the A40's."
        )
    loses = next((one for one in claims if one.id == "claim/priority-loses"), None)
    if loses is not None and loses.sign_right:
        found.append(
            f"Priority loses on MI250X, as the paper says: {loses.ours:.1f}% ({loses.note.split(';')[0]})."
        )
    elif loses is not None:
        found.append("Not reproduced: priority never loses on the simulated MI250X.")
    wrong = [one for one in claims if one.id.startswith("claim/opt2") and one.sign_right is False]
    if wrong:
        listed = ", ".join(f"{one.id.split('/')[-1]} {one.cell.split()[-1]}" for one in wrong)
        found.append(f"opt2 against opt1 for mb has the wrong sign at {listed}.")
    return found
