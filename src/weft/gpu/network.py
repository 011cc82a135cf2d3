"""Network, the links inside and between NVLink domains, and Links, the fitted constants of collectives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from weft.checks import unknown_name
from weft.errors import UsageError
from weft.gpu.cost import NODE_LINKS, NodeLinks

GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Network:
    """How the GPUs of a job reach each other."""

    name: str = "custom"
    domain: int = 8
    """GPUs that reach each other over NVLink (or xGMI)."""
    rail_bytes_per_s: float
    """One GPU's share of the bandwidth between domains, in one direction."""
    oversubscription: float = 1.0
    """Oversubscription above the leaf switches: with 2, half of the bandwidth is left there."""
    leaf_gpus: int = 256
    """GPUs under one set of leaf switches. Oversubscription does not affect groups inside it."""
    latency_us: float = 5.0
    """Latency between two domains, which is one hop of a ring."""

    def __post_init__(self) -> None:
        if self.domain < 1 or self.leaf_gpus < 1:
            raise UsageError(f"network domain {self.domain} is not valid; use an integer above 0")
        if not self.rail_bytes_per_s > 0:
            raise UsageError(
                f"network rail_bytes_per_s {self.rail_bytes_per_s!r} is not valid; use bytes per second, "
                "50e9 for one 400 Gbit/s adapter"
            )
        if not self.oversubscription >= 1:
            raise UsageError(
                f"network oversubscription {self.oversubscription!r} is not valid; use 1 (none) or more"
            )
        if self.latency_us < 0:
            raise UsageError(f"network latency_us {self.latency_us!r} is not valid; use 0 or more")

    def but(self, **changes: object) -> Network:
        """This network with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Links(NodeLinks):
    """The constants of collectives between nodes, in addition to those of `weft.gpu.cost` inside a node."""

    ring_us: float
    """One hop inside a domain in a ring that spans domains, where NCCL uses a slower protocol."""
    network_us: float
    """One hop between domains, on top of the network's own latency."""
    network_share: float
    """Share of the rail bandwidth between domains that large collectives reach."""
    congestion: float
    """Fraction by which transfers between domains take longer for each doubling of a group's span."""


LINKS = Links(**asdict(NODE_LINKS), ring_us=6.145, network_us=13.98, network_share=1.0, congestion=0.01196)
"""The constants between nodes were fitted to published training runs (benchmarks/plan/fit.py)."""


NETWORKS: dict[str, Network] = {
    n.name: n
    for n in (
        # Narayanan et al., SC'21, section 5: eight 200 Gbit/s HDR adapters for each DGX A100
        Network(name="hdr200", rail_bytes_per_s=200 * GBIT),
        # DGX H100 and H200: eight ConnectX-7 of 400 Gbit/s
        Network(name="ndr400", rail_bytes_per_s=400 * GBIT),
        # AWS p4d: four EFA of 100 Gbit/s for eight GPUs; p5: 3200 Gbit/s for eight
        Network(name="efa-p4d", rail_bytes_per_s=50 * GBIT, latency_us=15),
        Network(name="efa-p5", rail_bytes_per_s=400 * GBIT, latency_us=15),
        # DGX B300 class: 800 Gbit/s for each GPU
        Network(name="xdr800", rail_bytes_per_s=800 * GBIT),
        # GB200 NVL72: 72 GPUs in one NVLink domain, 400 Gbit/s for each GPU beyond it
        Network(name="nvl72", domain=72, rail_bytes_per_s=400 * GBIT),
        # GB300 NVL72: the same domain, one ConnectX-8 of 800 Gbit/s for each GPU
        Network(name="nvl72-xdr800", domain=72, rail_bytes_per_s=800 * GBIT),
        # DGX-1 with V100: four EDR adapters of 100 Gbit/s for eight GPUs
        Network(name="edr100", rail_bytes_per_s=50 * GBIT),
        # one 100 Gbit/s Ethernet adapter for a node of eight
        Network(name="eth100", rail_bytes_per_s=12.5 * GBIT, latency_us=25),
    )
}
_OF_GPU = {
    "v100": "edr100",
    "a40": "hdr200",
    "a100-40gb": "hdr200",
    "a100-80gb": "hdr200",
    "mi250x": "hdr200",
    "b300": "xdr800",
    "gb200": "nvl72",
    "gb300": "nvl72-xdr800",
}


def network(name: str) -> Network:
    """The preset with this name. Raises UsageError with the nearest valid name."""
    key = name.strip().lower()
    if key not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    return NETWORKS[key]


def usual_network(gpu: str) -> Network:
    """The network that systems with this GPU usually have; `ndr400` if it is not known."""
    return NETWORKS[_OF_GPU.get(gpu, "ndr400")]
