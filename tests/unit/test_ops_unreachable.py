"""`weft run --ops` on groups whose backend cannot move GPU tensors."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from weft.errors import UnavailableError  # noqa: E402
from weft.ops import promise  # noqa: E402
from weft.ops.call import Call  # noqa: E402
from weft.ops.replacements import read_replacements  # noqa: E402
from weft.ops.schedule import Problem  # noqa: E402
from weft.ops.teams import Team  # noqa: E402


class _NoNccl(Team):
    """Two ranks over gloo; in every exchange the other rank answers like this one."""

    def __init__(self):
        gloo = type("ProcessGroupGloo", (), {})()
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 2, _get_backend=lambda _: gloo)
        super().__init__(group)
        self.exchanges = 0

    def all_can(self, facts, reason):
        self.exchanges += 1
        return reason


def test_a_program_whose_group_cannot_move_gpu_tensors_is_left_unchanged(monkeypatch, tmp_path):
    """Neither the pick, WEFT_OPS=all nor a graph replaces anything; `weft run` says why in its last line."""
    monkeypatch.setattr(promise, "pick_arguments", lambda x: ("bf16", "h200"))
    x = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), dtype=torch.bfloat16)
    problem, call = Problem(m=16384, n=8192, k=8192, ranks=2), Call("all_gather_matmul")

    def no_memory(*_):
        raise UnavailableError("no symmetric memory between these GPUs")

    monkeypatch.setattr("weft.ops.engines.copies", lambda: None)
    monkeypatch.setattr("weft.ops.engines.SymmetricBuffer", no_memory)
    team = _NoNccl()
    for wanted in ("pick", "all", "pick"):
        monkeypatch.setenv("WEFT_OPS", wanted)
        assert not promise.promised(team, call, problem, x)
    assert team.exchanges == 1  # asked once, by all ranks
    monkeypatch.setattr(promise, "group_named", lambda _: None)
    monkeypatch.setattr(promise, "team_of", lambda _: _NoNccl())
    assert not promise.fits_graph("all_gather_matmul", 16384, 8192, 2, x, "0")
    monkeypatch.setattr("weft.ops.engines.SymmetricBuffer", lambda *_: "memory")
    monkeypatch.setenv("WEFT_OPS", "all")
    assert promise.promised(_NoNccl(), call, problem, x)
    process = {"rank": 0, "layers": 3, "too_small": 0, "operations": [], "unreachable": team.unreachable}
    (tmp_path / "ops.1.json").write_text(json.dumps({**process, "calls": 1}))
    text = read_replacements(tmp_path)["text"]
    assert text.startswith(
        "ops: nothing was replaced: gloo cannot move GPU tensors between ranks; use a group"
    )
