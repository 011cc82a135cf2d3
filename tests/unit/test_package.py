"""The wheel and the source archive: their contents, and the effect of a failed compile."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import hatch_build
import pytest

ROOT = Path(hatch_build.__file__).parent
CODE = (".py", ".j2", ".css", ".js", ".json")
IGNORED = ("__pycache__", ".egg-info")


def hatchling(kind: str, folder: Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    done = hatchling("wheel", folder)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("weft-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The unpacked source archive."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    done = hatchling("sdist", folder)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("weft-*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / path.name.removesuffix(".tar.gz")


def package_files(*suffixes: str) -> set[str]:
    found = (path for path in (ROOT / "src/weft").rglob("*") if path.suffix in suffixes)
    return {str(p.relative_to(ROOT / "src")) for p in found if not any(part in str(p) for part in IGNORED)}


def test_the_wheel_has_every_file_that_is_loaded_at_run_time(wheel):
    names = set(wheel.namelist())
    assert {"weft/shim/libweft_shim.so", "weft/sim/libweft_sim.so", "weft/py.typed"} <= names
    assert len(package_files(*CODE)) > 100
    assert package_files(*CODE) <= names


def test_the_wheel_is_for_this_platform_and_any_python(wheel):
    (meta,) = [name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL")]
    text = wheel.read(meta).decode()
    assert "Root-Is-Purelib: false" in text
    assert f"Tag: py3-none-{hatch_build.platform_tag()}" in text


def test_the_source_archive_builds_the_same_wheel(wheel, sdist, tmp_path):
    done = hatchling("wheel", tmp_path, cwd=sdist)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("weft-*.whl")
    with zipfile.ZipFile(path) as built:
        assert set(built.namelist()) == set(wheel.namelist())


def test_the_source_archive_has_the_tests_and_the_c_sources(sdist):
    files = {str(path.relative_to(sdist)) for path in sdist.rglob("*")}
    assert {f"src/{name}" for name in package_files(".c", ".h", ".def")} <= files
    assert {"tests/unit/test_package.py", "scripts/test", "CONTRIBUTING.md", "LICENSE"} <= files


@pytest.mark.skipif(sys.platform != "linux", reason="the compile may fail elsewhere")
@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_on_linux_a_failed_compile_fails_the_build(sdist, tmp_path, compiler):
    done = hatchling("wheel", tmp_path, cwd=sdist, CC=compiler)
    assert done.returncode != 0
    assert "WEFT_NO_SHIM=1" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_opt_out_builds_without_the_shim(sdist, tmp_path):
    done = hatchling("wheel", tmp_path, cwd=sdist, CC="false", WEFT_NO_SHIM="1")
    assert done.returncode == 0, done.stderr
    assert "built without libweft_sim.so" in done.stderr
    (path,) = tmp_path.glob("weft-*-py3-none-any.whl")
    with zipfile.ZipFile(path) as built:
        assert not [name for name in built.namelist() if name.endswith(".so")]


@pytest.mark.parametrize(
    ("platform", "env", "built"),
    [
        ("linux", {}, ["libweft_shim.so", "libweft_sim.so", "libweft_scan.so", "libweft_paced.so"]),
        (
            "linux",
            {"WEFT_NO_SHIM": "0"},
            ["libweft_shim.so", "libweft_sim.so", "libweft_scan.so", "libweft_paced.so"],
        ),
        ("linux", {"WEFT_NO_SHIM": "1"}, ["libweft_sim.so", "libweft_scan.so"]),
        ("darwin", {}, ["libweft_sim.so", "libweft_scan.so"]),
        ("win32", {}, []),
    ],
)
def test_each_platform_gets_what_it_can_use(monkeypatch, tmp_path, platform, env, built):
    compiled = []
    monkeypatch.setattr(
        hatch_build, "_compile", lambda what, folder, target, *_: compiled.append(target.name)
    )
    assert [path.name for path in hatch_build.build(tmp_path, platform, env)] == built
    assert compiled == built


def test_without_a_compiler_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(hatch_build.CompileError, match="no C compiler .* set WEFT_NO_SHIM=1"):
        hatch_build.build_shim(ROOT, tmp_path / "libweft_shim.so")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(hatch_build.CompileError, match="the launch shim does not compile"):
        hatch_build.build_shim(ROOT, tmp_path / "libweft_shim.so")
    assert not list(tmp_path.iterdir())


def test_the_compiler_may_have_arguments_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "cc -DWEFT_TEST_OF_CC")
    assert hatch_build._compiler("this")[1:] == ["-DWEFT_TEST_OF_CC"]
    assert hatch_build.build_sim(ROOT, tmp_path / "libweft_sim.so").exists()
