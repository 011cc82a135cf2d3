"""Store: earlier verdicts, in one SQLite file that many ranks and jobs share.

A verdict is valid for one GPU, driver, NCCL version, torch version, workload and setting (nodes, ghost ranks,
node profile); if any of these differs, weft measures again. No connection, and so no lock, outlives a call:
nothing is locked during measurements.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import weft
from weft.errors import UsageError, WeftError
from weft.policy import Policy
from weft.tuning.entry import COLUMNS, KEY_COLUMNS, Entry, Key, here, verdict_text

__all__ = ["Entry", "Key", "Store", "StoreError", "default_path", "here"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

STORE_VARIABLE = "WEFT_STORE"
SCHEMA = 2
OLDER = (1,)  # schemas that can be read as they are; the first write migrates the file
APPLICATION = 0x77656674  # "weft": distinguishes our file from the database of another program
DOCUMENT_VERSION = 1
TRANSIENT_S = 1.0  # how long to retry after errors that other processes cause as they open or close the file
MAX_ENTRIES = 10_000
HEADER_BYTES = 100
LOCAL = ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
"""File systems local to one host. Write-ahead logging needs shared memory between all users of the file."""

_TABLE = """CREATE TABLE IF NOT EXISTS verdicts (
    gpu TEXT NOT NULL, driver TEXT NOT NULL, nccl TEXT NOT NULL, torch TEXT NOT NULL, workload TEXT NOT NULL,
    setting TEXT NOT NULL,
    policy TEXT NOT NULL, verdict TEXT NOT NULL, made REAL NOT NULL, weft TEXT NOT NULL,
    PRIMARY KEY (gpu, driver, nccl, torch, workload, setting))"""
_MIGRATE = (
    "ALTER TABLE verdicts RENAME TO verdicts_1",
    _TABLE,
    f"INSERT INTO verdicts ({', '.join(COLUMNS)}) "
    f"SELECT {', '.join('?' if name == 'setting' else name for name in COLUMNS)} FROM verdicts_1",
    "DROP TABLE verdicts_1",
)
_UPSERT = (
    f"INSERT INTO verdicts ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    f"ON CONFLICT ({', '.join(KEY_COLUMNS)}) DO UPDATE SET "
    "policy = excluded.policy, verdict = excluded.verdict, made = excluded.made, weft = excluded.weft"
)
_WHERE = " AND ".join(f"{name} = ?" for name in KEY_COLUMNS)


class StoreError(WeftError):
    """The store cannot be read or written. Callers warn and measure again; the job must not fail."""

    exit_code = 2


def default_path() -> Path:
    """$WEFT_STORE, or weft/verdicts.sqlite in the user's data folder."""
    named = os.environ.get(STORE_VARIABLE)
    if named:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME", "")
    try:
        home = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        raise StoreError(f"no home folder to keep verdicts in: set {STORE_VARIABLE} to a file") from None
    return home / "weft" / "verdicts.sqlite"


class Store:
    """Verdicts by Key. Every method raises StoreError, with a one-line message, if the file is unusable."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 10.0) -> None:
        self.path = Path(path) if path is not None else default_path()
        self.timeout_s = timeout_s
        """How long to wait for other writers."""

    def get(self, key: Key) -> Entry | None:
        """The verdict for exactly this key, stale or not."""
        rows = self._read(f"SELECT {{}} FROM verdicts WHERE {_WHERE}", key.parts)
        return self._entry(rows[0]) if rows else None

    def put(self, key: Key, policy: Policy, verdict: Mapping[str, Any]) -> Entry:
        """Store a new verdict and replace any older one for this key."""
        entry = Entry(key, policy, dict(verdict), time.time(), weft.__version__)
        row = self._row(entry)
        self._write(lambda db: db.execute(_UPSERT, row))
        return entry

    def entries(self) -> list[Entry]:
        """All verdicts, newest first."""
        return [self._entry(row) for row in self._read("SELECT {} FROM verdicts ORDER BY made DESC", ())]

    def remove(self, key: Key) -> bool:
        """Delete one verdict; returns whether there was one."""
        if not self._exists():
            return False
        done = self._write(lambda db: db.execute(f"DELETE FROM verdicts WHERE {_WHERE}", key.parts).rowcount)
        return done > 0

    def clear(self) -> int:
        """Delete all entries, damaged ones too; returns how many there were."""
        if not self._exists():
            return 0
        return self._write(lambda db: db.execute("DELETE FROM verdicts").rowcount)

    def export(self) -> dict[str, Any]:
        """All verdicts as one JSON document."""
        found = [entry.to_dict() for entry in self.entries()]
        return {"version": DOCUMENT_VERSION, "kind": "weft verdicts", "entries": found}

    def import_(self, document: Any) -> int:
        """Add all verdicts of an export, or none; if two have the same key, the newer one is kept.

        Returns how many were added or replaced. The document is not trusted: only an export is accepted.
        """
        rows = [self._row(entry) for entry in _document(document)]
        newer = _UPSERT + " WHERE excluded.made > verdicts.made"
        return self._write(lambda db: sum(db.execute(newer, row).rowcount for row in rows))

    def _exists(self) -> bool:
        with self._problems():
            return self.path.exists()

    def _row(self, entry: Entry) -> tuple[Any, ...]:
        try:
            verdict = verdict_text(dict(entry.verdict))
        except UsageError as error:
            raise StoreError(f"store {self.path}: {error}") from None
        return *entry.key.parts, json.dumps(entry.policy.to_dict()), verdict, entry.made, entry.weft

    def _entry(self, row: tuple[Any, ...]) -> Entry:
        try:
            values = dict(zip(COLUMNS, row, strict=True))
            values["policy"], values["verdict"] = (_json(values[name]) for name in ("policy", "verdict"))
            return Entry.from_dict(values)
        except (UsageError, ValueError, RecursionError) as error:
            raise StoreError(
                f"store {self.path}: the entry for {str(row[4])[:60]!r} is damaged ({error}); "
                "`weft store forget --all` empties the store"
            ) from None

    def _read(self, query: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """Rows of a query; `{}` in it stands for all columns."""
        if not self._exists():
            return []

        def rows(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
            schema = self._known(db)
            if schema is None:
                return []
            if schema == SCHEMA:
                return db.execute(query.format(", ".join(COLUMNS)), values).fetchall()
            older = "(SELECT *, '' AS setting FROM verdicts)"
            text = query.format(", ".join(COLUMNS)).replace("FROM verdicts", f"FROM {older}")
            return db.execute(text, values).fetchall()

        return self._attempt(lambda: self._connected(rows, write=False))

    def _write(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        def within(db: sqlite3.Connection) -> _T:
            self._known(db)  # reject a file that is not ours before changing anything in it
            if _local(self.path):
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")  # do not wait for the disk at every write
            db.execute("BEGIN IMMEDIATE")
            schema = self._known(db)
            if schema is None:
                db.execute(_TABLE)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
            elif schema in OLDER:
                for statement in _MIGRATE:
                    db.execute(statement, ("",) if "?" in statement else ())
            if schema != SCHEMA:
                db.execute(f"PRAGMA user_version = {SCHEMA}")
            done = change(db)
            db.execute("COMMIT")
            return done

        return self._attempt(lambda: self._connected(within, write=True))

    def _known(self, db: sqlite3.Connection) -> int | None:
        """The schema version of the store; None if the file is empty. Raises StoreError if it is not ours."""
        # The order matters: another process may create the store between two of these reads.
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            if application or tables:
                raise StoreError(
                    f"store {self.path}: this is the database of another program; "
                    f"set {STORE_VARIABLE} to another file"
                )
            return None
        if schema not in (SCHEMA, *OLDER):
            raise StoreError(
                f"store {self.path}: schema {schema} is not known (this weft reads {SCHEMA}): update weft, "
                f"or set {STORE_VARIABLE} to another file"
            )
        return int(schema)

    def _connected(self, use: Callable[[sqlite3.Connection], _T], *, write: bool) -> _T:
        with self._problems():
            if self.path.is_dir():
                raise StoreError(f"store {self.path}: this is a folder; set {STORE_VARIABLE} to a file")
            if self.path.exists() and not self.path.is_file():  # SQLite would block on a pipe
                raise StoreError(f"store {self.path}: this is not a file; set {STORE_VARIABLE} to one")
            if self.path.exists() and 0 < self.path.stat().st_size < HEADER_BYTES:
                raise sqlite3.DatabaseError("file is not a database")  # SQLite would treat it as empty
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect(write)) as db:
                db.execute("PRAGMA trusted_schema = OFF")  # the file may come from another machine
                return use(db)

    def _connect(self, write: bool) -> sqlite3.Connection:
        address = self.path.absolute().as_uri()
        if not write:
            address += "?mode=ro"
            if not os.access(self.path.parent, os.W_OK) and not Path(f"{self.path}-wal").exists():
                address += "&immutable=1"  # a reader could not create the lock files it needs
        return sqlite3.connect(address, timeout=self.timeout_s, isolation_level=None, uri=True)

    def _attempt(self, act: Callable[[], _T]) -> _T:
        """Call `act`, and retry while other processes hold the file: SQLite itself does not always wait."""
        began = time.monotonic()
        while True:
            try:
                return act()
            except _BusyError as error:
                _log.debug("%s", error)
                patience_s = min(self.timeout_s, error.patience_s)
                if time.monotonic() - began >= patience_s:
                    raise StoreError(str(error)) from None
                time.sleep(random.uniform(0.005, 0.03))  # random: waiting processes must not stay in step

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """Turn errors of the OS and SQLite into one-line messages that name the file and the fix."""
        elsewhere = f"set {STORE_VARIABLE} to another file"
        try:
            yield
        except OSError as error:
            raise StoreError(f"store {self.path}: {error.strerror or error}; {elsewhere}") from None
        except sqlite3.Error as error:
            said = str(error)
            if "locked" in said or "busy" in said or "locking protocol" in said:
                raise _BusyError(
                    f"store {self.path}: another process has kept it locked for over {self.timeout_s:g} s; "
                    f"end that process, or {elsewhere}"
                ) from None
            if "not a database" in said or "malformed" in said or "encrypted" in said:
                raise StoreError(
                    f"store {self.path}: damaged ({said}); weft leaves it unchanged: move it away, "
                    f"or {elsewhere}"
                ) from None
            if "full" in said:
                raise StoreError(f"store {self.path}: no space left on its disk; {elsewhere}") from None
            if "readonly" in said or "read-only" in said or "unable to open" in said or "I/O" in said:
                # This can be transient: another process may be creating or removing its lock files.
                line = f"store {self.path}: cannot be opened or written; {elsewhere}"
                raise _BusyError(line, TRANSIENT_S) from None
            raise StoreError(f"store {self.path}: {said}; {elsewhere}") from None


class _BusyError(Exception):
    """Another process holds the file; `_attempt` retries for up to `patience_s` seconds."""

    def __init__(self, line: str, patience_s: float = math.inf) -> None:
        super().__init__(line)
        self.patience_s = patience_s


def _document(document: Any) -> list[Entry]:
    if not isinstance(document, dict) or document.get("kind") != "weft verdicts":
        raise UsageError("this is not an export of weft's verdicts; make one with `weft store export FILE`")
    if document.get("version") != DOCUMENT_VERSION:
        raise UsageError(
            f"verdicts: version {str(document.get('version'))[:40]!r} is not known; this weft reads "
            f"{DOCUMENT_VERSION}; update it"
        )
    found = document.get("entries")
    if not isinstance(found, list) or len(found) > MAX_ENTRIES:
        raise UsageError(f"verdicts: entries must be a list of at most {MAX_ENTRIES}")
    entries = []
    for number, item in enumerate(found):
        try:
            entries.append(Entry.from_dict(item))
        except UsageError as error:
            raise UsageError(f"verdicts: entry {number}: {error}") from None
    return entries


def _json(text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError("expected JSON text")
    return json.loads(text)


def _local(path: Path) -> bool:
    """Whether the file is on a file system local to this host; False if that cannot be determined."""
    try:
        where = str(path.parent.resolve())
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    best, kind = -1, ""
    for line in lines:
        _, point, found, *_ = [*line.split(" "), "", "", ""]
        point = point.replace("\\040", " ")
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), found
    return kind in LOCAL
