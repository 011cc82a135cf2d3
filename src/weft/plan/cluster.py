"""A cluster from a user's file: numbers in TOML or JSON, or the output of nccl-tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comm.nccl_tests import read_tables
from weft.errors import InputError, UsageError
from weft.gpu.collectives import collective_s, group
from weft.gpu.network import GBIT, Network, network, usual_network
from weft.gpu.specs import GpuSpec, spec
from weft.plan.figures import shipped
from weft.plan.user_files import parse_toml, read_text

KEYS = (
    *("name", "gpu", "nodes", "gpus_per_node", "domain", "network", "rail_gbit", "node_gbit"),
    *("oversubscription", "leaf_gpus", "latency_us", "nccl_tests"),
)
_LARGE_BYTES = 16e6
"""Smallest message whose time shows the bandwidth."""


_RINGS = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose time determines the network's bandwidth."""


@dataclass(frozen=True)
class Cluster:
    """The cluster that a file describes."""

    network: Network
    gpu: str = ""
    """Empty: not stated."""
    gpus: int = 0
    """GPUs of the whole cluster; 0: not stated."""


def read_cluster(path: str | os.PathLike[str], gpu: str) -> Cluster:
    """Read a cluster from a file. `gpu`: its GPU if the file does not state one."""
    name, words = os.fspath(path), read_text(path)
    if "busbw" in words and read_tables(words):
        return from_nccl_tests(words, spec(gpu), usual_network(spec(gpu).name), name)
    if words.lstrip().startswith("{"):
        try:
            document = json.loads(words)
        except ValueError as error:
            raise InputError(f"{name} is not JSON: {error}") from None
    else:
        try:
            document = parse_toml(words, name)
        except InputError as error:
            raise InputError(f"{error}; give TOML, JSON or nccl-tests output with its table") from None
    if not isinstance(document, dict):
        raise InputError(f"{name} is not a table of numbers about a cluster")
    return from_numbers(document, gpu, name)


def from_numbers(document: Mapping[str, Any], gpu: str, name: str) -> Cluster:
    """A cluster from a table of numbers with keys from `KEYS`."""
    wrong = [key for key in document if key not in KEYS]
    if wrong:
        raise UsageError(f"--cluster {name}: {wrong[0]!r} is not known; there are {', '.join(KEYS)}")
    kind = str(document.get("gpu", gpu))
    chip = spec(kind)
    base = network(str(document["network"])) if document.get("network") else usual_network(chip.name)
    per_node = int(_number(document, "gpus_per_node", name) or base.domain)
    changes: dict[str, Any] = {"name": str(document.get("name", Path(name).stem)), "domain": per_node}
    if document.get("domain"):
        changes["domain"] = int(_number(document, "domain", name))
    if document.get("rail_gbit") and document.get("node_gbit"):
        raise UsageError(
            f"--cluster {name}: rail_gbit is for a GPU and node_gbit for a node; give one of them"
        )
    if document.get("rail_gbit"):
        changes["rail_bytes_per_s"] = _number(document, "rail_gbit", name) * GBIT
    if document.get("node_gbit"):
        changes["rail_bytes_per_s"] = _number(document, "node_gbit", name) * GBIT / per_node
    for key in ("oversubscription", "latency_us"):
        if key in document:
            changes[key] = _number(document, key, name)
    if document.get("leaf_gpus"):
        changes["leaf_gpus"] = int(_number(document, "leaf_gpus", name))
    found = base.but(**changes)
    if document.get("nccl_tests"):
        output = Path(name).parent / str(document["nccl_tests"])
        found = from_nccl_tests(read_text(output), chip, found, str(output)).network
    nodes = int(_number(document, "nodes", name))
    return Cluster(found, kind if document.get("gpu") else "", nodes * per_node)


def _number(document: Mapping[str, Any], key: str, name: str) -> float:
    value = document.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise InputError(f"--cluster {name}: {key} is {value!r}, not a number from 0 to 1e9")
    return float(value)


def from_nccl_tests(words: str, gpu: GpuSpec, base: Network, name: str) -> Cluster:
    """The network for which the planner's model gives the collective time that nccl-tests measured on several
    nodes."""
    tables = read_tables(words)
    hosts = max((table.hosts for table in tables), default=0)
    if hosts < 2:
        raise UsageError(
            f"--cluster {name}: nccl-tests on {hosts or 'no'} node says nothing about the network "
            "between nodes; run it on two or more, with the list of ranks in its output"
        )
    spread = [table for table in tables if table.hosts == hosts]
    table = next((one for one in spread if one.collective in _RINGS), spread[0])
    kind = table.collective if table.collective in _RINGS else "all_reduce"
    large = [(row.nbytes, row.us * 1e-6) for row in table.rows if row.nbytes >= _LARGE_BYTES]
    if not large:
        raise UsageError(
            f"--cluster {name}: no message of {_LARGE_BYTES / 1e6:.0f} MB or more; run nccl-tests with -e 1G"
        )
    size, seconds = max(large)
    per_node = table.ranks // hosts
    links = shipped().links
    low, high = 1e6, 1e13
    for _ in range(80):
        middle = (low * high) ** 0.5
        tried = base.but(domain=per_node, rail_bytes_per_s=middle)
        took = collective_s(kind, size, group(table.ranks, 1, tried), gpu, tried, links)
        low, high = (middle, high) if took > seconds else (low, middle)
    found = base.but(name=Path(name).stem, domain=per_node, rail_bytes_per_s=high)
    return Cluster(found, "", table.ranks)
