from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory) -> str:
    """The path of a compiled fake libnccl.so.2."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    target = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, source], check=True)
    return str(target)
