"""The compiled core: built with cc, and a clear error if it is missing."""

from __future__ import annotations

from pathlib import Path

import hatch_build
import pytest

from weft.errors import UnavailableError
from weft.execute.sim import SimExecutor
from weft.policy import Policy
from weft.sim import core
from weft.workload import named

ROOT = Path(__file__).parents[2]


def test_without_a_compiler_the_build_continues_with_a_message(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hatch_build.shutil, "which", lambda name: None)
    assert hatch_build.build_sim(ROOT, tmp_path / "sim.so") is None
    assert "no C compiler found, the simulator's core is not built" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_core_compiles_without_warnings(tmp_path):
    assert hatch_build.build_sim(ROOT, tmp_path / "sim.so", ("-Werror",)) == tmp_path / "sim.so"


def test_a_missing_core_is_one_line_with_the_fix(monkeypatch):
    monkeypatch.setattr(core, "CORE_LIBRARY", "no_such_library.so")
    core._library.cache_clear()
    try:
        with pytest.raises(UnavailableError, match=r"core is not built: install a C compiler") as found:
            SimExecutor("h100").measure(named("cb-ar"), Policy())
        assert found.value.exit_code == 2
    finally:
        core._library.cache_clear()
