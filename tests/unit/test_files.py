"""Files are replaced atomically, and the writing process's own state is unchanged."""

from __future__ import annotations

import os

import pytest

from weft.errors import OutputError
from weft.files import write_whole


def test_a_file_is_replaced_with_the_rights_of_any_new_file(tmp_path, monkeypatch):
    plain = tmp_path / "plain"
    plain.touch()
    monkeypatch.setattr(os, "umask", None)  # umask is process-wide, and other threads may be creating files
    write_whole(tmp_path / "out", "one")
    write_whole(tmp_path / "out", b"two")
    assert (tmp_path / "out").read_text() == "two"
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


def test_a_failure_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for target in (tmp_path / "folder", tmp_path / "none" / "out", tmp_path / "file" / "out"):
        with pytest.raises(OutputError, match="cannot write"):
            write_whole(target, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
