"""`python -m weft.comm.ghost` where torch is missing: one line with the fix."""

from __future__ import annotations

import os
import subprocess
import sys


def test_without_torch_it_ends_in_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "torch.py").write_text('raise ModuleNotFoundError("No module named \'torch\'", name="torch")')
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "weft.comm.ghost", "--node", "dgx-h100", "train.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "weft: ghost ranks need PyTorch: pip install torch (No module named 'torch')\n"
