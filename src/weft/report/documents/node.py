"""The documents of `weft node`: a node profile, which is also the file, and the list of those shipped."""

from __future__ import annotations

from typing import Any, TypedDict


class _NodeKernelJsonOptions(TypedDict, total=False):
    basis: str
    source: str


class NodeKernelJson(_NodeKernelJsonOptions):
    threads: dict[str, int]
    """By algorithm; `ring` serves those that are absent."""
    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a CTA, static and dynamic."""
    cluster: int
    """CTAs of a cluster; 1: no clusters."""


class _CtaRateJsonOptions(TypedDict, total=False):
    basis: str
    """`published`, `assumed` or `measured`."""
    source: str


class CtaRateJson(_CtaRateJsonOptions):
    gb_s: float
    """Bus bandwidth that one CTA adds."""
    low: float
    high: float


class _NodeCurveJsonOptions(TypedDict, total=False):
    algorithm: str | None
    """`ring`, `tree`, `nvls`, `nvlstree`, `p2p`; null: the library's choice."""
    error_pct: float | None
    """Mean error from 16 MiB on, on results of sources left out of the fit; measured: spread of repeats."""
    error_small_pct: float | None
    """The same below 16 MiB."""
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
    """Bus bandwidth of collectives by copy engines; null: none."""
    copies_as: str
    """How ghost ranks represent copies by copy engines: `delay`, during which the driver copies the data."""
    title: str
    domain: int
    """Ranks that reach each other without the network."""
    network: str | None
    """A network of `weft plan`, such as `ndr400`; null: one NVLink domain."""
    switch_reduces: bool
    basis: str
    assumed_pct: float
    """Range in percent given for a collective whose error is not known."""
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
    """CTAs that the library uses by default, by algorithm."""
    cta_rates: dict[str, CtaRateJson]
    constants: dict[str, float]
    """Of the network model, for collectives without a curve."""


class NodeLineJson(TypedDict):
    name: str
    title: str
    gpu: str
    ranks: int
    basis: str
    collectives: dict[str, Any]
    """By collective: `basis` and `error_pct`."""


class NodeListDocument(TypedDict):
    """`weft node list --json`."""

    version: int
    nodes: list[NodeLineJson]
