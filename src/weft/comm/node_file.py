"""Read, check and write node profiles as JSON. A file is data; nothing in it is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.checks import check_choice, check_flag, check_int, check_keys, check_number, unique_keys
from weft.comm.node import COPIES_AS, NODE_ALGORITHMS, NODE_BASES, NODE_COLLECTIVES, Node
from weft.comm.node_curve import CtaRate, TimeCurve
from weft.comm.node_kernel import CommKernel
from weft.errors import InputError, UsageError
from weft.gpu.network import NETWORKS

NODE_VERSION = 1
_FOLDER = Path(__file__).parent / "nodes"
_MAX_FILE_BYTES = 4 << 20
_MAX_REASON = 400  # characters: a message may quote the file
MAX_PROFILE_RANKS = 4096
_MAX_POINTS = 4096
NODE_CONSTANTS = ("launch_us", "hop_us", "gb_s", "switch_gain", "half_bytes", "ring_us", "network_us")
"""Constants of the network model that a profile may contain."""
_KEYS = (
    *("version", "name", "title", "gpu", "ranks", "domain", "network", "switch_reduces", "basis"),
    *("assumed_pct", "kernel", "ctas", "cta_rates", "copy_engines", "copies_as"),
    *("constants", "curves", "sources"),
)
_REQUIRED = ("name", "gpu", "ranks", "kernel", "ctas", "cta_rates", "constants")


@cache
def shipped_nodes() -> tuple[str, ...]:
    """Names of the profiles that come with weft."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def find_node(name_or_path: str) -> Node:
    """A shipped profile by name, or a file. Raises UsageError with the names, InputError for a bad file."""
    key = name_or_path.strip().lower()
    if key in shipped_nodes():
        return read_node(_FOLDER / f"{key}.json")
    path = Path(name_or_path)
    if key and (path.suffix or os.sep in name_or_path or path.exists()):
        return read_node(path)
    names = ", ".join(shipped_nodes())
    raise UsageError(f"no node named {name_or_path!r}; use one of {names}, or a file of `weft node import`")


def read_node(path: Path) -> Node:
    """The profile in a file. Raises InputError with a one-line message."""
    try:
        with path.open("rb") as file:  # it may never end if it is not a regular file
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise InputError(
                f"node {path}: over {_MAX_FILE_BYTES >> 20} MiB; give a file of `weft node import`"
            )
        document = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
    except UsageError as error:
        raise InputError(f"node {path}: {str(error)[:_MAX_REASON]}") from None
    except OSError as error:
        raise InputError(f"cannot read node {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"node {path} is not JSON: {error}") from None
    try:
        return node_from_dict(document)
    except UsageError as error:
        raise InputError(f"node {path}: {str(error)[:_MAX_REASON]}") from None


def node_from_dict(document: Any) -> Node:
    """A profile from its JSON document. Raises UsageError that names the unknown key or impossible value."""
    if not isinstance(document, dict):
        raise UsageError(f"a node is a JSON object, not {type(document).__name__}")
    version = document.get("version")
    if version != NODE_VERSION or isinstance(version, bool):
        raise UsageError(f"node version {version!r} is not known; this weft reads {NODE_VERSION}; update it")
    _keys("node", document, _KEYS, _REQUIRED)
    ranks = _whole(document, "ranks", 2, MAX_PROFILE_RANKS)
    network = document.get("network")
    if network is not None:
        check_choice("network", network, tuple(NETWORKS))
    return Node(
        name=_text(document, "name"),
        gpu=_text(document, "gpu"),
        ranks=ranks,
        basis=_choice(document, "basis", NODE_BASES, "assumed"),
        title=_text(document, "title", ""),
        kernel=_kernel(_object(document, "kernel")),
        ctas=_by_algorithm(_object(document, "ctas"), "ctas", lambda home, key: _whole(home, key, 1, 1024)),
        cta_rates=_by_algorithm(_object(document, "cta_rates"), "cta_rates", _rate),
        constants=_constants(_object(document, "constants"), ("launch_us", "hop_us", "gb_s")),
        switch_reduces=_flag(document, "switch_reduces"),
        domain=_whole(document, "domain", 1, MAX_PROFILE_RANKS) if "domain" in document else ranks,
        network=NETWORKS[network] if network is not None else None,
        curves=tuple(_curve(one) for one in _list(document, "curves")),
        copy_engines=None if document.get("copy_engines") is None else _rate(document, "copy_engines"),
        copies_as=_choice(document, "copies_as", COPIES_AS, COPIES_AS[0]),
        assumed_pct=_number(document, "assumed_pct", 0, 1000, 30.0),
        sources=_texts(document, "sources"),
    )


def node_to_dict(node: Node) -> dict[str, Any]:
    """The JSON document of a profile."""
    return {
        "version": NODE_VERSION,
        "name": node.name,
        "title": node.title,
        "gpu": node.gpu,
        "ranks": node.ranks,
        "domain": node.domain,
        "network": node.network.name if node.network else None,
        "switch_reduces": node.switch_reduces,
        "basis": node.basis,
        "assumed_pct": node.assumed_pct,
        "kernel": {
            "threads": dict(node.kernel.threads),
            "registers": node.kernel.registers,
            "shared_bytes": node.kernel.shared_bytes,
            "cluster": node.kernel.cluster,
            "basis": node.kernel.basis,
            "source": node.kernel.source,
        },
        "ctas": dict(node.ctas),
        "cta_rates": {name: asdict(rate) for name, rate in node.cta_rates.items()},
        "copy_engines": asdict(node.copy_engines) if node.copy_engines else None,
        "copies_as": node.copies_as,
        "constants": dict(node.constants),
        "curves": [_curve_to_dict(curve) for curve in node.curves],
        "sources": list(node.sources),
    }


def _curve_to_dict(curve: TimeCurve) -> dict[str, Any]:
    return {
        "collective": curve.collective,
        "algorithm": curve.algorithm,
        "ranks": curve.ranks,
        "basis": curve.basis,
        "error_pct": curve.error_pct,
        "error_small_pct": curve.error_small_pct,
        "constants": dict(curve.constants),
        "points": [list(point) for point in curve.points],
        "sources": list(curve.sources),
    }


def _kernel(home: dict[str, Any]) -> CommKernel:
    _keys(
        "kernel", home, ("threads", "registers", "shared_bytes", "cluster", "basis", "source"), ("threads",)
    )
    return CommKernel(
        registers=_whole(home, "registers", 16, 255),
        shared_bytes=_whole(home, "shared_bytes", 0, 1 << 20),
        cluster=_whole(home, "cluster", 1, 16),
        threads=_by_algorithm(
            _object(home, "threads"), "threads", lambda part, key: _whole(part, key, 32, 1024)
        ),
        basis=_choice(home, "basis", NODE_BASES, "assumed"),
        source=_text(home, "source", ""),
    )


def _rate(home: dict[str, Any], key: str) -> CtaRate:
    part = _object(home, key)
    _keys("cta_rates", part, ("gb_s", "low", "high", "basis", "source"), ("gb_s", "low", "high"))
    low, middle, high = (_number(part, name, 1e-3, 1e4) for name in ("low", "gb_s", "high"))
    if not low <= middle <= high:
        raise UsageError(f"cta_rates: gb_s {middle} is not between low {low} and high {high}")
    return CtaRate(
        middle, low, high, _choice(part, "basis", NODE_BASES, "assumed"), _text(part, "source", "")
    )


def _curve(home: Any) -> TimeCurve:
    if not isinstance(home, dict):
        raise UsageError("curves: each is a JSON object")
    known = (
        *("collective", "algorithm", "ranks", "basis", "error_pct", "error_small_pct"),
        *("constants", "points", "sources"),
    )
    _keys("curves", home, known, ("collective", "ranks", "basis"))
    algorithm = home.get("algorithm")
    if algorithm is not None:
        algorithm = _choice(home, "algorithm", NODE_ALGORITHMS, "ring")
    return TimeCurve(
        collective=_choice(home, "collective", NODE_COLLECTIVES, ""),
        ranks=_whole(home, "ranks", 2, MAX_PROFILE_RANKS),
        basis=_choice(home, "basis", NODE_BASES, "assumed"),
        algorithm=algorithm,
        error_pct=_percent(home, "error_pct"),
        error_small_pct=_percent(home, "error_small_pct"),
        sources=_texts(home, "sources"),
        constants=_constants(home.get("constants", {}), ()),
        points=_points(_list(home, "points")),
    )


def _percent(home: dict[str, Any], key: str) -> float | None:
    return None if home.get(key) is None else _number(home, key, 0, 1000)


def _points(found: list[Any]) -> tuple[tuple[int, float], ...]:
    if len(found) > _MAX_POINTS:
        raise UsageError(f"curves: {len(found)} points; at most {_MAX_POINTS}")
    points = []
    for one in found:
        if not isinstance(one, list) or len(one) != 2:
            raise UsageError(f"curves: point {one!r} is not valid; use [bytes, microseconds]")
        home = {"bytes": one[0], "us": one[1]}
        points.append((_whole(home, "bytes", 1, 1 << 50), _number(home, "us", 1e-3, 1e12)))
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise UsageError("curves: points are not in order of size")
    return tuple(points)


def _constants(home: Any, needed: tuple[str, ...]) -> dict[str, float]:
    if not isinstance(home, dict):
        raise UsageError("constants: a JSON object of numbers")
    _keys("constants", home, NODE_CONSTANTS, needed)
    found = {}
    for key in home:
        low, high = {"gb_s": (1e-3, 1e5), "half_bytes": (0, 1e12), "switch_gain": (0.1, 10)}.get(
            key, (0, 1e5)
        )
        found[key] = _number(home, key, low, high)
    return found


def _by_algorithm(
    home: dict[str, Any], where: str, read: Callable[[dict[str, Any], str], Any]
) -> dict[str, Any]:
    _keys(where, home, NODE_ALGORITHMS, ("ring",))
    return {key: read(home, key) for key in home}


def _keys(where: str, home: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    check_keys(where, home, known)
    for key in needed:
        if key not in home:
            raise UsageError(f"{where}: {key} is missing")


def _object(home: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = home.get(key)
    if not isinstance(value, dict):
        raise UsageError(f"{key} is not valid; use a JSON object")
    return value


def _list(home: Mapping[str, Any], key: str) -> list[Any]:
    value = home.get(key, [])
    if not isinstance(value, list):
        raise UsageError(f"{key} is not valid; use a list")
    return value


def _text(home: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = home.get(key, default)
    if not isinstance(value, str) or len(value) > 1000 or (default is None and not value.strip()):
        raise UsageError(f"{key} {str(value)[:40]!r} is not valid; use a short text")
    return "".join(letter if letter.isprintable() else " " for letter in value)  # shown in terminals


def _texts(home: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(_text({key: one}, key) for one in _list(home, key))


def _flag(home: Mapping[str, Any], key: str) -> bool:
    value = home.get(key, False)
    check_flag(key, value)
    return bool(value)


def _choice(home: Mapping[str, Any], key: str, choices: tuple[str, ...], default: str) -> str:
    value = home.get(key, default)
    check_choice(key, value, choices)
    return str(value)


def _whole(home: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value: Any = home.get(key)
    check_int(key, value, low, high, optional=False)
    return int(value)


def _number(
    home: Mapping[str, Any], key: str, low: float, high: float, default: float | None = None
) -> float:
    value: Any = home.get(key, default)
    check_number(key, value, low, high)
    return float(value)
