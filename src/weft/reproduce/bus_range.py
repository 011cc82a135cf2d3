"""The gain of the paper's controls as a range over published bus bandwidths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.execute.sim import SimExecutor
from weft.sim.profile import PAPER_NODE, PCIE_SHARE
from weft.tuning.lab import choose_candidates, tune_workload
from weft.workload import Workload

RACED_AGAIN = 6
"""Candidates that are raced with every bus bandwidth."""
SAME_GB_S = 0.01


@dataclass(frozen=True)
class BusFigure:
    """A bandwidth of a rank's collectives, and where it comes from."""

    gb_s: float
    source: str


@dataclass(frozen=True)
class BusGain:
    """The gain from tuning with one bus bandwidth."""

    bus: BusFigure
    gain_pct: float
    chosen: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bus_gb_s": round(self.bus.gb_s, 2),
            "source": self.bus.source,
            "gain_pct": round(self.gain_pct, 2),
            "chosen": self.chosen,
        }


def bus_figures(executor: SimExecutor) -> list[BusFigure]:
    """The figures of a node of arXiv:2606.09200, slowest first; empty for other devices.

    NVLink bridges of an A40 (56.25 GB/s each way, data sheet) join pairs only: a ring of four cards crosses
    PCIe, so they set no figure of their own.
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
    """The node with each of its bus figures; itself where the figure is its own."""
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
    """What `weft tune` finds for a workload, for every bus figure of the node.

    With other figures than its own only the baselines and the best few candidates are raced again.
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
