"""Builds the fake driver once and runs small programs against it, under `weft run`."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from building import HERE, ROOT, compile_c, sanitizer_flags
from hatch_build import LINK, build_shim

from weft.policy import Policy

if shutil.which("cc") is None:
    pytest.skip("the shim needs a C compiler", allow_module_level=True)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory) -> Path:
    """The folder of the fake libcuda.so.1 (also under the name that a linker looks for)."""
    folder = tmp_path_factory.mktemp("fake")
    library = compile_c(
        folder / "libcuda.so.1",
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic,-soname,libcuda.so.1",
        str(HERE / "fake_cuda.c"),
        str(HERE / "fake_cuda_events.c"),
        "-lpthread",
    )
    (folder / "libcuda.so").symlink_to(library.name)
    return folder


@pytest.fixture(scope="session")
def sanitized_shim(tmp_path_factory):
    """The shim built with a sanitizer, once for all tests and all test processes, since it takes a while."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def library(sanitizer: str) -> Path:
        made = (
            shared / f"sanitized-{sanitizer.replace(',', '-')}" / "libweft_shim.so"
        )  # no comma: -Wl would split there
        made.parent.mkdir(exist_ok=True)
        with (made.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                flags = sanitizer_flags(sanitizer)
                probe = made.parent / "probe.c"
                probe.write_text("int main(void) { return 0; }")
                probed = ["cc", *flags, str(probe), "-o", str(probe.with_suffix(""))]
                if subprocess.run(probed, capture_output=True, check=False).returncode:
                    pytest.skip("this compiler has no such sanitizer")
                build_shim(ROOT, made, flags)
        return made

    return library


@pytest.fixture(scope="session", params=["address,undefined", "thread"])
def sanitized(request, sanitized_shim):
    """Compiles a program with a sanitizer, and a sanitized shim into it: they must be in one executable."""
    flags, library = sanitizer_flags(request.param), sanitized_shim(request.param)

    def build(output: Path, *arguments: str) -> Path:
        linked = (str(library), *LINK, f"-Wl,-rpath,{library.parent}")
        return compile_c(output, *flags, "-rdynamic", arguments[0], *linked[:1], *arguments[1:], *linked[1:])

    return build


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str
    stats: dict

    def kernel(self, name: str) -> dict:
        (found,) = [kernel for kernel in self.stats["kernels"] if kernel["name"] == name]
        return found

    @property
    def results(self):
        """What the program printed as JSON."""
        return json.loads(self.stdout)


@pytest.fixture
def environment(fake_driver) -> dict[str, str]:
    path = f"{fake_driver}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{HERE}"}


@pytest.fixture
def weft_run(tmp_path, environment):
    """Runs a program under `weft run` with a policy; returns its outcome and the shim's counts."""

    def run(
        command: list[str],
        policy: Policy | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Outcome:
        stats, file = tmp_path / "stats.json", tmp_path / "policy.json"
        (policy or Policy()).save(file)
        weft = [sys.executable, "-m", "weft", "run", "--policy", str(file), "--stats", str(stats), "--"]
        done = subprocess.run(
            [*weft, *command],
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Outcome(
            done.returncode, done.stdout, done.stderr, json.loads(stats.read_text()) if stats.exists() else {}
        )

    return run


@pytest.fixture
def program(weft_run):
    """Runs Python source on the fake driver (see driver.py); it must exit with 0. Returns its outcome."""

    def run(source: str, policy: Policy | None = None, **kwargs) -> Outcome:
        code = "from driver import *\n" + textwrap.dedent(source)
        outcome = weft_run([sys.executable, "-c", code], policy, **kwargs)
        assert outcome.code == 0, outcome.stderr
        return outcome

    return run
