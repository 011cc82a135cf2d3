"""A planned step as Chakra execution traces, one file per rank, for network simulators.

Each rank's micro-batches run in the order of its pipeline schedule. A pass over a stage is cut into pieces. A
piece is one compute node, followed by the collectives of its layers; collectives of one kind form one node
with the sum of their bytes. Collectives that the software hides overlap with the next piece; for others, the
next piece waits. The durations of compute nodes include the contention with collectives, which a network
simulator does not model. Every stage has the durations of the slowest one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.errors import InputError, UsageError
from weft.gpu.collectives import Group
from weft.plan.chakra import COLLECTIVE, COLLECTIVE_TYPES, COMP, RECV, SEND, ChakraNode, encode
from weft.plan.config import TrainingJob
from weft.plan.schedule import Slot, order
from weft.plan.step import Collective, PlanProgress, Prediction

_PREFIX = "weft"
FINE_NODES = 300_000
"""Most nodes in all files together if passes are cut into several pieces."""
MOST_NODES = 4_000_000
_COMPUTE = ("gemm", "attention", "elementwise", "recompute", "overhead", "contention")


@dataclass
class RankGroups:
    """Numbers of communicators, by their ranks. The communicator of all ranks has no number, since ASTRA-sim
    uses all ranks for a collective without one."""

    ids: dict[tuple[int, ...], int] = field(default_factory=dict)

    def name(self, ranks: tuple[int, ...], world: int) -> str:
        if len(ranks) == world:
            return ""
        return str(self.ids.setdefault(ranks, len(self.ids) + 1))


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. Tensor parallel ranks are neighbours; pipeline stages are farthest apart."""

    tp: int
    cp: int
    dp: int
    pp: int

    @staticmethod
    def of(rank: int, job: TrainingJob) -> Place:
        rest, tp = divmod(rank, job.tp)
        rest, cp = divmod(rest, job.cp)
        pp, dp = divmod(rest, job.dp)
        return Place(tp, cp, dp, pp)

    def rank(self, job: TrainingJob) -> int:
        return ((self.pp * job.dp + self.dp) * job.cp + self.cp) * job.tp + self.tp


def members(one: Collective, place: Place, job: TrainingJob) -> tuple[int, ...]:
    """The ranks of the group that runs a collective with this rank, spaced evenly over the GPUs it spans."""
    if one.name == "tp":
        return tuple(Place(t, place.cp, place.dp, place.pp).rank(job) for t in range(job.tp))
    if _ties_embeddings(one, job):
        return tuple(replace(place, pp=stage).rank(job) for stage in (0, job.pp - 1))
    inner = job.tp if one.name != "ep" or job.expert_tp > 1 else 1
    first, here = place.pp * job.tp * job.cp * job.dp, place.rank(job)
    line = range(first + (here - first) % inner, first + job.tp * job.cp * job.dp, inner)
    at, size = line.index(here), one.group.ranks
    block = min(len(line), max(size, one.group.span // inner))
    step = block // size
    begin = at // block * block
    return tuple(line[begin + (at - begin) % step : begin + block : step])


def _ties_embeddings(one: Collective, job: TrainingJob) -> bool:
    """Whether a collective sums the gradients of an embedding that the first and the last stage share."""
    return one.name == "grads" and job.pp > 1 and one.group.ranks == 2 and one.group.span == job.gpus


@dataclass
class _Rank:
    """Builds the nodes of one rank."""

    job: TrainingJob
    found: Prediction
    place: Place
    groups: RankGroups
    pieces: int
    nodes: list[ChakraNode] = field(default_factory=list)
    known: dict[tuple[str, Group], str] = field(default_factory=dict)
    """Names of the rank's groups, by collective and group."""
    compute: int = -1
    """Id of the last compute node; -1 before the first."""
    awaited: list[int] = field(default_factory=list)
    """Nodes that the next compute node waits for, in addition to the last compute node."""
    behind: list[int] = field(default_factory=list)
    """Hidden collectives, for which the compute node after the next one waits."""

    def add(
        self, name: str, kind: int, after: list[int], us: float = 0.0, **attributes: bool | int | str
    ) -> int:
        node = ChakraNode(
            len(self.nodes),
            name,
            kind,
            tuple(sorted({index for index in after if index >= 0})),
            round(us),
            {"is_cpu_op": False, **attributes},
        )
        self.nodes.append(node)
        return node.id

    def work(self, name: str, seconds: float) -> None:
        """Add a compute node that follows the last one and waits for `awaited`."""
        self.compute = self.add(name, COMP, [self.compute, *self.awaited], 1e6 * seconds)
        self.awaited, self.behind = self.behind, []

    def communicate(self, one: Collective, times: float, label: str) -> None:
        """Add one node for `times` collectives of one kind; point-to-point: a send and a receive."""
        hidden = one.hidden_s > one.exposed_s
        where = self.behind if hidden else self.awaited
        if one.kind == "p2p":
            where += self._ring(one, times, label)
            return
        key = (one.name, one.group)
        if key not in self.known:
            self.known[key] = self.groups.name(members(one, self.place, self.job), self.job.gpus)
        size = one.bytes * times / (one.group.ranks if one.kind == "all_gather" else 1)
        among: dict[str, Any] = {"pg_name": self.known[key]} if self.known[key] else {}
        where.append(
            self.add(
                f"{label} {one.name} {one.kind}",
                COLLECTIVE,
                [self.compute],
                comm_type=COLLECTIVE_TYPES[one.kind],
                comm_size=max(1, round(size)),
                **among,
            )
        )

    def _ring(self, one: Collective, times: float, label: str) -> list[int]:
        """Send keys and values to the next context parallel rank, receive those of the previous rank."""
        job, here = self.job, self.place
        peers = [Place(here.tp, (here.cp + step) % job.cp, here.dp, here.pp).rank(job) for step in (1, -1)]
        size = max(1, round(one.bytes * times))
        return [
            self.transfer(f"{label} cp", SEND, peers[0], size, [self.compute], len(self.nodes)),
            self.transfer(f"{label} cp", RECV, peers[1], size, [self.compute], len(self.nodes) - 1),
        ]

    def transfer(self, label: str, kind: int, peer: int, size: int, after: list[int], tag: int) -> int:
        mine = self.place.rank(self.job)
        source, target = (mine, peer) if kind == SEND else (peer, mine)
        word = "send" if kind == SEND else "receive"
        return self.add(
            f"{label} {word}", kind, after, comm_src=source, comm_dst=target, comm_size=size, comm_tag=tag
        )


def rank_nodes(
    job: TrainingJob, found: Prediction, rank: int, groups: RankGroups, pieces: int = 1
) -> list[ChakraNode]:
    """The nodes of one rank's step."""
    build = _Rank(job, found, Place.of(rank, job), groups, pieces)
    once = [c for c in found.collectives if c.name in ("grads", "params") and not _every_pass(job, c)]
    inside = [c for c in found.collectives if c not in once and c.name != "pp"]
    if 0 < build.place.pp < job.pp - 1:
        once = [c for c in once if not _ties_embeddings(c, job)]
    for one in once:
        if one.name == "params":
            build.communicate(one, one.count, "gather")
    for slot in order(job, build.place.pp):
        _pass(build, slot, inside)
    extra = found.breakdown.get("compression", 0.0)
    if extra:
        build.work("compress", extra)
    for one in once:
        if one.name == "grads":
            build.communicate(one, one.count, "sum")
    build.awaited += build.behind
    build.behind = []
    build.work("optimizer", found.breakdown["optimizer"])
    return build.nodes


def _every_pass(job: TrainingJob, one: Collective) -> bool:
    """Whether a collective recurs in every pass, as those of fully sharded layers do."""
    return job.sharding == "zero3" and job.pp == 1 and one.count > 1


def _pass(build: _Rank, slot: Slot, inside: list[Collective]) -> None:
    job, found = build.job, build.found
    busy = sum(found.breakdown.get(kind, 0.0) for kind in _COMPUTE) / (job.micro_batches * job.interleave)
    again = found.breakdown.get("recompute", 0.0) / (job.micro_batches * job.interleave)
    seconds = (busy - again) / 3 if slot.forward else (busy - again) * 2 / 3 + again
    word = "forward" if slot.forward else "backward"
    label = f"{word} {slot.micro_batch}" + (f" chunk {slot.chunk}" if job.interleave > 1 else "")
    came = _receive(build, slot, label)
    build.awaited += [came] if came >= 0 else []
    shares = job.micro_batches * job.interleave * build.pieces
    for piece in range(build.pieces):
        build.work(f"{label} piece {piece}" if build.pieces > 1 else label, seconds / build.pieces)
        for one in inside:
            times = one.count / shares
            if one.name == "grads":
                times = 0.0 if slot.forward else times
            else:
                times /= 2
            if times > 0:
                build.communicate(one, times, label)
    _send(build, slot, label)


def _virtual(build: _Rank, slot: Slot) -> int:
    """Position of the slot's chunk in the model."""
    return slot.chunk * build.job.pp + build.place.pp


def _peer(build: _Rank, slot: Slot, step: int) -> int:
    """The rank that holds the previous (`step` -1) or next (1) chunk; -1 beyond the ends of the model."""
    other = _virtual(build, slot) + step
    if not 0 <= other < build.job.pp * build.job.interleave:
        return -1
    here = build.place
    return Place(here.tp, here.cp, here.dp, other % build.job.pp).rank(build.job)


def _tag(build: _Rank, slot: Slot, sender: int) -> int:
    """The tag that both ends of a transfer share: unique by sender, micro-batch and direction."""
    chunks = build.job.pp * build.job.interleave
    return 1_000_000 + 2 * (slot.micro_batch * chunks + sender) + int(slot.forward)


def _size(build: _Rank) -> int:
    size = next((c.bytes for c in build.found.collectives if c.name == "pp"), 0.0)
    return max(1, round(size))


def _receive(build: _Rank, slot: Slot, label: str) -> int:
    step = -1 if slot.forward else 1
    peer = _peer(build, slot, step)
    if peer < 0 or build.job.pp == 1:
        return -1
    tag = _tag(build, slot, _virtual(build, slot) + step)
    return build.transfer(f"{label} pp", RECV, peer, _size(build), [], tag)


def _send(build: _Rank, slot: Slot, label: str) -> None:
    peer = _peer(build, slot, 1 if slot.forward else -1)
    if peer < 0 or build.job.pp == 1:
        return
    after = [build.compute, *build.awaited, *build.behind]
    build.transfer(f"{label} pp", SEND, peer, _size(build), after, _tag(build, slot, _virtual(build, slot)))


def pieces_for(job: TrainingJob, found: Prediction) -> int:
    """Pieces of a pass: as many as `FINE_NODES` allows, at most one per layer."""
    if job.schedule in ("zero-bubble", "dualpipe"):
        raise UsageError(f"--chakra: {job.schedule} has no trace; use --schedule 1f1b, gpipe or interleaved")
    kinds = sum(1 for c in found.collectives if c.name in ("tp", "cp", "ep")) + 1
    passes = 2 * job.micro_batches * job.interleave * job.gpus
    if passes * (kinds + 2) > MOST_NODES:
        raise UsageError(
            f"--chakra: {job.gpus} ranks of {job.micro_batches} micro-batches are over "
            f"{MOST_NODES // 10**6} million nodes; use a smaller --global-batch (fewer micro-batches repeat "
            "the same pattern) or fewer --gpus"
        )
    layers = max(1, job.model.layers // (job.pp * job.interleave))
    fits = [n for n in range(1, layers + 1) if layers % n == 0 and passes * (n * kinds + 2) <= FINE_NODES]
    return max(fits, default=1)


def traces(job: TrainingJob, found: Prediction, groups: RankGroups) -> Iterator[tuple[int, bytes]]:
    """Each rank and the content of its file."""
    pieces = pieces_for(job, found)
    for rank in range(job.gpus):
        yield rank, encode(rank_nodes(job, found, rank, groups, pieces))


def write(folder: Path, job: TrainingJob, found: Prediction, progress: PlanProgress | None = None) -> int:
    """Write all files into a new folder, all or none; returns the number of ranks.

    The folder has `weft.N.et` for each rank N, and `comm_group.json`. ASTRA-sim reads them with
    --workload-configuration FOLDER/weft --comm-group-configuration FOLDER/comm_group.json.
    """
    pieces_for(job, found)
    partial = ""
    groups = RankGroups()
    try:
        partial = tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}.")
        for rank, data in traces(job, found, groups):
            (Path(partial) / f"{_PREFIX}.{rank}.et").write_bytes(data)
            if progress:
                progress(rank + 1, job.gpus)
        listed = {str(number): list(ranks) for ranks, number in groups.ids.items()}
        (Path(partial) / "comm_group.json").write_text(json.dumps(listed), encoding="utf-8")
        umask = os.umask(0)
        os.umask(umask)
        Path(partial).chmod(0o777 & ~umask)
        if folder.exists():
            folder.rmdir()
        Path(partial).rename(folder)
        partial = ""
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        if partial:
            shutil.rmtree(partial, ignore_errors=True)
    return job.gpus
