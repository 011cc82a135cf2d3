"""The store of verdicts: lookups, stale entries, many writers at once, and every kind of bad file."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from properties import examples
from weft.errors import UsageError
from weft.policy import Policy, Rule
from weft.tuning import entry
from weft.tuning import store as module
from weft.tuning.store import Entry, Key, Store, StoreError, default_path

KEY = Key("NVIDIA H200", "580.159.04", "2.32.3", "2.11.0", "cb-ar")
POLICY = Policy(priority="high", head_start_us=5.0, rules=(Rule("*gemm*", 3), Rule("*norm*", None)))
VERDICT = {"text": "priority: 12.3% less time", "gain_pct": 12.3, "gain_ci_pct": [11.0, 13.5]}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "data" / "verdicts.sqlite", timeout_s=0.3)


def test_what_was_put_comes_back(store):
    assert store.get(KEY) is None
    assert not store.path.parent.exists()  # a lookup creates no file
    before = time.time()
    store.put(KEY, POLICY, VERDICT)
    found = Store(store.path).get(KEY)
    assert (found.key, found.policy, found.verdict) == (KEY, POLICY, VERDICT)
    assert before <= found.made <= time.time()
    assert found.weft == weft.__version__
    assert not found.stale


def test_the_last_one_put_is_the_one_that_is_there(store):
    store.put(KEY, POLICY, VERDICT)
    store.put(KEY, Policy(), {"text": "leave it alone"})
    assert [entry.policy for entry in store.entries()] == [Policy()]


@pytest.mark.parametrize("part", ["gpu", "driver", "nccl", "torch", "workload"])
def test_another_machine_or_version_is_another_key(store, part):
    store.put(KEY, POLICY, VERDICT)
    assert store.get(Key(**{**KEY.__dict__, part: "another"})) is None


def test_entries_are_newest_first_and_can_be_removed(store):
    other = Key("a", "b", "c", "d", "e")
    store.put(KEY, POLICY, VERDICT)
    store.put(other, Policy(), {})
    assert [entry.key for entry in store.entries()] == [other, KEY]
    assert store.remove(other)
    assert not store.remove(other)
    assert store.clear() == 1
    assert store.entries() == []


def test_old_foreign_and_future_entries_are_stale():
    now = time.time()

    def stale(made=now, version=weft.__version__):
        return Entry(KEY, POLICY, {}, made, version).stale

    major, minor, *_ = weft.__version__.split(".")
    assert not stale()
    assert not stale(version=f"{major}.{minor}.99")
    assert stale(version=f"{major}.{int(minor) + 1}.0")
    assert stale(version="1")
    assert not stale(made=now - 29 * 86400)
    assert stale(made=now - 31 * 86400)
    assert stale(made=now + 2 * 86400)


def test_the_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"
    monkeypatch.delenv("WEFT_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Store().path == tmp_path / "weft" / "verdicts.sqlite"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # the XDG specification: ignore relative paths
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".local" / "share" / "weft" / "verdicts.sqlite"


def test_write_ahead_logging_on_a_local_disk_only(store, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_local", lambda path: True)
    store.put(KEY, POLICY, VERDICT)
    with sqlite3.connect(store.path) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()
    monkeypatch.setattr(module, "_local", lambda path: False)
    shared = Store(tmp_path / "shared.sqlite")
    shared.put(KEY, POLICY, VERDICT)
    with sqlite3.connect(shared.path) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    db.close()


WRITER = """
import sys
from weft.policy import Policy
from weft.tuning.store import Key, Store
store, number = Store(sys.argv[1], timeout_s=60), int(sys.argv[2])
for turn in range(15):
    store.put(Key("g", "d", "n", "t", f"own {number}"), Policy(max_ctas=turn + 1), {"turn": turn})
    store.put(Key("g", "d", "n", "t", "shared"), Policy(max_ctas=number + 1), {"by": number, "turn": turn})
    found = store.get(Key("g", "d", "n", "t", "shared"))
    assert found.policy.max_ctas == found.verdict["by"] + 1, found
"""


def test_many_processes_write_at_once(tmp_path):
    path = tmp_path / "new" / "verdicts.sqlite"  # created by the first writer
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", WRITER, path, str(n)], stderr=subprocess.PIPE)
            )
            for n in range(6)
        ]
        for writer in writers:
            _, error = writer.communicate(timeout=110)
            assert writer.returncode == 0, error.decode()
    found = {entry.key.workload: entry for entry in Store(path).entries()}
    assert set(found) == {"shared", *(f"own {n}" for n in range(6))}
    assert all(found[f"own {n}"].policy.max_ctas == 15 for n in range(6))


def test_a_writer_waits_for_its_turn(store):
    store.put(KEY, POLICY, VERDICT)
    store.timeout_s = 60
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    end = threading.Timer(0.3, other.rollback)
    end.start()
    store.put(KEY, Policy(), {})
    end.join()
    assert store.get(KEY).policy == Policy()
    other.close()


def one_line(caught):
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_locked_store_is_said_and_left(store):
    store.put(KEY, POLICY, VERDICT)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    for act in (lambda: store.put(KEY, POLICY, VERDICT), lambda: store.remove(KEY)):
        with pytest.raises(StoreError, match="locked") as caught:
            act()
        assert str(store.path) in one_line(caught)
    other.close()
    assert store.get(KEY).policy == POLICY


@pytest.mark.parametrize("content", [b"not a database, but long enough to be read as one" * 40, b"x"])
def test_a_damaged_file_is_left_as_it_is(store, content):
    store.path.parent.mkdir()
    store.path.write_bytes(content)
    for act in (store.entries, lambda: store.get(KEY), lambda: store.put(KEY, POLICY, {}), store.clear):
        with pytest.raises(StoreError, match="damaged.*move it away") as caught:
            act()
        one_line(caught)
    assert store.path.read_bytes() == content
    assert list(store.path.parent.iterdir()) == [store.path]


def test_a_page_that_was_overwritten(store):
    for number in range(40):
        store.put(Key("g", "d", "n", "t", str(number)), POLICY, {"filler": "x" * 2000})
    with sqlite3.connect(store.path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    db.close()
    data = bytearray(store.path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    store.path.write_bytes(data)
    with pytest.raises(StoreError, match=r"verdicts\.sqlite: damaged"):
        store.entries()


def test_an_entry_that_was_tampered_with(store):
    store.put(KEY, POLICY, VERDICT)
    for column, value in (
        ("policy", '{"version": 1, "comm": {"priority": "immense"}}'),
        ("verdict", "[" * 90000),
        ("made", "x"),
    ):
        with sqlite3.connect(store.path) as db:
            db.execute(f"UPDATE verdicts SET {column} = ?", (value,))
        db.close()
        with pytest.raises(StoreError, match="damaged") as caught:
            store.get(KEY)
        one_line(caught)
        store.clear()
        store.put(KEY, POLICY, VERDICT)
    assert store.get(KEY).policy == POLICY


def test_a_newer_schema_and_a_foreign_database_are_not_touched(store, tmp_path):
    store.put(KEY, POLICY, VERDICT)
    with sqlite3.connect(store.path) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(StoreError, match="schema 3 is not known"):
        store.get(KEY)
    with pytest.raises(StoreError, match="update weft"):
        store.put(KEY, POLICY, VERDICT)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE verdicts (x)")
    db.close()
    before = foreign.read_bytes()
    for act in (Store(foreign).entries, lambda: Store(foreign).put(KEY, POLICY, VERDICT)):
        with pytest.raises(StoreError, match="another program"):
            act()
    assert foreign.read_bytes() == before


def test_an_empty_file_is_an_empty_store(store):
    store.path.parent.mkdir()
    store.path.touch()
    assert store.entries() == []
    store.put(KEY, POLICY, VERDICT)
    assert len(store.entries()) == 1


def test_a_folder_in_its_place_and_a_file_in_its_folders_place(tmp_path):
    with pytest.raises(StoreError, match="this is a folder"):
        Store(tmp_path).get(KEY)
    with pytest.raises(StoreError, match="this is a folder"):
        Store(tmp_path).put(KEY, POLICY, VERDICT)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="this is not a file"):
        Store(tmp_path / "pipe").get(KEY)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/verdicts.sqlite: .*WEFT_STORE"):
        Store(tmp_path / "file" / "verdicts.sqlite").put(KEY, POLICY, VERDICT)
    with pytest.raises(StoreError, match="File name too long"):
        Store(tmp_path / ("x" * 300)).get(KEY)


def test_a_full_disk(store, monkeypatch):
    store.put(KEY, POLICY, VERDICT)
    connect = Store._connect

    def small(self, write):
        db = connect(self, write)
        db.execute("PRAGMA max_page_count = 4")
        return db

    monkeypatch.setattr(Store, "_connect", small)
    with pytest.raises(StoreError, match="no space left"):
        store.put(KEY, POLICY, {"filler": "x" * 100_000})
    assert store.get(KEY).verdict == VERDICT


READ_ONLY = """
import os, sys
from pathlib import Path
from weft.policy import Policy
from weft.tuning.store import Key, Store, StoreError
path = Path(sys.argv[1])
os.setgid(65534)
os.setuid(65534)
key = Key("g", "d", "n", "t", "w")
assert Store(path).get(key).policy == Policy(max_ctas=4)
try:
    Store(path).put(key, Policy(), {})
except StoreError as error:
    assert "cannot be opened or written" in str(error), error
else:
    raise SystemExit("written")
"""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_store_of_somebody_else_can_be_read():
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        store = Store(folder / "verdicts.sqlite")
        store.put(Key("g", "d", "n", "t", "w"), Policy(max_ctas=4), {})
        folder.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", READ_ONLY, store.path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_export_and_import(store, tmp_path):
    store.put(KEY, POLICY, VERDICT)
    document = json.loads(json.dumps(store.export()))
    other = Store(tmp_path / "other.sqlite")
    assert other.import_(document) == 1
    assert other.import_(document) == 0
    assert other.entries() == store.entries()
    other.put(KEY, Policy(), {})
    assert other.import_(document) == 0  # the newer one stays
    assert other.get(KEY).policy == Policy()
    document["entries"][0]["made"] = time.time() + 10
    assert other.import_(document) == 1
    assert other.get(KEY).policy == POLICY


def an_entry(**changes):
    return {**Entry(KEY, POLICY, VERDICT, 1e9, "0.1.0").to_dict(), **changes}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "not an export"),
        ({"version": 1}, "not an export"),
        ({"kind": "weft verdicts", "version": 2, "entries": []}, "version '2' is not known"),
        ({"kind": "weft verdicts", "version": 1, "entries": {}}, "must be a list"),
        ({"kind": "weft verdicts", "version": 1, "entries": [None] * 10_001}, "at most 10000"),
        (
            {"kind": "weft verdicts", "version": 1, "entries": [an_entry(), {}]},
            "entry 1: an entry is an object",
        ),
        ({"kind": "weft verdicts", "version": 1, "entries": [an_entry(gpu="")]}, "gpu must be printable"),
        ({"kind": "weft verdicts", "version": 1, "entries": [an_entry(workload="a\nb")]}, "workload must be"),
        ({"kind": "weft verdicts", "version": 1, "entries": [an_entry(nccl="x" * 5000)]}, "nccl must be"),
        ({"kind": "weft verdicts", "version": 1, "entries": [an_entry(torch=7)]}, "torch must be"),
        (
            {"kind": "weft verdicts", "version": 1, "entries": [an_entry(policy={"version": 1, "x": 1})]},
            "unknown key 'x'",
        ),
        ({"kind": "weft verdicts", "version": 1, "entries": [an_entry(made=True)]}, "not a time"),
        ({"kind": "weft verdicts", "version": 1, "entries": [an_entry(made=float("nan"))]}, "not a time"),
        ({"kind": "weft verdicts", "version": 1, "entries": [an_entry(weft="")]}, "not a version"),
        (
            {"kind": "weft verdicts", "version": 1, "entries": [an_entry(verdict=[])]},
            "verdict must be an object",
        ),
        (
            {"kind": "weft verdicts", "version": 1, "entries": [an_entry(verdict={"x": "y" * (1 << 20)})]},
            "at most 1048576",
        ),
    ],
)
def test_an_import_that_is_no_export_changes_nothing(store, document, said):
    with pytest.raises(UsageError, match=said) as caught:
        store.import_(document)
    assert len(one_line(caught)) < 400
    assert not store.path.exists()


@examples()
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: (
            st.lists(x) | st.dictionaries(st.sampled_from(["kind", "version", "entries", "gpu", "policy"]), x)
        ),
    )
)
def test_no_document_breaks_the_import(document):
    with pytest.raises(UsageError):
        module._document(document)


def test_a_verdict_without_json_is_refused(store):
    for verdict in ({"x": object()}, {"x": float("nan")}, {"x": "y" * (1 << 20)}):
        with pytest.raises(StoreError, match="verdict"):
            store.put(KEY, POLICY, verdict)
    assert not store.path.exists()


def test_the_key_of_this_process_without_a_gpu(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.here("step") == Key("cpu", "none", "none", torch.__version__, "step")


def test_ghost_ranks_nodes_and_the_node_profile_are_part_of_the_key(monkeypatch):
    pytest.importorskip("torch")
    import torch.distributed as dist

    assert entry.setting() == ""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert entry.setting() == "2 nodes"
    monkeypatch.setattr(dist, "get_backend", lambda: "ghost")
    monkeypatch.setenv(entry.NODE_VARIABLE, "hgx-h100")
    assert entry.setting() == "15 ghost ranks, node profile hgx-h100"


def test_verdicts_of_another_setting_are_other_verdicts(store):
    ghost = dataclasses.replace(KEY, setting="1 ghost ranks")
    store.put(KEY, POLICY, VERDICT)
    store.put(ghost, Policy(), {})
    assert store.get(KEY).policy == POLICY
    assert store.get(ghost).policy == Policy()
    assert store.remove(ghost)
    assert [found.key for found in store.entries()] == [KEY]


OLD_TABLE = """CREATE TABLE verdicts (
    gpu TEXT NOT NULL, driver TEXT NOT NULL, nccl TEXT NOT NULL, torch TEXT NOT NULL, workload TEXT NOT NULL,
    policy TEXT NOT NULL, verdict TEXT NOT NULL, made REAL NOT NULL, weft TEXT NOT NULL,
    PRIMARY KEY (gpu, driver, nccl, torch, workload))"""


def old_store(path):
    """A store as weft 0.1 made it, with one verdict."""
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as db:
        db.execute(OLD_TABLE)
        db.execute(f"PRAGMA application_id = {module.APPLICATION}")
        db.execute("PRAGMA user_version = 1")
        row = (
            *KEY.parts[:5],
            json.dumps(POLICY.to_dict()),
            json.dumps(VERDICT),
            time.time(),
            weft.__version__,
        )
        db.execute(f"INSERT INTO verdicts VALUES ({', '.join('?' * 9)})", row)
    db.close()


def test_a_store_of_the_first_version_is_read_as_it_is_and_migrates_with_the_first_write(store):
    old_store(store.path)
    assert store.get(KEY).policy == POLICY
    assert [found.key for found in store.entries()] == [KEY]
    with sqlite3.connect(store.path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    db.close()
    other = dataclasses.replace(KEY, setting="2 nodes")
    store.put(other, Policy(), {})
    with sqlite3.connect(store.path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
        assert [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")] == [
            "verdicts"
        ]
    db.close()
    assert store.get(KEY).policy == POLICY
    assert dict(store.get(KEY).verdict) == VERDICT
    assert store.get(other).policy == Policy()


def test_a_migration_that_fails_leaves_the_store_as_it_was(store, monkeypatch):
    old_store(store.path)
    monkeypatch.setattr(module, "_MIGRATE", (*module._MIGRATE[:2], "SELECT nothing FROM nowhere"))
    with pytest.raises(StoreError):
        store.put(KEY, Policy(), {})
    assert store.get(KEY).policy == POLICY


def test_an_export_of_the_first_version_is_imported(store):
    store.put(KEY, POLICY, VERDICT)
    document = store.export()
    assert document["entries"][0].pop("setting") == ""
    store.clear()
    assert store.import_(document) == 1
    assert store.get(KEY).policy == POLICY


@pytest.mark.parametrize("said", ["locking protocol", "unable to open database file", "disk I/O error"])
def test_what_other_processes_cause_in_passing_is_waited_out(store, monkeypatch, said):
    real, failures = sqlite3.connect, iter([True] * 3)

    def connect(*args, **options):
        if next(failures, False):
            raise sqlite3.OperationalError(said)
        return real(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    store.put(KEY, POLICY, VERDICT)
    assert store.get(KEY).policy == POLICY
