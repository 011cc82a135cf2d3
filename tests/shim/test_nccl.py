"""NCCL's calls under the shim, against a fake NCCL: keys, counts, siblings, and never a changed program."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
from building import CSRC, HERE, ROOT, compile_c
from hatch_build import LINK, build_shim

from weft.shim.inject import Job


def build_nccl(folder, *flags):
    folder.mkdir(parents=True, exist_ok=True)
    library = compile_c(
        folder / "libnccl.so.2",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnccl.so.2",
        *flags,
        str(HERE / "fake_nccl.c"),
        "-lpthread",
    )
    (folder / "libnccl.so").symlink_to(library.name)
    compile_c(
        folder / "libuser.so",
        "-shared",
        "-fPIC",
        str(HERE / "nccl_user.c"),
        f"-L{folder}",
        "-lnccl",
        f"-Wl,-rpath,{folder}",
    )
    return folder


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory):
    return build_nccl(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def nccl_program(environment, fake_nccl):
    """Runs Python source that drives the fake NCCL (see nccl_driver.py) under the shim; returns what it showed."""

    def run(source, env=None, folder=fake_nccl, job=True, statistics=None):
        code = "from nccl_driver import *\n" + textwrap.dedent(source)
        path = f"{folder}:{environment['LD_LIBRARY_PATH']}"
        base = {**environment, "LD_LIBRARY_PATH": path, **(env or {})}
        with Job() as started:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=started.environment(base) if job else base,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            if statistics is not None:
                statistics.update(started.collect())
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return lines[0] if len(lines) == 1 else lines

    return run


TWO_GHOSTS = """
    n = Nccl()
    unique = n.unique()
    ghosts = []
    n.group(lambda: ghosts.append(n.init(2, 0, unique, config(12))), lambda: ghosts.append(n.init(2, 1, unique, config(12))))
    def step():
        n.group(*(lambda c=c: n.all_reduce(c) for c in ghosts))
"""


def test_ghost_ranks_are_routed_between_limits_and_back(nccl_program):
    statistics = {}
    seen = nccl_program(
        TWO_GHOSTS
        + """
    step()
    routes.prepare(4, 10)
    routes.prepare(16, 10)
    for limit in (4, 16, None, 16):
        routes.route(limit)
        step()
    found = routes.communicators()
    show([n.ctas(), [[c.key == found[0].key, c.rank, c.size, c.max_ctas, c.collectives, c.routed_to, c.prepared, c.why_not, c.bytes] for c in found]])
    """,
        statistics=statistics,
    )
    assert seen[0] == [12, 12, 4, 4, 16, 16, 12, 12, 16, 16]
    assert seen[1] == [[True, rank, 2, 12, 5, 16, [4, 16], None, {"all_reduce": 5120}] for rank in (0, 1)]
    assert statistics["routed"] == 6
    assert statistics["split_failures"] == 0
