"""The committed table of versions: it fits the shim's table of intercepted functions, the code and its page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from weft.shim import communicators

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def versions():
    spec = importlib.util.spec_from_file_location("versions", ROOT / "scripts/versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(versions):
    return json.loads(versions.DATA.read_text())


def code(version):
    major, minor, patch = map(int, version.split("."))
    return major * 10000 + minor * 100 + patch


def test_the_table_has_the_versions_that_weft_speaks_of(data):
    assert [version.rpartition(".")[0] for version in data["nccl"]] == [
        f"2.{minor}" for minor in range(27, 33)
    ]
    read = {version.rpartition(".")[0] for version in data["torch"]} | set(data["not_read"])
    assert read == {f"2.{minor}" for minor in range(11, 16)}


def test_every_intercepted_function_is_in_an_nccl(versions, data):
    """A name that no NCCL has is a mistake in the table of hooks, and a new hook asks for a new reading."""
    known = {name for row in data["nccl"].values() for name in row["hooks"]}
    assert set(versions.hook_names()) == known


def test_what_is_said_to_be_not_intercepted_is_not(versions, data):
    hooks = set(versions.hook_names())
    for row in (*data["nccl"].values(), *data["torch"].values()):
        assert not hooks & set(row["not_intercepted"]), row["wheel"]


def test_every_collective_that_torch_calls_is_intercepted(data):
    for version, row in data["torch"].items():
        collectives = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclSend", "ncclRecv"}
        assert collectives <= set(row["calls"]), version


def test_the_code_expects_what_the_symbols_say(versions, data):
    for version, row in data["nccl"].items():
        way, tuner = communicators.expected_path(code(version), {})
        assert way == versions.way(row), version
        assert tuner == max(found for found in row["tuners"] if found <= 6), version


def test_no_nccl_has_a_newer_tuner_interface_than_weft(data):
    newest = max(found for row in data["nccl"].values() for found in row["tuners"])
    assert newest == max(version for _, version in communicators.TUNERS)


def test_the_page_is_the_data(versions, data):
    assert versions.PAGE.read_text() == versions.page(data)
