"""The documents of `weft node`: a node profile, which is also the file, and the list of those shipped."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class NodeKernelJson(TypedDict):
    threads: dict[str, int]
    """By algorithm; `ring` serves those that are absent."""
    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a CTA, static and dynamic."""
    cluster: int
    """CTAs of a cluster; 1: no clusters."""
    basis: NotRequired[str]
    source: NotRequired[str]


class CtaRateJson(TypedDict):
    gb_s: float
    """Bus bandwidth that one CTA adds."""
    low: float
    high: float
    basis: NotRequired[str]
    """`published`, `assumed` or `measured`."""
    source: NotRequired[str]


class NodeCurveJson(TypedDict):
    collective: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `reduce` or `send_recv`."""
    ranks: int
    basis: str
    """`published`, `assumed` or `measured`."""
    algorithm: NotRequired[str | None]
    """`ring`, `tree`, `nvls`, `nvlstree`, `p2p`; null: the library's choice."""
    error_pct: NotRequired[float | None]
    """Mean error from 16 MiB on, on results of sources left out of the fit; measured: spread of repeats."""
    error_small_pct: NotRequired[float | None]
    """The same below 16 MiB."""
    constants: NotRequired[dict[str, float]]
    """`launch_us`, `hop_us`, `gb_s`, `switch_gain`, `half_bytes`, `ring_us`, `network_us`."""
    points: NotRequired[list[list[float]]]
    """Bytes and microseconds, in order of size."""
    sources: NotRequired[list[str]]


class NodeDocument(TypedDict):
    """`weft node show NAME --json`, `weft node import … --json` and the file of a node profile."""

    version: int
    name: str
    gpu: str
    ranks: int
    kernel: NodeKernelJson
    ctas: dict[str, int]
    """CTAs that the library uses by default, by algorithm."""
    cta_rates: dict[str, CtaRateJson]
    copy_engines: NotRequired[CtaRateJson | None]
    """Bus bandwidth of collectives by copy engines; null: none."""
    constants: dict[str, float]
    """Of the network model, for collectives without a curve."""
    title: NotRequired[str]
    domain: NotRequired[int]
    """Ranks that reach each other without the network."""
    network: NotRequired[str | None]
    """A network of `weft plan`, such as `ndr400`; null: one NVLink domain."""
    switch_reduces: NotRequired[bool]
    basis: NotRequired[str]
    assumed_pct: NotRequired[float]
    """Range in percent given for a collective whose error is not known."""
    curves: NotRequired[list[NodeCurveJson]]
    sources: NotRequired[list[str]]


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
