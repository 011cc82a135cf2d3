"""Node: one rank's part of a collective on a node, as time, CTAs, memory traffic and kernel shape.

    node = load_node("dgx-h100")
    part = node.collective("all_reduce", 256 << 20, ctas=16)

A profile is data (`nodes/*.json`, read by `node_file`). Times come from the network model that plans use
(`weft.gpu.collectives`) with constants fitted to published nccl-tests results, or from the points that a
user's nccl-tests measured. This module runs inside user programs: standard library only.
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
"""Environment variable: the node profile of the ghost ranks."""
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
"""How copies by copy engines can be represented on one GPU. Within it a copy runs on SMs, and through host
memory it is slower than on NVLink (55 GB/s on an H200): a delay has their time, a local copy their data."""
_MAX_NODE_BYTES = 1 << 42
SWITCH_FROM_BYTES = 2 << 20
"""NCCL reduces in the switch from this size on (stas00/ml-engineering: 8 H200, NCCL 2.30)."""
_POINT_TO_POINT = ("all_to_all", "send_recv")
_COPIED = ("all_gather", "all_to_all")
_SWITCHED = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Paced:
    """One rank's part of one collective on a node."""

    us: float
    """From the placement of its CTAs to its end."""
    ctas: int
    """CTAs that the library would use; at most the requested number."""
    threads: int
    cluster: int
    """CTAs of a cluster; 1: no clusters."""
    shared_bytes: int
    """Of a CTA, static and dynamic."""
    registers: int
    """Of a thread."""
    read_bytes: int
    write_bytes: int
    """Through this rank's memory, writes by peers included."""
    basis: str
    """`published`, `assumed` or `measured`."""
    error_pct: float | None
    """Mean error on published results that were left out of the fit; None: there are none, or the ranks or
    the size are outside of what was measured."""
    algorithm: str = ""


@dataclass(frozen=True)
class Node:
    """A node profile."""

    name: str
    gpu: str
    ranks: int
    basis: str
    """That of its all-reduce; each collective has its own."""
    title: str
    kernel: CommKernel
    ctas: Mapping[str, int]
    """CTAs that the library uses by default, by algorithm."""
    cta_rates: Mapping[str, CtaRate]
    """By algorithm; `ring` serves those that are absent."""
    constants: Mapping[str, float]
    """Of the network model, for collectives without a curve; see `TimeCurve.constants`."""
    switch_reduces: bool = False
    domain: int = 8
    """Ranks that reach each other without the network."""
    network: Network | None = None
    curves: tuple[TimeCurve, ...] = ()
    copy_engines: CtaRate | None = None
    """Bus bandwidth of collectives by copy engines, all of a GPU's together; None: the node has none."""
    copies_as: str = "delay"
    """How one GPU represents them, one of COPIES_AS."""
    assumed_pct: float = 30.0
    """Range for a collective whose error is not known."""
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

        `nbytes`: the size column of nccl-tests, i.e. the larger buffer of a rank; `ctas`: at most so many
        (None: the library's default); `ranks`: None for all of the node; `algorithm`: None for the library's
        choice; `stride`: GPUs from one rank to the next, see `stride`. Raises UsageError.
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
        """Lowest and highest plausible microseconds: the error of the curve and the range of the CTA rate."""
        fast, slow = (
            self._part(kind, nbytes, ctas, ranks, algorithm, stride, end) for end in ("high", "low")
        )
        spread = 1 + (self.assumed_pct if fast.error_pct is None else fast.error_pct) / 100
        return fast.us / spread, slow.us * spread

    def world(self, ranks: int | None = None) -> int:
        """Ranks of a job on this node: all by default. Raises UsageError for more than it can connect."""
        if ranks and self.network is None and ranks > self.ranks:
            raise UsageError(
                f"{ranks} ranks: {self.name} has {self.ranks} and no network between nodes; use a profile of "
                "several nodes (`weft node list`)"
            )
        return ranks or self.ranks

    def stride(self, ranks: Sequence[int]) -> int:
        """GPUs from one rank of a group to the next: 1 where they share a domain or fill several.

        `ranks`: their numbers in the job. Of a group with one rank on each node, no two share a domain.
        """
        near = sum(rank // self.domain == ranks[0] // self.domain for rank in ranks)
        return 1 if self.network is None or near == len(ranks) else max(1, self.domain // near)

    def neighbours(self, one: int, other: int, stride: int = 1) -> bool:
        """Whether two ranks of a group share a domain."""
        near = max(1, self.domain // stride)
        return one // near == other // near

    def copies(self, kind: str, ranks: int, stride: int = 1) -> bool:
        """Whether copy engines can serve a collective of so many ranks."""
        return self.copy_engines is not None and kind in _COPIED and ranks * stride <= self.domain

    def copied(self, kind: str, nbytes: int, ranks: int | None = None, stride: int = 1) -> Paced:
        """One rank's part of a collective by copy engines: a delay without CTAs.

        Only all_gather and all_to_all inside one domain: engines cannot reduce. Raises UsageError.
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
        # Each peer's share is read here and written there, without an intermediate buffer.
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
        """The curve of a collective; if the profile has none, one from the node's own constants."""
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
        algorithm = None if algorithm == usual else algorithm  # the default curve is that of the usual one
        most = self.ctas.get(chosen, self.ctas["ring"])
        natural = nccl_ctas(chosen, nbytes, most)
        used = natural if ctas is None else min(ctas, natural)
        curve = self.curve(kind, algorithm)
        per_cta = self.cta_rates.get(chosen, self.cta_rates["ring"])
        us = self._us(curve, kind, nbytes, count, algorithm, stride)
        basis = curve.basis
        if used < natural:  # the curve holds for the library's own CTAs
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
        """Errors are those of the curve's ranks and, where it has points, of sizes between them."""
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
            """Points hold for the measured ranks; for other ranks the model gives the ratio."""
            here = self._model_us(curve, kind, size, ranks, algorithm, stride)
            there = self._model_us(curve, kind, size, curve.ranks, algorithm)
            return interpolate_us(curve.points, size) * (here / there if there > 0 else 1.0)

        # The ratio may fall with size where the points hardly rise: no message takes less than a smaller one.
        smaller = [size for size in (1, *(size for size, _ in curve.points)) if size < nbytes]
        return max(map(scaled_us, (*smaller, nbytes)))

    def _peak_bytes_per_s(
        self, curve: TimeCurve, kind: str, ranks: int, algorithm: str | None, stride: int
    ) -> float:
        """Bus bandwidth in the limit of large messages."""
        factor, most = bus_factor(kind, ranks), _MAX_NODE_BYTES
        if curve.points and stride == 1:
            return max(size * factor / us for size, us in curve.points) * 1e6
        return most * factor / self._model_us(curve, kind, most, ranks, algorithm, stride) * 1e6

    def _model_us(
        self, curve: TimeCurve, kind: str, nbytes: int, ranks: int, algorithm: str | None, stride: int = 1
    ) -> float:
        known = {**self.constants, **curve.constants}
        inside = Inside(known["gb_s"] * 1e9, self.switch_reduces and algorithm not in ("ring", "tree"))
        network = self.network or Network(rail_bytes_per_s=1e9)  # not reached: all ranks share a domain
        domain = self.domain if self.network else max(ranks, self.domain)
        parts = group(ranks, stride, network.but(domain=domain))
        name = "p2p" if kind == "send_recv" else kind
        links = _links(known)
        return 1e6 * group_collective_s(name, nbytes, parts, inside, network, links, algorithm=algorithm)


def _links(known: Mapping[str, float]) -> Links:
    """Links of the network model from the constants of a profile."""
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
    """The shipped profile of that name, or the one in a file of `weft node import`. Raises UsageError."""
    from weft.comm.node_file import find_node

    return find_node(name_or_path)
