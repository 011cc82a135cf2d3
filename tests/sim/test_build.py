"""The compiled core: built with plain cc; a clear error where it is missing."""

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


def test_without_a_compiler_the_error_names_the_core(monkeypatch, tmp_path):
    monkeypatch.setattr(hatch_build.shutil, "which", lambda name: None)
    with pytest.raises(hatch_build.CompileError, match="no C compiler found for the simulator's core"):
        hatch_build.build_sim(ROOT, tmp_path / "sim.so")
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
