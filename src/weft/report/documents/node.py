"""The documents of `weft node`: a node profile (also the file format), and the list of shipped profiles."""

from __future__ import annotations

from typing import Any, TypedDict


class _NodeKernelJsonOptions(TypedDict, total=False):
    basis: str
    source: str


class NodeKernelJson(_NodeKernelJsonOptions):
    threads: dict[str, int]
    """Threads per CTA by algorithm; absent algorithms use `ring`."""
    registers: int
    """Registers per thread."""
    shared_bytes: int
    """Static and dynamic shared memory per CTA."""
    cluster: int
    """CTAs per cluster; 1: no clusters."""


class _CtaRateJsonOptions(TypedDict, total=False):
    basis: str
    """`published`, `assumed` or `measured`."""
    source: str


class CtaRateJson(_CtaRateJsonOptions):
    gb_s: float
    """Bus bandwidth that each CTA adds."""
    low: float
    high: float


class _NodeCurveJsonOptions(TypedDict, total=False):
    algorithm: str | None
    """`ring`, `tree`, `nvls`, `nvlstree`, `p2p`; null: the library's choice."""
    error_pct: float | None
    """Mean error from 16 MiB up, on sources left out of the fit; if measured, the spread of repeats."""
    error_small_pct: float | None
    """`error_pct` below 16 MiB."""
    constants: dict[str, float]
    """`launch_us`, `hop_us`, `gb_s`, `switch_gain`, `half_bytes`, `ring_us`, `network_us`."""
    points: list[list[float]]
    """Bytes and microseconds, in order of size."""
    sources: list[str]


class NodeCurveJson(_NodeCurveJsonOptions):
    collective: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `reduce` or `send_recv`."""
    ranks: int
    basis: str
    """`published`, `assumed` or `measured`."""


class _NodeDocumentOptions(TypedDict, total=False):
    copy_engines: CtaRateJson | None
    """Bus bandwidth of copy-engine collectives; null: none."""
    copies_as: str
    """How ghost ranks represent copy-engine copies: `delay`, during which the driver copies the data."""
    title: str
    domain: int
    """Number of ranks that reach each other without the network."""
    network: str | None
    """A network of `weft plan`, such as `ndr400`; null: one NVLink domain."""
    switch_reduces: bool
    basis: str
    assumed_pct: float
    """Range in percent for a collective whose error is unknown."""
    curves: list[NodeCurveJson]
    sources: list[str]


class NodeDocument(_NodeDocumentOptions):
    """`weft node show NAME --json`, `weft node import … --json` and the file of a node profile."""

    version: int
    name: str
    gpu: str
    ranks: int
    kernel: NodeKernelJson
    ctas: dict[str, int]
    """The library's default number of CTAs, by algorithm."""
    cta_rates: dict[str, CtaRateJson]
    constants: dict[str, float]
    """Constants of the network model, for collectives without a curve."""


class NodeLineJson(TypedDict):
    name: str
    title: str
    gpu: str
    ranks: int
    basis: str
    collectives: dict[str, Any]
    """`basis` and `error_pct` by collective."""


class NodeListDocument(TypedDict):
    """`weft node list --json`."""

    version: int
    nodes: list[NodeLineJson]
