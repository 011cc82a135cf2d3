"""The gain of the paper's controls as a range over the published bus bandwidths of the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.execute.sim import SimExecutor
from weft.sim.profile import PAPER_NODE, PCIE_SHARE
from weft.tuning.lab import choose_candidates, tune_workload
from weft.workload import Workload

RACED_AGAIN = 6
"""Number of candidates that are raced again with each other bus bandwidth."""
SAME_GB_S = 0.01


@dataclass(frozen=True)
class BusFigure:
    """The bandwidth of a rank's collectives, and its source."""

    gb_s: float
    source: str


@dataclass(frozen=True)
class BusGain:
    """The gain from tuning with one bus bandwidth."""

    bus: BusFigure
    gain_pct: float
    chosen: str

    def to_dict(self) -> dict[str, Any]:
        """This gain as a JSON-compatible dict."""
        return {
            "bus_gb_s": round(self.bus.gb_s, 2),
            "source": self.bus.source,
            "gain_pct": round(self.gain_pct, 2),
            "chosen": self.chosen,
        }


def bus_figures(executor: SimExecutor) -> list[BusFigure]:
    """The bus bandwidths of a node of arXiv:2606.09200, slowest first; empty for other devices.

    An A40's NVLink bridges (56.25 GB/s each way, data sheet) join only pairs. A ring of four cards also
    crosses PCIe, so the bridges do not determine its bandwidth.
    """
    if not executor.device.endswith(PAPER_NODE):
        return []
    gpu = executor.profile.spec
    if gpu.vendor == "nvidia":
        link, name = gpu.pcie_bytes_per_s / 1e9, "PCIe x16"
        half = f"half of {name}: an x8 slot, or two cards behind one uplink (data sheet)"
    else:
        link, name = gpu.links / 2 * gpu.link_bytes_per_s / 1e9, "the xGMI links that leave the package"
        half = f"half of {name} in use by a ring (data sheet)"
    return [
        BusFigure(0.5 * link, half),
        BusFigure(PCIE_SHARE * link, f"{100 * PCIE_SHARE:.0f}% of {name}: packet overhead (assumed share)"),
        BusFigure(link, f"{name} at its full rate (data sheet)"),
    ]


def bus_nodes(executor: SimExecutor) -> list[SimExecutor]:
    """The node with each of its bus figures; `executor` itself for the figure that it already has."""
    found = []
    for bus in bus_figures(executor):
        figures = executor.profile.figures
        if abs(bus.gb_s - figures.bus_gb_s) < SAME_GB_S:
            found.append(executor)
            continue
        per_cta = max(figures.cta_gb_s, bus.gb_s / figures.comm_ctas)
        model = executor.profile.with_figures(bus_gb_s=bus.gb_s, cta_gb_s=per_cta)
        found.append(SimExecutor(executor.profile.name, model=model))
    return found


def tuned_gains(executor: SimExecutor, workload: Workload) -> list[BusGain]:
    """What `weft tune` finds for a workload with each bus figure of the node.

    With the node's own figure all candidates are raced; with the others only the baselines and the best few.
    """
    buses = bus_figures(executor)
    if not buses:
        return []
    tried, _ = choose_candidates(executor, workload)
    ranked = sorted(tried[2:], key=lambda c: executor.measure(workload, c.policy, c.mode).ms)
    few = [*tried[:2], *ranked[:RACED_AGAIN]]
    found = []
    for bus, node in zip(buses, bus_nodes(executor), strict=True):
        verdict = tune_workload(node, workload, tried if node is executor else few).verdict
        found.append(BusGain(bus, verdict.gain_pct, verdict.chosen))
    return found
