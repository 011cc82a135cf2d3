"""Read the output of nccl-tests and rccl-tests: one table per collective that was run.

Handles logs of all versions: with or without redop and root columns, launcher prefixes on every line, NCCL's
debug lines between the rows, several runs in one file, a file that ends in the middle of a row.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send_recv",
}
"""Collectives by the program that measures them, without `_perf`: `all_reduce_perf` is `all_reduce`."""
OTHER_PROGRAMS = ("alltoallv", "scatter", "gather", "hypercube")
MAX_LOG_BYTES = 64 << 20
_MAX_LINE = 1024
"""Characters of a line that are parsed. Rows are shorter, and the patterns are slow on longer lines."""

_NAMES = "|".join(sorted((*PROGRAMS, *OTHER_PROGRAMS), key=len, reverse=True))
_PROGRAM = re.compile(rf"(?<![a-z])({_NAMES})_perf")
# Launchers prefix lines and parts of lines: `[1,0]<stdout>:`, `[0]`, `12: `, `worker-0 | `.
_PREFIX = re.compile(r"\[\d+(?:,\d+)?\](?:<std(?:out|err)>:)?")
_COLOR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_TYPES = "u?int(?:8|32|64)|char|half|float(?:16|32|64)?|bfloat16|double|f(?:p|loat)?8\\w*"
_ROW = re.compile(rf"(?:^|[\s:|])(\d{{1,18}})\s+(\d{{1,18}})\s+({_TYPES})\s+(\S.*)$")
_RANK = re.compile(
    r"Rank\s+(\d{1,9})\s+(?:Group\s+(\d{1,9})\s+)?(?:(?!Rank).)*?"
    r"(?:Pid\s+\S+\s+)?\bon\s+(?:(\S+)\s+)?device\s+(\d{1,9})(?:\s+|$)(?:\[[^\]]*\]\s*)?(.*)$"
)
_HEADER = re.compile(r"\bsize\s+count\s+type\b.*\b(?:cpu)?time\b.*\balgbw\b")
_CHANNELS = re.compile(
    r"\b(\d{1,9}) coll channels,(?: \d+ collnet channels,)? (\d{1,9}) nvls channels, (\d{1,9}) p2p channels"
)
_UNIT = re.compile(r"\(B\).*?\((ns|us|ms|s)\)")
_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?$", re.I)
_FAILURE = re.compile(r"\bTest (?:[A-Z]+ )?(?:failure|timeout)\b.*")
_OUT_OF_BOUNDS = re.compile(r"\bOut of bounds values\s*:\s*(\d{1,18})\b")
_SUMMARY = re.compile(r"\b(?:Out of bounds values\s*:|Avg bus bandwidth\s*:|Collective test concluded)")


@dataclass(frozen=True)
class TestedSize:
    """One row of a table: the out-of-place result, or the in-place result if that is the only one."""

    nbytes: int
    us: float
    bus_gb_s: float
    factor: float
    """Bus bandwidth over algorithm bandwidth, which identifies the collective; 0 if they are too small."""
    redop: str
    root: int | None
    in_place_us: float | None
    """None if not measured, or if the collective has no in-place form (the check column says N/A)."""
    wrong: bool


@dataclass
class TestedCollective:
    """One run of one program."""

    collective: str = ""
    """Empty if the log does not name it; see `guess`."""
    program: str = ""
    ranks: int = 0
    """0 if the log does not list them."""
    hosts: int = 0
    gpu: str = ""
    """Name in the vendor's spelling."""
    channels: tuple[int, int, int] | None = None
    """CTAs of rings and trees, of reductions in the switch, of point-to-point transfers; None: not logged."""
    cpu_time: bool = False
    """Whether the times are host times (`-C 1`), which do not measure the collective."""
    rows: list[TestedSize] = field(default_factory=list)
    wrong: tuple[int, ...] = ()
    """Sizes whose rows were dropped because their results were wrong."""
    unread: list[int] = field(default_factory=list)
    """Sizes whose rows have impossible numbers or are truncated."""
    out_of_bounds: int = 0
    """Number of wrong results in the summary."""
    failure: str = ""
    """The program's failure message; empty if there is none."""
    ended: bool = False
    """Whether the log contains the summary at the end of the run."""

    @property
    def alone(self) -> bool:
        """Whether each process ran by itself, as in binaries built without MPI."""
        return bool(self.rows) and self.ranks <= 1 and all(row.bus_gb_s == 0 for row in self.rows)


@dataclass
class _Listed:
    """The ranks that a log lists.

    With NCCL_TESTS_SPLIT each group runs its own collective, and the table shows the first group.
    """

    first: str = ""
    members: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    others: bool = False
    devices: int = 0
    largest: int = -1

    def add(self, rank: int, group: str, host: str, device: int) -> None:
        self.first = self.first or group
        self.others |= group != self.first
        if group == self.first:
            self.members.add(rank)
            self.largest = max(self.largest, rank)
            self.names.add(host)
            self.devices = max(self.devices, device + 1)

    @property
    def _cut(self) -> bool:
        """Whether ranks are missing, for example because a report quotes only some lines of the list."""
        return not self.others and self.largest + 1 > len(self.members)

    @property
    def ranks(self) -> int:
        return self.largest + 1 if self._cut else len(self.members)

    @property
    def hosts(self) -> int:
        """Number of hosts by name; if ranks are missing, estimated from the largest device number."""
        return -(-self.ranks // self.devices) if self._cut else len(self.names)


def read_tables(text: str) -> list[TestedCollective]:
    """The tables of a log that have valid rows, in order; see `read_runs`."""
    return [table for table in read_runs(text) if table.rows]


def read_runs(text: str) -> list[TestedCollective]:
    """The runs in a log that measured something or failed, in order.

    Rows with wrong results are dropped. If the summary counts some but no row shows them, all are dropped.
    """
    found = list(_tables(text.splitlines()))
    for table in found:
        table.wrong = tuple(row.nbytes for row in table.rows if row.wrong)
        table.rows = [row for row in table.rows if not row.wrong]
        if table.out_of_bounds and not table.wrong:
            table.rows = []
        table.ranks = table.ranks or ranks_by_bandwidth(table)
        if table.rows and not table.collective and table.program not in OTHER_PROGRAMS:
            table.collective = guess(table)
    return found


def points(tables: Iterable[TestedCollective]) -> tuple[tuple[int, float], ...]:
    """(bytes, median microseconds) over tables of the same collective and ranks, in order of size."""
    times: dict[int, list[float]] = {}
    for table in tables:
        for row in table.rows:
            times.setdefault(row.nbytes, []).append(row.us)
    return tuple((size, statistics.median(times[size])) for size in sorted(times))


def _tables(lines: Iterable[str]) -> Iterator[TestedCollective]:
    table, listed = TestedCollective(), _Listed()
    columns: list[str] = []
    unit = 1.0
    for raw in lines:
        line = _PREFIX.sub(" ", _COLOR.sub("", raw[:_MAX_LINE]))
        failure, rank = _FAILURE.search(line), _RANK.search(line)
        program = None if failure or "concluded" in line else _PROGRAM.search(line)
        if (table.rows or table.unread or table.failure) and (program or rank or _HEADER.search(line)):
            yield table  # a new run begins; if only a header marks it, program and ranks stay the same
            same = not program and not rank
            kept = replace(table, rows=[], unread=[], out_of_bounds=0, failure="", ended=False)
            table = kept if same else TestedCollective()
            listed = listed if same else _Listed()
        if failure:  # a row that the message interrupts is incomplete
            table.failure = table.failure or " ".join(failure[0].split())
        elif program:
            table.program, table.collective = program[1], PROGRAMS.get(program[1], "")
        elif rank:
            listed.add(int(rank[1]), rank[2] or "0", rank[3] or "", int(rank[4]))
            table.ranks, table.hosts = listed.ranks, listed.hosts
            table.gpu = table.gpu or rank[5].strip()
        elif found := _CHANNELS.search(line):
            table.channels = (int(found[1]), int(found[2]), int(found[3]))
        elif _HEADER.search(line):
            columns, unit = line.replace("#", " ", 1).split(), 1.0
            table.cpu_time = "cputime" in columns
        elif scale := _UNIT.search(line):
            unit = _US[scale[1]]
        elif _SUMMARY.search(line):
            table.ended = True
            if wrong := _OUT_OF_BOUNDS.search(line):
                table.out_of_bounds = int(wrong[1])
        elif row := _ROW.search(line):
            if read := _row(int(row[1]), row[4].split(), columns, unit):
                table.rows.append(read)
            elif int(row[1]):  # rows of 0 bytes measure nothing
                table.unread.append(int(row[1]))
    if table.rows or table.unread or table.failure:
        yield table


def _row(nbytes: int, words: list[str], columns: list[str], unit: float) -> TestedSize | None:
    """Parse the words of a row after size, count and type; None if they are invalid."""
    redop, root = "", None
    if words and not _NUMBER.match(words[0]) and words[0] != "N/A":
        redop = words.pop(0)
    if "root" in columns or (not columns and len(words) in (5, 9)):
        if not words or not _NUMBER.match(words[0]):
            return None
        number = float(words.pop(0))
        if not math.isfinite(number):
            return None
        root = int(number)
    starts = _starts(columns)
    first, second = (_three(words, start) for start in starts)
    best = first or second
    if nbytes <= 0 or best is None or not best[0] > 0:
        return None
    us, algorithm_gb_s, bus_gb_s = best
    if bus_gb_s > 2.05 * algorithm_gb_s + 0.02:  # the ratio is at most 2 (n - 1) / n; both are rounded
        return None
    if algorithm_gb_s >= 0.5:  # the bandwidth determines the unit of the time
        scale = nbytes / algorithm_gb_s / 1e3 / us
        most = 2.05 if algorithm_gb_s == bus_gb_s else 1.03
        unit = next((known for known in _US.values() if 0.97 < scale / known < most), 0.0)
        if not unit:
            return None
        if scale / unit >= 1.03:
            # Until 2020, both bandwidths of all-gather and reduce-scatter excluded the rank's own bytes.
            algorithm_gb_s *= scale / unit
    checks = [words[start + 3] if len(words) > start + 3 else "0" for start in starts]
    in_place = second is not None and first is not None and (checks[1] != "N/A" or checks[0] == "N/A")
    return TestedSize(
        nbytes=nbytes,
        us=us * unit,
        bus_gb_s=bus_gb_s,
        factor=bus_gb_s / algorithm_gb_s if algorithm_gb_s >= 0.5 else 0.0,
        redop=redop,
        root=root,
        in_place_us=second[0] * unit if in_place and second else None,
        wrong=any(half and _is_wrong(check) for half, check in zip((first, second), checks, strict=True)),
    )


def _is_wrong(check: str) -> bool:
    """Whether the check column reports a failure.

    It has the number of wrong elements or, until 2022, the largest difference. rccl-tests marks a difference
    that it does not accept with an asterisk.
    """
    if check.endswith("*"):
        return True
    return check.lstrip("-").lower() in ("nan", "inf") or (
        _NUMBER.match(check) is not None and float(check) >= 1
    )


def _starts(columns: list[str]) -> tuple[int, int]:
    """Indices of the first out-of-place and in-place columns, counted from the first time column."""
    found = [at for at, title in enumerate(columns) if title == "time"]
    return (0, found[1] - found[0]) if len(found) > 1 else (0, 4)


def _three(words: list[str], start: int) -> tuple[float, float, float] | None:
    """Time, algorithm bandwidth and bus bandwidth; None if they are absent, truncated or zero."""
    part = words[start : start + 3]
    if len(part) < 3 or not all(_NUMBER.match(word) for word in part):
        return None
    us, algorithm_gb_s, bus_gb_s = (float(word) for word in part)
    finite = all(map(math.isfinite, (us, algorithm_gb_s, bus_gb_s)))
    return (us, algorithm_gb_s, bus_gb_s) if us > 0 and finite else None


def ranks_by_bandwidth(table: TestedCollective) -> int:
    """Ranks n from bus over algorithm bandwidth, which is 2 (n - 1) / n or (n - 1) / n; 0 if unknown."""
    factors = [row.factor for row in sorted(table.rows, key=lambda row: -row.bus_gb_s) if row.factor]
    left = (2 - factors[0]) / 2 if factors and factors[0] > 1.02 else 1 - factors[0] if factors else 0.0
    return round(1 / left) if 0.0005 < left < 0.55 else 0


def guess(table: TestedCollective) -> str:
    """The collective, from redop, root and the ratio of bus to algorithm bandwidth; empty if unknown."""
    factors = [row.factor for row in table.rows if row.factor]
    if not factors:
        return ""
    factor, n = statistics.median(factors), max(table.ranks, 2)
    reduces = table.rows[-1].redop not in ("", "none")
    rooted = table.rows[-1].root is not None and table.rows[-1].root >= 0
    both = any(row.in_place_us is not None for row in table.rows)
    if reduces and not rooted and (factor > 1.02 or abs(factor - 2 * (n - 1) / n) < 0.02):
        return "all_reduce"
    if abs(factor - (n - 1) / n) < 0.02:
        return "reduce_scatter" if reduces else "all_gather" if both else "all_to_all"
    if abs(factor - 1) < 0.02:
        return ("reduce" if reduces else "broadcast") if rooted else "send_recv"
    return ""
