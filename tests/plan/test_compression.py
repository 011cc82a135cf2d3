"""Compression: bytes on the wire as in the papers, the cost of kernels, and where each method applies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import UsageError
from weft.gpu.specs import spec
from weft.plan import Network, Prediction, TrainingJob, predict
from weft.plan.compression import (
    METHODS,
    Matrix,
    Method,
    Traffic,
    apply_compression,
    check_compression,
    kept_bytes,
    parse,
)

H100 = spec("h100")
SCALE = 4 / 256
KINDS = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}

traffics = st.builds(
    Traffic,
    kind=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    purpose=st.sampled_from(["gradient", "weight", "weight-backward"]),
    elements=st.floats(1e3, 1e11),
    element_bytes=st.sampled_from([2.0, 4.0]),
    ranks=st.sampled_from([16, 32, 64, 512, 4096]),
    ranks_per_node=st.sampled_from([1, 2, 4, 8]),
    matrices=st.just((Matrix(1024, 4096, 3),)),
)
methods = st.sampled_from(
    ["none", "bf16", "fp8", "int8", "powersgd:2", "topk:0.01", "zero++", "qwz", "hpz", "qgz"]
)


def gradient(kind: str = "all_reduce", **changes) -> Traffic:
    values = {"elements": 1e9, "element_bytes": 2.0, "ranks": 64, "ranks_per_node": 8, **changes}
    return Traffic(kind, "gradient", **values)


def weight(purpose: str = "weight") -> Traffic:
    return Traffic("all_gather", purpose, 1e9, 2.0, 64, 8)


@examples(200)
@given(methods, traffics)
def test_what_replaces_a_collective_is_possible(name, traffic):
    found = apply_compression(parse(name), traffic, H100)
    assert found.pieces
    assert found.compute_s >= 0
    assert (found.compute_s > 0) == bool(found.kernels)
    for piece in found.pieces:
        assert piece.kind in KINDS
        assert piece.bytes > 0
        assert 1 <= piece.ranks_per_node <= piece.ranks <= traffic.ranks
    if not found.kernels and name != "hpz" and "zero" not in name:
        assert [(p.kind, p.bytes, p.ranks) for p in found.pieces] == [
            (traffic.kind, traffic.bytes, traffic.ranks)
        ]


@examples(100)
@given(methods, traffics)
def test_nothing_is_compressed_twice_as_large_a_job_costs_twice(name, traffic):
    method = parse(name)
    once, twice = (
        apply_compression(method, traffic, H100),
        apply_compression(
            method,
            Traffic(
                traffic.kind,
                traffic.purpose,
                2 * traffic.elements,
                traffic.element_bytes,
                traffic.ranks,
                traffic.ranks_per_node,
                tuple(Matrix(m.rows, m.columns, 2 * m.count) for m in traffic.matrices),
            ),
            H100,
        ),
    )
    assert sum(p.bytes for p in twice.pieces) == pytest.approx(
        2 * sum(p.bytes for p in once.pieces), rel=1e-6
    )
    assert twice.compute_s >= once.compute_s


def test_narrow_gradients_keep_their_collective():
    (piece,) = apply_compression(parse("bf16"), gradient(element_bytes=4.0), H100).pieces
    assert (piece.kind, piece.bytes) == ("all_reduce", 2e9)
    (piece,) = apply_compression(parse("fp8"), gradient("reduce_scatter"), H100).pieces
    assert (piece.kind, piece.bytes) == ("reduce_scatter", 1e9)
    assert apply_compression(parse("bf16"), gradient(), H100).kernels == ()


def test_int8_needs_all_to_alls_and_a_gather():
    inner, outer, gather = apply_compression(parse("int8"), gradient(), H100).pieces
    assert (inner.kind, inner.ranks, inner.bytes) == ("all_to_all", 8, pytest.approx(1e9 * (1 + SCALE)))
    assert (outer.kind, outer.ranks, outer.ranks_per_node) == ("all_to_all", 8, 1)
    assert outer.bytes == pytest.approx(1e9 * (1 + SCALE) / 8)
    assert (gather.kind, gather.ranks) == ("all_gather", 64)
    assert [p.kind for p in apply_compression(parse("int8"), gradient("reduce_scatter"), H100).pieces] == [
        "all_to_all"
    ] * 2


def test_powersgd_sends_two_thin_factors_and_what_is_no_matrix():
    traffic = gradient(elements=3 * 1024 * 4096 + 5000, matrices=(Matrix(1024, 4096, 3),))
    left, right, rest = apply_compression(parse("powersgd:4"), traffic, H100).pieces
    assert {left.kind, right.kind, rest.kind} == {"all_reduce"}
    assert left.bytes == 3 * 1024 * 4 * 2
    assert right.bytes == 3 * 4096 * 4 * 2
    assert rest.bytes == 5000 * 2


def test_powersgd_leaves_matrices_that_it_would_make_larger():
    traffic = gradient(elements=64 * 64, matrices=(Matrix(64, 64),))
    assert apply_compression(parse("powersgd:32"), traffic, H100).kernels == ()


def test_topk_grows_with_the_ranks():
    sizes = [apply_compression(parse("topk:0.01"), gradient(ranks=n), H100).pieces[0] for n in (16, 64, 256)]
    assert {piece.kind for piece in sizes} == {"all_gather"}
    assert [piece.bytes for piece in sizes] == pytest.approx([n * 1e7 * 6 for n in (16, 64, 256)])
    slow, fast = (apply_compression(parse("topk:0.01"), gradient(ranks=n), H100).compute_s for n in (256, 16))
    assert slow > fast


def test_zeropp_sends_between_nodes_what_its_paper_says():
    """Table 1 of arXiv:2306.10209: M, M, M between nodes become M/2, 0 and M/4."""
    across = 0.0
    for traffic in (weight(), weight("weight-backward"), gradient("reduce_scatter")):
        for piece in apply_compression(parse("zero++"), traffic, H100).pieces:
            if piece.ranks_per_node < piece.ranks:
                times = 8 if piece.ranks_per_node == 1 else 1  # the ranks of a node each send their part
                across += piece.bytes * times
    assert across == pytest.approx(2e9 * (0.5 + 0 + 0.25), rel=3 * SCALE)


def test_hpz_stays_in_the_node_and_keeps_a_copy():
    (piece,) = apply_compression(parse("hpz"), weight("weight-backward"), H100).pieces
    assert (piece.ranks, piece.ranks_per_node, piece.bytes) == (8, 8, 2e9)
    (forward,) = apply_compression(parse("hpz"), weight(), H100).pieces
    assert forward.ranks == 64
    assert kept_bytes(parse("hpz"), 1e9, 2.0, node=8, nodes=8) == 2e9 / 8
    assert kept_bytes(parse("hpz"), 1e9, 2.0, node=1, nodes=64) == 0
    assert kept_bytes(parse("powersgd:4"), 1e9, 4.0, node=8, nodes=8) == 4e9


def test_kernels_are_bound_by_memory():
    found = apply_compression(parse("int8"), gradient("reduce_scatter"), H100)
    moved = sum(kernel.bytes for kernel in found.kernels)
    assert found.compute_s == pytest.approx(
        moved / (0.73 * H100.memory_bytes_per_s) + 5e-6 * len(found.kernels)
    )


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        *((name, "zero1") for name in ("none", "bf16", "fp8", "int8")),
        *((name, "none") for name in ("powersgd:7", "topk:0.25")),
        *((name, "zero3") for name in ("zero++", "qwz+qgz")),
    ],
)
def test_names_go_there_and_back(name, sharding):
    assert str(parse(name)) == name
    assert parse(str(parse(name.upper()))) == parse(name)
    j = TrainingJob(model="llama3-8b", gpu="h100", gpus=8, sharding=sharding, compression=name)
    assert j.compression == parse(name)


@pytest.mark.parametrize(
    ("name", "sharding", "pp"), [("powersgd:4", "zero1", 1), ("zero++", "zero2", 1), ("zero++", "zero3", 2)]
)
def test_a_job_refuses_what_nothing_implements(name, sharding, pp):
    with pytest.raises(UsageError, match="--compression"):
        TrainingJob(model="llama3-8b", gpu="h100", gpus=8, pp=pp, sharding=sharding, compression=name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zip", "use one of"),
        ("powrsgd", "'powersgd'"),
        ("powersgd:0", "from 1 to 1024"),
        ("powersgd:x", "from 1 to 1024"),
        ("topk:2", "from 1e-06 to 1"),
        ("topk:nan", "from 1e-06 to 1"),
        ("int8:3", "no compression named"),
        ("", "use one of"),
    ],
)
def test_wrong_names_get_the_nearest(name, said):
    with pytest.raises(UsageError, match=said):
        parse(name)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("int8", {"data_ranks": 1}, "--compression none"),
        ("powersgd:4", {"sharding": "zero1"}, "--sharding none"),
        ("topk:0.1", {"sharding": "zero3"}, "--sharding none"),
        ("zero++", {"sharding": "zero1"}, "--sharding zero3"),
        ("zero++", {"sharding": "zero3", "stages": 2}, "--pp 1"),
        ("fp8", {"gpu": spec("a100")}, "int8 or bf16"),
    ],
)
def test_a_method_is_refused_where_nothing_implements_it(name, changes, said):
    with pytest.raises(UsageError, match=said):
        check_compression(
            parse(name), **{"sharding": "none", "data_ranks": 8, "stages": 1, "gpu": H100, **changes}
        )


def test_every_method_applies_somewhere():
    for name in METHODS:
        sharding = "zero3" if name in ("zero++", "qwz", "hpz", "qgz") else "none"
        check_compression(parse(name), sharding=sharding, data_ranks=8, stages=1, gpu=H100)
    check_compression(Method(), sharding="zero1", data_ranks=1, stages=4, gpu=H100)


# --- in a whole step ---------------------------------------------------------------------------------------------


def job(name: str, gpus: int = 64, gbit: float = 400, **changes) -> TrainingJob:
    sharded = name in ("zero++", "qwz", "hpz", "qgz")
    network = Network(name="test", rail_bytes_per_s=gbit * 1e9 / 8)
    values = {"tp": 1 if sharded else 2, "sharding": "zero3" if sharded else "none", **changes}
    return TrainingJob(model="llama3-8b", gpu="h100", gpus=gpus, compression=name, network=network, **values)


def step(*arguments, **changes) -> Prediction:
    return predict(job(*arguments, **changes), check_memory=False)


METHOD_NAMES = ["none", "bf16", "fp8", "int8", "powersgd:2", "topk:0.01", "zero++", "qwz", "hpz", "qgz"]


@examples(40)
@given(
    st.sampled_from(METHOD_NAMES),
    st.sampled_from([16, 128, 1024]),
    st.floats(5, 400),
    st.floats(1.0, 8.0),
    st.sampled_from([None, "auto"]),
)
def test_more_bandwidth_is_never_slower_under_any_method(name, gpus, gbit, more, policy):
    slow = step(name, gpus, gbit, policy=policy)
    fast = step(name, gpus, gbit * more, policy=policy)
    assert fast.step_s <= slow.step_s * (1 + 1e-9)


@examples(30)
@given(st.sampled_from(METHOD_NAMES), st.sampled_from([16, 256, 2048]), st.floats(5, 800))
def test_a_step_holds_its_kernels_and_its_collectives(name, gpus, gbit):
    found = step(name, gpus, gbit)
    assert found.step_s == pytest.approx(sum(found.breakdown.values()))
    assert found.step_s >= found.compute_s + found.breakdown["compression"]
    packed = str(parse(name)) not in ("none", "hpz") and not (
        name == "bf16" and found.breakdown["compression"] == 0
    )
    assert (found.breakdown["compression"] > 0) == packed


def test_what_is_sent_is_what_the_method_says():
    kinds = {c.kind for c in step("int8").collectives if c.name == "grads"}
    assert kinds == {"all_to_all", "all_gather"}
    plain, packed = (
        sum(c.bytes * c.count for c in step(name).collectives if c.name == "grads")
        for name in ("none", "fp8")
    )
    assert packed == pytest.approx(plain / 2, rel=0.01)
    near = [c for c in step("hpz").collectives if c.name == "params" and c.group.ranks == 8]
    assert near
    assert all(c.group.domains == 1 for c in near)


def test_compression_pays_where_the_network_is_slow_and_costs_where_it_is_not():
    for name in ("fp8", "int8", "powersgd:4"):
        assert step(name, gbit=10).step_s < step("none", gbit=10).step_s
    fast = {"gbit": 6400, "global_batch": 512}
    for name in ("int8", "powersgd:4", "topk:0.01"):
        assert step(name, **fast).step_s > step("none", **fast).step_s


def test_topk_loses_more_and_more_ranks():
    ratios = [step("topk:0.01", n, 100).step_s / step("none", n, 100).step_s for n in (16, 256, 4096)]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 1
