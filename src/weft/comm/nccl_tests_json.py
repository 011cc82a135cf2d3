"""Convert the JSON files of nccl-tests (`-J`) and rccl-tests to the text that the same run would print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_HEADER = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
_END = "# Collective test concluded"
_RCCL = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AlltoAll": "alltoall",
    "AllToAll": "alltoall",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "sendrecv",
}
"""Programs by the name of the collective in rccl-tests' files."""
_MAX_RANKS = 1 << 16


def text_of_json(content: str) -> str:
    """The text of the runs; empty if the content is not such a file."""
    try:
        document = json.loads(content)
        lines = _nvidia(document) if isinstance(document, dict) else _amd(document)
        return "\n".join(lines)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return ""


def _nvidia(document: dict[str, Any]) -> Iterator[str]:
    yield str(document["args"][0])
    for one in document.get("config", document).get("devices", ()):
        yield (
            f"# Rank {one['rank']} Group {one['group']} Pid {one['pid']} on {one['hostname']} "
            f"device {one['device']} [{one['device_hex']}] {one['device_info']}"
        )
    results = document["results"]
    cpu = any("cpu_time" in (one.get("out_of_place") or {}) for one in results)
    yield _HEADER.replace("time", "cputime") if cpu else _HEADER
    for one in results:
        head = " ".join(str(one[key]) for key in ("size", "count", "type", "redop", "root"))
        halves = (one.get("out_of_place"), one.get("in_place"))
        keys = ("cpu_time" if cpu else "time", "alg_bw", "bus_bw", "nwrong")
        yield f"{head} {' '.join(_half(half, keys) for half in halves)}"
    yield f"# Out of bounds values : {(document.get('out_of_bounds') or {}).get('count', 0)}"


def _amd(records: list[dict[str, Any]]) -> Iterator[str]:
    """rccl-tests writes a list of records, with separate ones for out of place and in place."""
    name, found = "", dict[tuple[int, int, str], dict[bool, dict[str, Any]]]()
    for one in records:
        key = (int(one["numCycle"]), int(one["size"]), str(one["name"]))
        found.setdefault(key, {})[bool(one["inPlace"])] = one
    for (_, size, title), halves in found.items():
        first = next(iter(halves.values()))
        if title != name:
            yield _END
            name, ranks = title, int(first["ranks"])
            yield f"{_RCCL[title]}_perf"
            for rank in range(min(ranks, _MAX_RANKS)):
                host, device = divmod(rank, int(first["ranksPerNode"]))
                yield f"# Rank {rank} Group 0 Pid 1 on host{host} device {device}"
            yield _HEADER
        words = [_half(halves.get(place), ("time", "algBw", "busBw", "wrong")) for place in (False, True)]
        yield f"{size} 0 {first['type']} {first['redop']} {first.get('root', -1)} {' '.join(words)}"
    yield _END


def _half(values: dict[str, Any] | None, keys: tuple[str, ...]) -> str:
    return " ".join("N/A" if (values or {}).get(key) is None else str((values or {})[key]) for key in keys)
