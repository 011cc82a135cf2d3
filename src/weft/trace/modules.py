"""Which module of the model launched a collective, if the trace records module calls (with_stack)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.timeline import Ns
from weft.trace.record import UNKNOWN_NS

if TYPE_CHECKING:
    from weft.trace.analysis import RankAnalysis

_Call = tuple[str, int, int, int]
"""Name of a module, start and end in nanoseconds, thread."""


def module_of(
    spans: npt.NDArray[np.intp], launch_ns: Ns, thread: npt.NDArray[np.int64], calls: Sequence[_Call]
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """The innermost module around each launch (index into the names; -1 if none), and the names.

    Only `spans` are looked up. The backward pass runs on a thread without module calls: -1.
    """
    out = np.full(len(launch_ns), -1, dtype=np.int64)
    names: dict[str, int] = {}
    by_thread: dict[int, list[_Call]] = defaultdict(list)
    for call in calls:
        by_thread[call[3]].append(call)
    for where, mine in by_thread.items():
        mine.sort(key=lambda call: (call[1], -call[2]))
        wanted = [i for i in spans.tolist() if thread[i] == where and launch_ns[i] != UNKNOWN_NS]
        open_calls: list[_Call] = []
        following = 0
        for i in sorted(wanted, key=lambda i: int(launch_ns[i])):
            at = int(launch_ns[i])
            while following < len(mine) and mine[following][1] <= at:
                open_calls.append(mine[following])
                following += 1
            while open_calls and open_calls[-1][2] <= at:
                open_calls.pop()
            inside = next((call for call in reversed(open_calls) if call[2] > at), None)
            if inside:
                out[i] = names.setdefault(inside[0], len(names))
    return out, tuple(names)


def module_rows(rank: RankAnalysis) -> list[dict[str, Any]]:
    """Communication of a rank by the module that launched it, the most exposed first; empty if unknown."""
    found, timeline, why = rank.found, rank.trace.timeline, rank.attribution
    module = rank.trace.module[found.span]
    length = (timeline.end_ns - timeline.start_ns)[found.span]
    rows = []
    for number in np.unique(module[module >= 0]).tolist():
        mine = module == number
        rows.append(
            {
                "module": rank.trace.modules[number],
                "count": int(mine.sum()),
                "comm_us": round(int(length[mine].sum()) / 1000, 3),
                "exposed_us": round(int(why.exposed_ns[mine].sum()) / 1000, 3),
                "reasons": {f"{key}_us": round(ns / 1000, 3) for key, ns in why.reasons(mine).items() if ns},
            }
        )
    return sorted(rows, key=lambda row: -row["exposed_us"])
