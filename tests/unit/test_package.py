"""What is shipped: a wheel with the shim and the page's assets, and a package that also installs without a compiler."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import hatch_build
import pytest

ROOT = Path(hatch_build.__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("weft-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_all_that_is_loaded_at_run_time(wheel):
    names = set(wheel.namelist())
    assert {"weft/shim/libweft_shim.so", "weft/py.typed", "weft/cli/main.py"} <= names
    shipped = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/weft").rglob("*")
        if path.suffix in (".py", ".j2", ".css", ".js")
    }
    assert shipped <= names


def test_the_wheel_is_for_this_platform_and_any_python(wheel):
    (meta,) = [name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL")]
    text = wheel.read(meta).decode()
    assert "Root-Is-Purelib: false" in text
    assert "Tag: py3-none-" in text


def test_without_a_compiler_the_shim_is_left_out_and_said_to_be(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hatch_build.build_shim(ROOT, tmp_path / "libweft_shim.so") is None
    assert "no C compiler" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "false")
    assert hatch_build.build_shim(ROOT, tmp_path / "libweft_shim.so") is None
    assert "not built" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
