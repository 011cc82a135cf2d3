"""Live tuning recognizes longer inputs by the bytes copied from the host: the shim counts them all."""

from __future__ import annotations

import json


def test_bytes_that_torch_copies_from_the_host_are_counted(run_program):
    counts = json.loads(run_program("copies.py").stdout.splitlines()[-1])
    assert counts == {name: [size, size] for name, (_, size) in counts.items()}
    assert counts["pinned"][0] == 16 * 1024 * 8
