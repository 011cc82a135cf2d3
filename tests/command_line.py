"""Runs a weft command line in the test's own process."""

from __future__ import annotations

import pytest

from weft.cli import main as cli


@pytest.fixture
def weft(monkeypatch, capsys):
    """Run a command line; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return call
