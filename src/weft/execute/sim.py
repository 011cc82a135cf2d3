"""SimExecutor: runs a Workload under a Policy on a simulated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from weft.comm.node import Node
from weft.errors import UsageError
from weft.execute.base import PipelineSample
from weft.gpu.occupancy import blocks_per_sm
from weft.policy import Policy
from weft.sim.core import SimOutcome, simulate_launches
from weft.sim.launches import Launch, LaunchKind
from weft.sim.occupancy import Occupancy, occupancy
from weft.sim.pipeline import pipeline
from weft.sim.profile import Profile, profile
from weft.timeline import Kind, Timeline
from weft.workload import BASELINE_CTAS, Workload

GHOST = "-ghost"
"""Suffix of a device on which all ranks share one GPU."""


class SimExecutor:
    """A simulated GPU by name: `h100`, a file written by `weft calibrate`, or `h200-ghost`.

    With a plain name, every rank has its own GPU, and one GPU is simulated. With `-ghost`, all ranks share
    one GPU, as in the lab. `node`: a node profile that determines the time, CTAs and kernel of collectives.
    """

    simulated = True

    def __init__(
        self,
        name: str,
        *,
        baseline_ctas: int = BASELINE_CTAS,
        model: Profile | None = None,
        node: Node | None = None,
    ) -> None:
        self.ghost = name.endswith(GHOST)
        self.profile = model or profile(name.removesuffix(GHOST))
        self.device = f"sim:{self.profile.name}{GHOST if self.ghost else ''}"
        self.ctas = baseline_ctas if self.ghost else int(self.profile.figures.comm_ctas)
        self.node = node
        if node is not None:
            if self.ghost:
                raise UsageError(f"a node has one GPU for each rank; use sim:{self.profile.name} with --node")
            self.device += f" in {node.name}"
            self.ctas = node.ctas["ring"]
        self._known: dict[tuple[Workload, Policy, str], float] = {}

    def launches(self, workload: Workload, policy: Policy, mode: str = "overlap") -> list[Launch]:
        """The launches of a run."""
        policy = _without_rules(policy, workload)
        # A node has a default for each algorithm, and a limit can only lower it.
        ctas = max(self.node.ctas.values()) if self.node else self.ctas
        return pipeline(workload, policy, mode, self.profile, ghost=self.ghost, ctas=ctas, node=self.node)

    def most_ctas(self, workload: Workload) -> int:
        """Largest number of CTAs per rank with which all CTAs of a collective can be resident at once."""
        figures, gpu = self.profile.figures, self.profile.spec
        shared = round(figures.comm_shared_kib * 1024)
        per_sm = blocks_per_sm(gpu, int(figures.comm_threads), int(figures.comm_registers), shared)
        return gpu.sms * per_sm // (workload.ranks if self.ghost else 1)

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> PipelineSample:
        """Simulated time of the pipeline in ms, cached because it is deterministic."""
        key = (workload, policy, mode)
        if key not in self._known:
            self._known[key] = 1e3 * self._total_s(workload, policy, mode)
        return PipelineSample(self._known[key], {"simulated": True})

    def _total_s(self, workload: Workload, policy: Policy, mode: str) -> float:
        if mode == "sequential" and workload.iterations > 2:
            # The GPU is idle between two iterations, so each one from the second on adds the same time.
            one, two = (self._total_s(workload.but(iterations=n), policy, mode) for n in (1, 2))
            return one + (workload.iterations - 1) * (two - one)
        return simulate_launches(self.profile.machine(), self.launches(workload, policy, mode)).total_s

    def timeline(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Timeline:
        """The timeline of a run."""
        launches = self.launches(workload, policy, mode)
        return to_timeline(
            launches, simulate_launches(self.profile.machine(), launches), self.profile.spec.warp_size
        )

    def occupancy(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Occupancy:
        """Occupancy of each SM over time."""
        return occupancy(self.profile.machine(), self.launches(workload, policy, mode))

    def info(self) -> dict[str, Any]:
        """The simulated GPU and its profile, to be stored with results."""
        return {
            "simulated": True,
            "gpu": self.profile.spec.title,
            "sm_count": self.profile.spec.sms,
            "ranks": "ghost ranks on one GPU" if self.ghost else "one GPU for each rank",
            "baseline_ctas": self.ctas,
            "profile": self.profile.to_dict()["figures"],
            **({"node": self.node.name} if self.node else {}),
        }

    def close(self) -> None:
        """Nothing to release."""


def _without_rules(policy: Policy, workload: Workload) -> Policy:
    """The policy without its comm.rules, and with the CTAs that they give this workload's collective."""
    if not policy.comm_rules:
        return policy
    rule = policy.comm_rule_for(workload.collective, workload.whole_bytes)
    if rule is not None and not set(rule.to_dict()) <= {"collective", "min_bytes", "max_bytes", "ctas"}:
        raise UsageError("comm.rules: the simulator has CTAs only; remove the other fields of the rule")
    ctas = policy.ctas_for(workload.collective, workload.whole_bytes)
    return replace(policy, max_ctas=ctas, comm_rules=())


def to_timeline(launches: list[Launch], outcome: SimOutcome, warp_size: int = 32) -> Timeline:
    """Kernels and copies as spans; head starts are neither compute nor communication."""
    shown = [i for i, launch in enumerate(launches) if launch.kind is not LaunchKind.DELAY]
    shown.sort(key=lambda i: outcome.start_s[i])
    names = tuple(dict.fromkeys(launches[i].name for i in shown))
    index = {name: i for i, name in enumerate(names)}
    return Timeline(
        start_ns=np.array([round(outcome.start_s[i] * 1e9) for i in shown], dtype=np.int64),
        end_ns=np.array([round(outcome.end_s[i] * 1e9) for i in shown], dtype=np.int64),
        stream=np.array([launches[i].stream for i in shown], dtype=np.int64),
        kind=np.array([Kind.COMM if launches[i].comm else Kind.COMPUTE for i in shown], dtype=np.uint8),
        name=np.array([index[launches[i].name] for i in shown], dtype=np.int32),
        names=names,
        resources={
            "blocks": np.array([launches[i].blocks for i in shown], dtype=np.int64),
            "threads": np.array([launches[i].footprint.warps * warp_size for i in shown], dtype=np.int64),
            "shared_bytes": np.array([launches[i].footprint.shared_bytes for i in shown], dtype=np.int64),
        },
    )
