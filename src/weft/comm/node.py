"""Node: one rank's part of a collective on a node: time, CTAs, memory traffic and kernel shape.

    node = load_node("dgx-h100")
    part = node.collective("all_reduce", 256 << 20, ctas=16)

A profile is data (`nodes/*.json`, read by `node_file`). Times come from the planner's network model
(`weft.gpu.collectives`) with constants fitted to published nccl-tests results, or from points that a user
measured with nccl-tests. This module runs inside user programs, so it uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.comm.node_curve import LARGE_MESSAGE_BYTES, CtaRate, TimeCurve, bus_factor, interpolate_us
from weft.comm.node_kernel import CommKernel, memory_traffic, nccl_ctas
from weft.errors import UsageError
from weft.gpu.collectives import Inside, group, group_collective_s
from weft.gpu.network import LINKS, Links, Network

NODE_VARIABLE = "WEFT_NODE"
"""Environment variable with the node profile of the ghost ranks, by name or file."""
NODE_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send_recv",
)
"""Collectives of a node profile."""
NODE_ALGORITHMS = ("ring", "tree", "nvls", "nvlstree", "p2p")
NODE_BASES = ("published", "assumed", "measured")
COPIES_AS = ("delay",)
"""Ways to represent copies by copy engines on one GPU. A copy within a GPU runs on SMs, and a copy through
host memory is slower than NVLink (55 GB/s on an H200). So a delay takes the time of the copies, and a local
copy moves their data."""
_MAX_NODE_BYTES = 1 << 42
SWITCH_FROM_BYTES = 2 << 20
"""From this size on, NCCL reduces in the switch (stas00/ml-engineering: 8 H200, NCCL 2.30)."""
_POINT_TO_POINT = ("all_to_all", "send_recv")
_COPIED = ("all_gather", "all_to_all")
_SWITCHED = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Paced:
    """One rank's part of one collective on a node."""

    us: float
    """Time from the placement of its CTAs to its end."""
    ctas: int
    """CTAs that the library would use, at most the requested limit."""
    threads: int
    cluster: int
    """CTAs per cluster; 1: no clusters."""
    shared_bytes: int
    """Shared memory per CTA, static and dynamic."""
    registers: int
    """Registers per thread."""
    read_bytes: int
    write_bytes: int
    """Bytes read from and written to this rank's memory, including writes by peers."""
    basis: str
    """`published`, `assumed` or `measured`."""
    error_pct: float | None
    """Mean error on published results that were left out of the fit; None if there are none, or if the ranks
    or the size are outside the measured range."""
    algorithm: str = ""


@dataclass(frozen=True)
class Node:
    """A node profile."""

    name: str
    gpu: str
    ranks: int
    basis: str
    """Basis of the all-reduce; each curve has its own."""
    title: str
    kernel: CommKernel
    ctas: Mapping[str, int]
    """The library's default CTAs by algorithm; `ring` applies to algorithms that are absent."""
    cta_rates: Mapping[str, CtaRate]
    """Bandwidth per CTA by algorithm; `ring` applies to algorithms that are absent."""
    constants: Mapping[str, float]
    """Constants of the network model; those of a curve take precedence, see `TimeCurve.constants`."""
    switch_reduces: bool = False
    domain: int = 8
    """Number of ranks that reach each other without the network."""
    network: Network | None = None
    curves: tuple[TimeCurve, ...] = ()
    copy_engines: CtaRate | None = None
    """Bus bandwidth of collectives by all copy engines of a GPU together; None if the node has no such
    collectives."""
    copies_as: str = "delay"
    """How one GPU represents copies by copy engines; one of COPIES_AS."""
    assumed_pct: float = 30.0
    """Error in percent that is assumed for a collective whose error is not known."""
    sources: tuple[str, ...] = ()

    def collective(
        self,
        kind: str,
        nbytes: int,
        ctas: int | None = None,
        ranks: int | None = None,
        algorithm: str | None = None,
        stride: int = 1,
    ) -> Paced:
        """One rank's part of a collective.

        `nbytes`: size as in nccl-tests' size column, the larger buffer of a rank; `ctas`: upper limit, None
        for the library's default; `ranks`: None for all ranks of the node; `algorithm`: None for the
        library's choice; `stride`: distance in GPUs between ranks, see `stride()`. Raises UsageError.
        """
        return self._part(kind, nbytes, ctas, ranks, algorithm, stride, "gb_s")

    def range(
        self,
        kind: str,
        nbytes: int,
        ctas: int | None = None,
        ranks: int | None = None,
        algorithm: str | None = None,
        stride: int = 1,
    ) -> tuple[float, float]:
        """Lowest and highest plausible microseconds, from the curve's error and the range of the CTA rate."""
        fast, slow = (
            self._part(kind, nbytes, ctas, ranks, algorithm, stride, end) for end in ("high", "low")
        )
        spread = 1 + (self.assumed_pct if fast.error_pct is None else fast.error_pct) / 100
        return fast.us / spread, slow.us * spread

    def world(self, ranks: int | None = None) -> int:
        """Ranks of a job; None: all of the node. Raises UsageError if the node cannot connect so many."""
        if ranks and self.network is None and ranks > self.ranks:
            raise UsageError(
                f"{ranks} ranks: {self.name} has {self.ranks} and no network between nodes; use a profile of "
                "several nodes (`weft node list`)"
            )
        return ranks or self.ranks

    def stride(self, ranks: Sequence[int]) -> int:
        """Distance in GPUs between the ranks of a group: 1 if they share a domain or fill several.

        `ranks`: the group's ranks in the job. With one rank on each node, no two ranks share a domain.
        """
        near = sum(rank // self.domain == ranks[0] // self.domain for rank in ranks)
        return 1 if self.network is None or near == len(ranks) else max(1, self.domain // near)

    def neighbours(self, one: int, other: int, stride: int = 1) -> bool:
        """Whether two ranks of a group share a domain."""
        near = max(1, self.domain // stride)
        return one // near == other // near

    def copies(self, kind: str, ranks: int, stride: int = 1) -> bool:
        """Whether copy engines can serve a collective of `ranks` ranks."""
        return self.copy_engines is not None and kind in _COPIED and ranks * stride <= self.domain

    def copied(self, kind: str, nbytes: int, ranks: int | None = None, stride: int = 1) -> Paced:
        """One rank's part of a collective by copy engines: a time without CTAs.

        Raises UsageError except for all_gather and all_to_all inside one domain: copy engines cannot reduce.
        """
        count = self.ranks if ranks is None else ranks
        _check(kind, nbytes, None, count)
        rate = self.copy_engines
        if rate is None or not self.copies(kind, count, stride):
            raise UsageError(
                f"{kind} of {count} ranks on {self.name} has no form by copy engines; use engine sm "
                f"(engines: {' and '.join(_COPIED)} inside one domain)"
            )
        moved = nbytes * bus_factor(kind, count)
        us = self.constants["launch_us"] + moved / rate.gb_s / 1e3
        # Each peer's share is read here and written to the peer without an intermediate buffer.
        shape = {"ctas": 0, "threads": 0, "cluster": 1, "shared_bytes": 0, "registers": 0}
        return Paced(
            us=us,
            **shape,
            read_bytes=round(moved),
            write_bytes=round(moved),
            basis=rate.basis,
            error_pct=None,
            algorithm="copy",
        )

    def curve(self, kind: str, algorithm: str | None = None) -> TimeCurve:
        """The curve of a collective; if the profile has none, a curve with the node's own constants."""
        for wanted in (algorithm, None):
            for one in self.curves:
                if one.collective == kind and one.algorithm == wanted:
                    if wanted == algorithm:
                        return one
                    return replace(
                        one,
                        algorithm=algorithm,
                        basis="assumed",
                        error_pct=None,
                        error_small_pct=None,
                        points=(),
                    )
        return TimeCurve(kind, self.ranks, "assumed", algorithm)

    def _part(
        self,
        kind: str,
        nbytes: int,
        ctas: int | None,
        ranks: int | None,
        algorithm: str | None,
        stride: int,
        rate: str,
    ) -> Paced:
        count = self.ranks if ranks is None else ranks
        _check(kind, nbytes, ctas, count)
        near = max(1, self.domain // stride)
        usual = _choice(kind, nbytes, self.switch_reduces and near > 1, -(-count // near))
        if algorithm is not None:
            self._check_algorithm(kind, algorithm)
        chosen = algorithm or usual
        algorithm = None if algorithm == usual else algorithm  # the default curve is for the usual algorithm
        most = self.ctas.get(chosen, self.ctas["ring"])
        natural = nccl_ctas(chosen, nbytes, most)
        used = natural if ctas is None else min(ctas, natural)
        curve = self.curve(kind, algorithm)
        per_cta = self.cta_rates.get(chosen, self.cta_rates["ring"])
        us = self._us(curve, kind, nbytes, count, algorithm, stride)
        basis = curve.basis
        if used < natural:  # the curve applies to the library's own CTAs
            wire_bytes = nbytes * bus_factor(kind, count)
            peak = self._peak_bytes_per_s(curve, kind, count, algorithm, stride)
            slower_us = 1e6 * wire_bytes * (1 / (used * getattr(per_cta, rate) * 1e9) - 1 / peak)
            if slower_us > 0:
                us += slower_us
                basis = "assumed" if per_cta.basis == "assumed" else basis
        read, write = memory_traffic(kind, nbytes, count, chosen)
        return Paced(
            us=us,
            ctas=used,
            threads=self.kernel.threads_of(chosen),
            cluster=self.kernel.cluster_of(used),
            shared_bytes=self.kernel.shared_bytes,
            registers=self.kernel.registers,
            read_bytes=read,
            write_bytes=write,
            basis=basis,
            error_pct=self._error_pct(curve, nbytes, count, stride),
            algorithm=chosen,
        )

    @staticmethod
    def _error_pct(curve: TimeCurve, nbytes: int, ranks: int, stride: int) -> float | None:
        """The curve's error; None for other ranks than the curve's, or for sizes outside its points."""
        inside = not curve.points or curve.points[0][0] <= nbytes <= curve.points[-1][0]
        if ranks != curve.ranks or stride != 1 or not inside:
            return None
        return curve.error_pct if nbytes >= LARGE_MESSAGE_BYTES else curve.error_small_pct

    def _check_algorithm(self, kind: str, algorithm: str) -> None:
        if kind in _POINT_TO_POINT:
            have: tuple[str, ...] = ("p2p",)
        else:
            have = ("ring", "tree") if kind == "all_reduce" else ("ring",)
            if self.switch_reduces and kind in _SWITCHED:
                have += ("nvls", "nvlstree") if kind == "all_reduce" else ("nvls",)
        if algorithm not in have:
            raise UsageError(
                f"algorithm {algorithm!r}: {kind} on {self.name} has {' and '.join(have)}; use one of them"
            )

    def _us(
        self, curve: TimeCurve, kind: str, nbytes: int, ranks: int, algorithm: str | None, stride: int
    ) -> float:
        """Microseconds with the library's own CTAs."""
        if nbytes == 0:
            return 0.0  # NCCL launches nothing
        if not curve.points:
            return self._model_us(curve, kind, nbytes, ranks, algorithm, stride)
        if ranks == curve.ranks and stride == 1:
            return interpolate_us(curve.points, nbytes)

        def scaled_us(size: int) -> float:
            """The measured time, scaled to other ranks by the ratio that the model gives."""
            here = self._model_us(curve, kind, size, ranks, algorithm, stride)
            there = self._model_us(curve, kind, size, curve.ranks, algorithm)
            return interpolate_us(curve.points, size) * (here / there if there > 0 else 1.0)

        # Where the points hardly rise, a falling ratio would make a larger message faster than a smaller one.
        smaller = [size for size in (1, *(size for size, _ in curve.points)) if size < nbytes]
        return max(map(scaled_us, (*smaller, nbytes)))

    def _peak_bytes_per_s(
        self, curve: TimeCurve, kind: str, ranks: int, algorithm: str | None, stride: int
    ) -> float:
        """Bus bandwidth of very large messages."""
        factor, most = bus_factor(kind, ranks), _MAX_NODE_BYTES
        if curve.points and stride == 1:
            return max(size * factor / us for size, us in curve.points) * 1e6
        return most * factor / self._model_us(curve, kind, most, ranks, algorithm, stride) * 1e6

    def _model_us(
        self, curve: TimeCurve, kind: str, nbytes: int, ranks: int, algorithm: str | None, stride: int = 1
    ) -> float:
        known = {**self.constants, **curve.constants}
        inside = Inside(known["gb_s"] * 1e9, self.switch_reduces and algorithm not in ("ring", "tree"))
        network = self.network or Network(rail_bytes_per_s=1e9)  # not used: all ranks share a domain
        domain = self.domain if self.network else max(ranks, self.domain)
        parts = group(ranks, stride, network.but(domain=domain))
        name = "p2p" if kind == "send_recv" else kind
        links = _links(known)
        return 1e6 * group_collective_s(name, nbytes, parts, inside, network, links, algorithm=algorithm)


def _links(known: Mapping[str, float]) -> Links:
    """The network model's Links with the constants of a profile."""
    names = {"launch_us": "launch_us", "hop_us": "domain_us", "switch_gain": "switch_gain"}
    names |= {"half_bytes": "half_bytes", "ring_us": "ring_us", "network_us": "network_us"}
    return replace(LINKS, **{names[key]: value for key, value in known.items() if key in names})


def _choice(kind: str, nbytes: int, switch_reduces: bool, domains: int) -> str:
    if kind in _POINT_TO_POINT:
        return "p2p"
    if kind != "all_reduce":
        return "ring"
    if switch_reduces and nbytes >= SWITCH_FROM_BYTES:
        return "nvls" if domains == 1 else "nvlstree"
    return "ring" if domains == 1 else "tree"


def _check(kind: str, nbytes: int, ctas: int | None, ranks: int) -> None:
    if kind not in NODE_COLLECTIVES:
        raise UsageError(f"collective {kind!r} is not known; use one of {', '.join(NODE_COLLECTIVES)}")
    if not 0 <= nbytes <= _MAX_NODE_BYTES:
        raise UsageError(f"{nbytes} bytes of a collective: give 0 to {_MAX_NODE_BYTES}")
    if ctas is not None and ctas < 1:
        raise UsageError(f"{ctas} CTAs of a collective: give 1 or more")
    if ranks < 2:
        raise UsageError(f"ranks {ranks} is not valid; use 2 or more")


def load_node(name_or_path: str) -> Node:
    """A shipped profile by name, or a file written by `weft node import`. Raises UsageError."""
    from weft.comm.node_file import find_node

    return find_node(name_or_path)
