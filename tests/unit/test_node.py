"""Node profiles: their predictions for a collective, their files, and the model behind them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_checks import problems

from properties import examples
from weft.comm.node import NODE_COLLECTIVES, Node, load_node
from weft.comm.node_curve import TimeCurve, interpolate_us
from weft.comm.node_file import node_from_dict, node_to_dict, shipped_nodes
from weft.comm.node_kernel import memory_traffic
from weft.errors import InputError, UsageError
from weft.gpu.collectives import collective_s, group
from weft.gpu.cost import link_bytes_per_s
from weft.gpu.network import LINKS, NETWORKS
from weft.gpu.specs import spec
from weft.report.node import node_line

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
NODES = [load_node(name) for name in shipped_nodes()]
nodes = st.sampled_from(NODES)
kinds = st.sampled_from(NODE_COLLECTIVES)
sizes = st.integers(1, 8 << 30)


@given(nodes, kinds, sizes, st.integers(1, 40), st.integers(1, 40))
@examples(80)
def test_more_ctas_never_make_a_collective_slower(node, kind, size, one, other):
    fewer, more = sorted((one, other))
    slow, fast = node.collective(kind, size, fewer), node.collective(kind, size, more)
    assert fast.us <= slow.us * (1 + 1e-9)
    assert slow.ctas <= fast.ctas <= more
    assert slow.ctas <= fewer
    assert node.collective(kind, size).us <= fast.us * (1 + 1e-9)
    assert slow.ctas % slow.cluster == 0


@given(nodes, kinds, sizes, sizes, st.none() | st.integers(1, 40))
@examples(80)
def test_more_bytes_never_make_it_faster_and_the_range_includes_it(node, kind, one, other, ctas):
    small, large = sorted((one, other))
    assert node.collective(kind, small).us <= node.collective(kind, large).us * (1 + 1e-9)
    low, high = node.range(kind, large, ctas)
    assert 0 < low <= node.collective(kind, large, ctas).us <= high


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_no_bytes_take_no_time(node):
    """Holds for curves with points, which begin at a start-up time, and for fewer ranks than the node's."""
    for kind in NODE_COLLECTIVES:
        for ranks in (2, node.ranks):
            assert node.collective(kind, 0, ranks=ranks).us == 0, kind
            assert node.range(kind, 0, ranks=ranks) == (0, 0), kind


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_no_size_takes_less_time_than_a_smaller_one(node):
    """Also where the points are of fewer ranks than the node has: the ratio of the model falls with size."""
    sizes = sorted({*range(1, 20), *(round(1.2**n) for n in range(16, 110))})
    for kind in NODE_COLLECTIVES:
        times = [node.collective(kind, size).us for size in sizes]
        assert all(less <= more * (1 + 1e-9) for less, more in pairwise(times)), kind


@pytest.mark.parametrize("name", ["dgx-h100", "mi300x", "dgx-a100-2"])
def test_algorithms_and_ranks(name):
    node = load_node(name)
    whole, half = node.collective("all_gather", 64 * MIB), node.collective("all_gather", 64 * MIB, ranks=4)
    assert half.us < whole.us
    ring = node.collective("all_reduce", 256 * MIB, algorithm="ring")
    assert ring.algorithm == "ring"
    assert ring.us >= node.collective("all_reduce", 256 * MIB).us * 0.95
    both = [
        node.collective(kind, 256 * MIB, algorithm="ring").us for kind in ("all_gather", "reduce_scatter")
    ]
    assert ring.us == pytest.approx(sum(both), rel=0.25)


def test_a_switch_reduces_with_its_own_ctas_and_small_messages_take_few():
    node = load_node("dgx-h100")
    assert (
        node.collective("all_reduce", 64 * MIB).algorithm,
        node.collective("all_reduce", 64 * MIB).ctas,
    ) == (
        "nvls",
        16,
    )
    assert node.collective("all_gather", 64 * MIB).ctas == 24
    assert node.collective("all_gather", 100_000).ctas == 3  # one for each 32 KiB
    assert node.collective("all_gather", 64 * MIB, 10).cluster == 1  # 10 is not divisible by 4
    assert node.collective("all_gather", 64 * MIB).cluster == 4


def test_bytes_through_memory_are_conserved():
    """All ranks together write into their buffers what all ranks send."""
    n, size = 8, 64 * MIB
    for kind, results in (("all_gather", size), ("reduce_scatter", size / n), ("all_to_all", size)):
        _, written = memory_traffic(kind, size, n, "ring")
        assert written == pytest.approx(size * (n - 1) / n + results)
    read, written = memory_traffic("all_reduce", size, n, "ring")
    pair = [memory_traffic(kind, size, n, "ring") for kind in ("reduce_scatter", "all_gather")]
    # The chunk that a rank has reduced stays in registers between the two halves.
    assert read == pytest.approx(sum(one[0] for one in pair) - size / n)
    assert written == pytest.approx(sum(one[1] for one in pair) - size / n)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [8, 32])
def test_plans_and_nodes_have_one_model(kind, ranks):
    gpu, network = spec("h100"), NETWORKS["ndr400"]
    constants = {
        "launch_us": LINKS.launch_us,
        "hop_us": LINKS.domain_us,
        "gb_s": link_bytes_per_s(gpu) / 1e9,
        "switch_gain": LINKS.switch_gain,
        "half_bytes": LINKS.half_bytes,
    }
    node = replace(load_node("dgx-h100-4"), constants=constants, curves=())
    planned = collective_s(kind, 64 * MIB, group(ranks, 1, network), gpu, network, LINKS)
    assert node.collective(kind, 64 * MIB, ranks=ranks).us == pytest.approx(1e6 * planned)


def test_errors_are_those_that_the_benchmark_recorded():
    recorded = json.loads((ROOT / "benchmarks/results/node/fit.json").read_text())
    hopper = {
        (line["collective"], line["algorithm"]): line
        for line in recorded["curves"]
        if line["family"] == "hopper"
    }
    node = load_node("dgx-h100")
    assert len(hopper) == len(node.curves) > 6
    for curve in node.curves:
        line = hopper[curve.collective, curve.algorithm]
        assert (curve.error_pct, dict(curve.constants)) == (line["error_pct"], line["constants"])
        assert len(curve.sources) == line["sources"]
        assert (curve.error_pct is None) == (line["sources"] == 1)
    assert all(line["steps"] <= 1 for line in recorded["ctas"])


def test_an_error_holds_for_the_ranks_and_sizes_that_it_was_found_with():
    """Beyond them the range is that of an unknown error."""
    node = load_node("dgx-h100")
    curve = node.curve("all_reduce")
    assert node.collective("all_reduce", 256 * MIB).error_pct == curve.error_pct
    largest = curve.points[-1][0]
    for nbytes, ranks in ((256 * MIB, 4), (256 * MIB, 16), (2 * largest, 8), (8, 8)):
        part = node.collective("all_reduce", nbytes, ranks=ranks)
        assert part.error_pct is None
        low, high = node.range("all_reduce", nbytes, ranks=ranks)
        assert high / part.us == pytest.approx(1 + node.assumed_pct / 100) == part.us / low


def test_a_job_has_no_more_ranks_than_a_node_without_a_network():
    assert load_node("dgx-h100").world() == 8
    assert load_node("dgx-h100").world(3) == 3
    assert load_node("dgx-h100-2").world(64) == 64
    with pytest.raises(UsageError, match="9 ranks: dgx-h100 has 8"):
        load_node("dgx-h100").world(9)


def test_what_nobody_published_says_assumed_and_gives_a_range():
    node = load_node("pcie-a40")
    part = node.collective("all_gather", 64 * MIB)
    assert (node.basis, part.basis, part.error_pct) == ("assumed", "assumed", None)
    low, high = node.range("all_gather", 64 * MIB)
    assert high / low > 1.4
    hopper = load_node("dgx-h100")
    assert hopper.collective("all_reduce", 64 * MIB).basis == "published"
    assert hopper.collective("all_reduce", 64 * MIB, algorithm="nvls").basis == "published"
    assert hopper.collective("all_reduce", 64 * MIB, algorithm="tree").basis == "assumed"
    assert hopper.collective("all_reduce", 64 * MIB, 4).basis == "assumed"  # no results with fewer CTAs
    assert hopper.collective("all_gather", 64 * MIB, 4).basis == "published"


def test_copy_engines_take_no_ctas_and_do_not_reduce():
    node = load_node("dgx-h100")
    part = node.copied("all_gather", 512 * MIB)
    assert (part.ctas, part.threads, part.algorithm, part.basis) == (0, 0, "copy", "published")
    assert part.us == pytest.approx(node.collective("all_gather", 512 * MIB).us, rel=0.1)
    for other, kind, ranks in ((node, "all_reduce", 8), (load_node("dgx-h100-2"), "all_gather", 16)):
        with pytest.raises(UsageError, match="no form by copy engines"):
            other.copied(kind, MIB, ranks)
    with pytest.raises(UsageError, match="no form by copy engines"):
        load_node("pcie-8").copied("all_gather", MIB)


measured = st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0.1, 1e9)), min_size=1, max_size=12)


@given(measured, sizes, sizes)
@examples(80)
def test_interpolation_is_monotone_and_exact_where_times_rise(found, one, other):
    points = tuple(sorted(dict(found).items()))
    small, large = sorted((one, other))
    assert interpolate_us(points, small) <= interpolate_us(points, large) * (1 + 1e-9)
    rising = tuple(
        (size, us) for i, (size, us) in enumerate(points) if us >= max(t for _, t in points[: i + 1])
    )
    for size, us in rising:
        assert interpolate_us(rising, size) == pytest.approx(us)


def test_measured_points_take_the_place_of_the_model():
    points = ((MIB, 50.0), (16 * MIB, 125.0), (64 * MIB, 500.0))
    node = replace(load_node("dgx-h100"), curves=(TimeCurve("all_gather", 8, "measured", points=points),))
    assert node.collective("all_gather", 64 * MIB).us == pytest.approx(500)
    assert node.collective("all_gather", 32 * MIB).us == pytest.approx(250)  # in the logarithms
    assert node.collective("all_gather", 4 * MIB).us == pytest.approx(50 + 75 * 3 / 15)  # start and bandwidth
    assert 1.3 * 500 < node.collective("all_gather", 64 * MIB, 4).us < 1.4 * 500  # 4 CTAs of 21.7 GB/s
    assert node.collective("all_gather", 64 * MIB, ranks=4).us < 500
    assert node.collective("all_gather", 64 * MIB).basis == "measured"


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_a_profile_is_valid_and_its_own_document(node):
    document = node_to_dict(node)
    assert problems("node", document) == []
    assert node_from_dict(json.loads(json.dumps(document))) == node
    assert problems("node-list", {"version": 1, "nodes": [node_line(node)]}) == []


def test_a_name_that_is_not_there_lists_those_that_are():
    with pytest.raises(UsageError, match="dgx-h100, .*weft node import"):
        load_node("dgx")
    with pytest.raises(InputError, match="cannot read node /nowhere/x.json: No such file"):
        load_node("/nowhere/x.json")


@pytest.mark.parametrize("key", ["ranks", "launch_us"])
def test_a_key_that_is_there_twice_is_refused(key, tmp_path):
    path = tmp_path / "node.json"
    text = json.dumps(broken())
    path.write_text(text.replace(f'"{key}":', f'"{key}": 4, "{key}":', 1))
    with pytest.raises(InputError, match=f"^node {path}: duplicate key '{key}'; remove one$"):
        load_node(str(path))


def test_texts_of_a_profile_cannot_control_a_terminal(tmp_path):
    path = tmp_path / "node.json"
    hostile = "a\x1b[2Jb\nc\u202ed\ud800"
    path.write_text(json.dumps({**broken(name=hostile, title=hostile), "sources": [hostile]}))
    node = load_node(str(path))
    assert {node.name, node.title, *node.sources} == {"a [2Jb c d "}


def broken(**changes: object) -> dict[str, object]:
    document = copy.deepcopy(node_to_dict(load_node("dgx-h100")))
    for path, value in changes.items():
        home, *rest = path.split("__")
        place = document
        for key in (home, *rest)[:-1]:
            place = place[key]
        place[(home, *rest)[-1]] = value
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "a node is a JSON object"),
        ({}, "node version None is not known"),
        (broken(version=2), "version 2 is not known"),
        (broken(version=True), "version True is not known"),
        (broken(surprise=1), "unknown key 'surprise'"),
        (broken(ranks=1), "ranks 1 is not valid"),
        (broken(ranks="8"), "ranks '8' is not valid"),
        (broken(gpu=""), "gpu '' is not valid"),
        (broken(network="net"), "network 'net' is not known"),
        (broken(network=[]), "network [] is not known".replace("[", r"\[")),
        (broken(basis="x" * 100_000), "basis 'xxx"),
        (broken(kernel={}), "kernel: threads is missing"),
        (broken(kernel__threads={"tree": 640}), "threads: ring is missing"),
        (broken(kernel__shared_bytes=-1), "shared_bytes -1"),
        (broken(ctas__ring=0), "ring 0 is not valid"),
        (broken(cta_rates__ring={"gb_s": 50, "low": 1, "high": 2}), "is not between"),
        (broken(constants__gb_s=float("nan")), "gb_s nan is not valid"),
        (broken(constants__gb_s=0), "gb_s 0 is not valid"),
        (broken(curves=[{"collective": "gather", "ranks": 8, "basis": "measured"}]), "collective 'gather'"),
        (broken(curves=[1]), "curves: each is a JSON object"),
        (
            broken(
                curves=[{"collective": "reduce", "ranks": 8, "basis": "measured", "points": [[2, 1], [1, 2]]}]
            ),
            "not in order",
        ),
        (
            broken(curves=[{"collective": "reduce", "ranks": 8, "basis": "measured", "points": [[2]]}]),
            "point",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_node_is_refused_in_one_line(document, words, tmp_path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as refused:
        load_node(str(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_profiles_need_only_the_standard_library():
    code = (
        "import sys; from weft.comm.node import load_node; load_node('dgx-h100').collective('reduce', 99);"
        "print([m for m in ('numpy', 'torch', 'msgspec', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gather", 1), "collective 'gather' is not known"),
        (("reduce", -1), "-1 bytes"),
        (("reduce", 1, 0), "0 CTAs"),
        (("reduce", 1, None, 1), "ranks 1"),
        (("reduce", 1, None, None, "star"), "algorithm 'star': reduce on dgx-a100 has ring"),
        (("all_reduce", 1, None, None, "nvls"), "has ring and tree"),
        (("all_to_all", 1, None, None, "ring"), "has p2p"),
    ],
)
def test_impossible_questions_are_refused(arguments, words):
    node: Node = NODES[0]
    with pytest.raises(UsageError, match=words):
        node.collective(*arguments)
