"""Chakra execution traces: by an independent decoder, by protobuf with the published schema, and by running them."""

from __future__ import annotations

import json
import struct
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import InputError, UsageError
from weft.plan import TrainingJob, predict
from weft.plan.chakra import COLLECTIVE, COMP, RECV, SEND, ChakraNode, encode, varint
from weft.plan.execution_trace import Place, RankGroups, members, order, pieces_for, rank_nodes, write

# --- an independent decoder: what the bytes say, field by field ------------------------------------------------


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
        shift += 7


def fields(data: bytes) -> list[tuple[int, object]]:
    found, at = [], 0
    while at < len(data):
        key, at = read_varint(data, at)
        if key & 7 == 0:
            value, at = read_varint(data, at)
        elif key & 7 == 2:
            size, at = read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        found.append((key >> 3, value))
    return found


def messages(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        size, at = read_varint(data, at)
        found.append(data[at : at + size])
        at += size
    return found


def decode(data: bytes) -> tuple[str, list[ChakraNode]]:
    head, *rest = messages(data)
    nodes = []
    for message in rest:
        plain = {tag: value for tag, value in fields(message) if tag != 10}
        attributes = {}
        for tag, value in fields(message):
            if tag == 10:
                inner = dict(fields(value))
                name = inner.pop(1).decode()
                ((kind, raw),) = inner.items()
                attributes[name] = {7: int, 9: int, 27: bool, 29: lambda b: b.decode()}[kind](raw)
        deps, at = [], 0
        packed = plain.get(5, b"")
        while at < len(packed):
            one, at = read_varint(packed, at)
            deps.append(one)
        nodes.append(
            ChakraNode(
                plain.get(1, 0),
                plain.get(2, b"").decode(),
                plain.get(3, 0),
                tuple(deps),
                plain.get(7, 0),
                attributes,
            )
        )
    return dict(fields(head))[1].decode(), nodes


nodes_lists = st.lists(
    st.builds(
        ChakraNode,
        id=st.integers(0, 2**40),
        name=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        type=st.sampled_from([COMP, SEND, RECV, COLLECTIVE]),
        after=st.lists(st.integers(0, 2**35), max_size=4).map(tuple),
        duration_us=st.integers(0, 2**50),
        attributes=st.dictionaries(
            st.text("abc_", min_size=1, max_size=8),
            st.one_of(st.booleans(), st.integers(0, 2**60), st.text("xyz0", max_size=5)),
            max_size=4,
        ),
    ),
    max_size=6,
)


@examples(100)
@given(nodes_lists)
def test_every_trace_reads_back(nodes):
    assert decode(encode(nodes)) == ("0.0.4", nodes)


@pytest.mark.parametrize(
    ("value", "data"), [(0, b"\0"), (127, b"\x7f"), (300, b"\xac\x02"), (-1, b"\xff" * 9 + b"\x01")]
)
def test_varints_are_those_of_the_format(value, data):
    assert varint(value) == data


# --- protobuf itself, with the message definitions of mlcommons/chakra et_def.proto, schema 0.0.4 ---------------


def chakra_messages():
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name, *entries):
        made = file.message_type.add(name=name)
        for number, label, kind, repeated, refers in entries:
            field = made.field.add(name=label, number=number, type=kind)
            field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if refers:
                field.type_name = f".ChakraProtoMsg.{refers}"
        return made

    attribute = message(
        "AttributeProto",
        (1, "name", kinds.TYPE_STRING, False, ""),
        (2, "doc_string", kinds.TYPE_STRING, False, ""),
        (7, "int32_val", kinds.TYPE_INT32, False, ""),
        (9, "int64_val", kinds.TYPE_INT64, False, ""),
        (27, "bool_val", kinds.TYPE_BOOL, False, ""),
        (29, "string_val", kinds.TYPE_STRING, False, ""),
    )
    attribute.oneof_decl.add(name="value")
    for field in attribute.field:
        if field.number > 2:
            field.oneof_index = 0
    message(
        "GlobalMetadata",
        (1, "version", kinds.TYPE_STRING, False, ""),
        (2, "attr", kinds.TYPE_MESSAGE, True, "AttributeProto"),
    )
    message(
        "Node",
        (1, "id", kinds.TYPE_UINT64, False, ""),
        (2, "name", kinds.TYPE_STRING, False, ""),
        (3, "type", kinds.TYPE_INT32, False, ""),
        (4, "ctrl_deps", kinds.TYPE_UINT64, True, ""),
        (5, "data_deps", kinds.TYPE_UINT64, True, ""),
        (6, "start_time_micros", kinds.TYPE_UINT64, False, ""),
        (7, "duration_micros", kinds.TYPE_UINT64, False, ""),
        (10, "attr", kinds.TYPE_MESSAGE, True, "AttributeProto"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    ]


@examples(30)
@given(nodes_lists)
def test_protobuf_reads_what_we_write_and_writes_the_same(nodes):
    metadata, node_message = chakra_messages()
    head, *rest = messages(encode(nodes))
    assert metadata.FromString(head).version == "0.0.4"
    for node, data in zip(nodes, rest, strict=True):
        read = node_message.FromString(data)
        assert (read.id, read.name, read.type) == (node.id, node.name, node.type)
        assert (tuple(read.data_deps), read.duration_micros) == (node.after, node.duration_us)
        assert {a.name: getattr(a, a.WhichOneof("value")) for a in read.attr} == node.attributes
        assert read.SerializeToString(deterministic=True) == data


# --- the step of a job: every rank's trace, run together --------------------------------------------------------

JOBS = {
    "1f1b": {"model": "llama3-8b", "gpus": 8, "tp": 2, "pp": 2, "global_batch": 8},
    "gpipe": {"model": "llama3-8b", "gpus": 8, "pp": 4, "schedule": "gpipe", "global_batch": 8},
    "interleaved": {"model": "llama3-8b", "gpus": 8, "pp": 4, "interleave": 2, "global_batch": 16},
    "context": {"model": "llama3-8b", "gpus": 8, "tp": 2, "cp": 2, "global_batch": 4},
    "experts": {"model": "mixtral-8x7b", "gpus": 16, "ep": 8, "sharding": "zero3"},
    "zero++": {"model": "llama3-8b", "gpus": 16, "sharding": "zero3", "compression": "zero++"},
    "tied": {"model": "gpt-7.5b", "gpus": 16, "tp": 2, "pp": 4, "global_batch": 8},
    "int8": {"model": "llama3-8b", "gpus": 16, "tp": 2, "sharding": "none", "compression": "int8"},
}


def made(name: str):
    job = TrainingJob(gpu="h100", **JOBS[name])
    found = predict(job, check_memory=False)
    groups = RankGroups()
    pieces = pieces_for(job, found)
    ranks = [rank_nodes(job, found, rank, groups, min(pieces, 4)) for rank in range(job.gpus)]
    return job, found, groups, ranks


def run(job: TrainingJob, groups: RankGroups, ranks: list[list[ChakraNode]]) -> None:
    """Start nodes as they become ready: a collective with all its ranks, a transfer with both its ends."""
    members = {str(number): set(who) for who, number in groups.ids.items()} | {"": set(range(job.gpus))}
    done = [set() for _ in ranks]
    left = [list(nodes) for nodes in ranks]
    arrived = defaultdict(list)
    ends = defaultdict(dict)
    order_in_group = defaultdict(int)
    moved = True
    while moved and any(left):
        moved = False
        for rank, nodes in enumerate(left):
            for node in list(nodes):
                if not set(node.after) <= done[rank]:
                    continue
                a = node.attributes
                if node.type == COMP:
                    done[rank].add(node.id)
                elif node.type == COLLECTIVE:
                    # Collectives of a group match in the order in which each rank starts them.
                    key = (a.get("pg_name", ""), order_in_group[rank, a.get("pg_name", "")])
                    order_in_group[rank, a.get("pg_name", "")] += 1
                    arrived[key].append((rank, node.id, a["comm_type"], a["comm_size"]))
                    assert rank in members[a.get("pg_name", "")]
                    if len(arrived[key]) == len(members[a.get("pg_name", "")]):
                        assert len({entry[2:] for entry in arrived[key]}) == 1, arrived[key]
                        for member, number, *_ in arrived[key]:
                            done[member].add(number)
                else:
                    key = (a["comm_src"], a["comm_dst"], a["comm_tag"])
                    end = "send" if node.type == SEND else "receive"
                    assert end not in ends[key], key
                    assert rank == (a["comm_src"] if end == "send" else a["comm_dst"])
                    ends[key][end] = (rank, node.id, a["comm_size"])
                    if len(ends[key]) == 2:
                        assert ends[key]["send"][2] == ends[key]["receive"][2]
                        for member, number, _ in ends[key].values():
                            done[member].add(number)
                nodes.remove(node)
                moved = True
    assert [len(d) for d in done] == [len(nodes) for nodes in ranks], "deadlock"


@pytest.mark.parametrize("name", JOBS)
def test_all_ranks_run_to_the_end_together(name):
    job, _, groups, ranks = made(name)
    run(job, groups, ranks)


@pytest.mark.parametrize("name", JOBS)
def test_a_rank_computes_and_sends_what_was_predicted(name):
    job, found, groups, ranks = made(name)
    members = {str(number): len(who) for who, number in groups.ids.items()} | {"": job.gpus}
    busy = sum(
        found.breakdown[k]
        for k in ("gemm", "attention", "elementwise", "recompute", "overhead", "contention")
    )
    busy += sum(found.breakdown.get(k, 0.0) for k in ("compression", "optimizer"))
    for rank, nodes in enumerate(ranks):
        compute = sum(node.duration_us for node in nodes if node.type == COMP)
        assert compute == pytest.approx(1e6 * busy, rel=1e-3, abs=len(nodes))
        sent = sum(
            node.attributes["comm_size"]
            * (members[node.attributes.get("pg_name", "")] if node.attributes["comm_type"] == 2 else 1)
            for node in nodes
            if node.type == COLLECTIVE
        )
        stage = Place.of(rank, job).pp
        wanted = sum(
            c.bytes * c.count
            for c in found.collectives
            if c.kind != "p2p" and (c.group.span < job.gpus or job.pp == 1 or stage in (0, job.pp - 1))
        )
        assert sent == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved"])
def test_each_stage_runs_every_micro_batch_once_each_way(name):
    job = TrainingJob(gpu="h100", **JOBS[name])
    for stage in range(job.pp):
        slots = order(job, stage)
        assert len(slots) == len(set(slots)) == 2 * job.micro_batches * job.interleave
        for slot in slots:
            if not slot.forward:
                ahead = slots.index(type(slot)(True, slot.chunk, slot.micro_batch))
                assert ahead < slots.index(slot)


def test_places_go_there_and_back():
    job = TrainingJob(model="llama3-8b", gpu="h100", gpus=64, tp=2, pp=4, cp=2)
    assert [Place.of(rank, job).rank(job) for rank in range(64)] == list(range(64))


def test_a_folder_is_written_whole(tmp_path):
    job = TrainingJob(gpu="h100", **JOBS["1f1b"])
    found = predict(job)
    folder = tmp_path / "traces"
    assert write(folder, job, found) == 8
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted([*(f"weft.{rank}.et" for rank in range(8)), "comm_group.json"])
    groups = json.loads((folder / "comm_group.json").read_text())
    for rank in range(8):
        _, nodes = decode((folder / f"weft.{rank}.et").read_bytes())
        for node in nodes:
            if node.type == COLLECTIVE and "pg_name" in node.attributes:
                assert rank in groups[node.attributes["pg_name"]]
                assert len(groups[node.attributes["pg_name"]]) < job.gpus
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_nothing_is_left_where_writing_fails(tmp_path):
    job = TrainingJob(gpu="h100", **JOBS["1f1b"])
    found = predict(job)
    (tmp_path / "file").write_text("here first")
    with pytest.raises(InputError, match="cannot write"):
        write(tmp_path / "file", job, found)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_too_many_nodes_are_refused_with_a_way_out():
    job = TrainingJob(model="llama3-8b", gpu="h100", gpus=16384, tp=1, pp=4, global_batch=4096 * 256)
    with pytest.raises(UsageError, match="smaller --global-batch"):
        pieces_for(job, predict(job, check_memory=False))


def test_a_stage_runs_ahead_by_the_stages_after_it():
    job = TrainingJob(gpu="h100", **{**JOBS["gpipe"], "schedule": "1f1b"})
    for stage in range(job.pp):
        slots = order(job, stage)
        first_backward = next(i for i, slot in enumerate(slots) if not slot.forward)
        assert first_backward == min(job.micro_batches, job.pp - stage)


@pytest.mark.parametrize("name", JOBS)
def test_groups_are_as_large_as_predicted_and_split_the_ranks(name):
    job, found, _, _ = made(name)
    for one in found.collectives:
        if one.kind == "p2p":
            continue
        seen = set()
        for rank in range(job.gpus):
            place = Place.of(rank, job)
            if one.group.span == job.gpus and job.pp > 1 and place.pp not in (0, job.pp - 1):
                continue
            ranks = members(one, place, job)
            assert rank in ranks
            assert len(ranks) == one.group.ranks
            assert all(members(one, Place.of(other, job), job) == ranks for other in ranks)
            seen.add(ranks)
        assert sum(map(len, seen)) == len({rank for ranks in seen for rank in ranks})


def test_ranks_of_different_nodes_meet_one_of_each():
    job, found, _, _ = made("zero++")
    (across,) = [c for c in found.collectives if c.group.per_domain == 1 and c.group.ranks == 2]
    assert members(across, Place.of(3, job), job) == (3, 11)


def fields_of(node: ChakraNode) -> dict[str, int]:
    """The AttributeProto field number of each attribute of a node."""
    found = {}
    data = encode([node])
    for name in node.attributes:
        at = data.index(name.encode()) + len(name)
        key = shift = 0
        while True:
            byte = data[at]
            key |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        found[name] = key >> 3
    return found


def test_attributes_are_where_old_and_new_feeders_read_them():
    """Chakra's first feeder reads only int32_val (7) for ends and tags, int64_val (9) for sizes and types;
    later ones read any integer. A group of all ranks has no name in either."""
    _, _, _, ranks = made("1f1b")
    kinds = {}
    for node in (node for nodes in ranks for node in nodes):
        kinds |= fields_of(node)
    wanted = {"comm_src": 7, "comm_dst": 7, "comm_tag": 7, "comm_size": 9, "comm_type": 9}
    assert {name: kinds[name] for name in wanted} == wanted
    assert kinds["is_cpu_op"] == 27
    assert kinds.get("pg_name", 29) == 29
    for node in (node for nodes in ranks for node in nodes):
        assert all(value < 2**31 for name, value in node.attributes.items() if kinds[name] == 7)


@pytest.mark.parametrize("schedule", ["zero-bubble", "dualpipe"])
def test_a_schedule_that_has_no_trace_is_refused(tmp_path, schedule):
    job = TrainingJob(gpu="h100", **{**JOBS["1f1b"], "schedule": schedule})
    with pytest.raises(UsageError, match="1f1b"):
        write(tmp_path / "traces", job, predict(job, check_memory=False))
