"""What `weft explore --device cuda` measures, with a clock and streams that stand in for the GPU's."""

from __future__ import annotations

import sys
import time
import types
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from weft.errors import UnavailableError, UsageError  # noqa: E402
from weft.ops import characterize_device as device  # noqa: E402
from weft.ops import explore_device  # noqa: E402
from weft.ops.case import FUSED_ENGINES, Case  # noqa: E402
from weft.policy import SCHEDULES  # noqa: E402


class Event:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return max(1e-6, 1e3 * (other.at - self.at))


class Stream:
    def wait_event(self, event):
        pass

    wait_stream = wait_event


class Graph:
    def replay(self):
        self.work()


@pytest.fixture
def gpu(monkeypatch):
    """Makes the CPU stand in for torch's GPU."""
    fake = types.ModuleType("torch")
    fake.__dict__.update(
        {name: getattr(torch, name) for name in ("mm", "bfloat16", "float16", "float32", "uint8")}
    )
    for name in ("randn", "empty", "zeros"):
        fake.__dict__[name] = lambda *size, device=None, name=name, **more: getattr(torch, name)(
            *size, **more
        )
    fake.empty_like = torch.empty_like
    fake.cuda = types.SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda *_: "NVIDIA H200",
        Event=Event,
        Stream=Stream,
        stream=lambda _: nullcontext(),
        current_stream=Stream,
        synchronize=lambda: None,
        _sleep=lambda _: None,
    )
    copies = types.ModuleType("weft.comm.copy_kernel")
    copies.launch_copy = lambda source, target, stream: target.copy_(source)
    monkeypatch.setitem(sys.modules, "weft.comm.copy_kernel", copies)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(device, "torch_with_gpu", lambda: fake)
    monkeypatch.setattr(device, "_graph", lambda _, work: work)
    monkeypatch.setattr(device, "GEMM_SIZE", 64)
    monkeypatch.setattr(device, "MEMORY_BOUND", (256, 16, 64))
    monkeypatch.setattr(device, "LEAST_MS", 0.01)
    monkeypatch.setattr(device, "CHUNK", 1 << 16)
    return fake


def test_every_loss_is_measured_and_set_next_to_the_model(gpu):
    document = device.measured([(128, 64, 128)], "fp32", repeats=2)
    assert document["simulated"] is False
    assert document["gpu"] == "NVIDIA H200"
    rows = document["decomposition"]
    assert [(row["axis"], row["ways"]) for row in rows] == [("M", 8), ("M", 64), ("K", 8), ("K", 64)]
    for row in rows:
        assert row["ms"] > 0
        assert "simulated_loss_pct" in row
    assert [row["engine"] for row in document["contention"]] == ["dma", "sm", "dma", "dma"]
    assert [row["how"] for row in document["contention"]][2:] == [
        "host to device and back",
        "host to device and back, GEMM 256x16x64",
    ]
    assert all(row["gemm_beside_ms"] > 0 and row["copy_beside_gb_s"] > 0 for row in document["contention"])
    for row in document["contention"]:
        assert ("simulated_gemm_slowed_pct" in row) == (row["engine"] == "dma")
        for side in ("gemm", "copy"):
            low, high = row[f"{side}_slowed_range_pct"]
            assert low <= row[f"{side}_slowed_pct"] <= high
    assert len(document["copies"]) == len(device.COPY_BYTES)


def test_each_side_is_compared_with_itself_alone_while_the_other_runs_throughout(gpu, monkeypatch):
    """A GPU on which copies slow a GEMM by 10%, a GEMM slows copies by 25%, and the clock keeps falling."""
    turns = []

    def ms(self, of, count, others):
        turns.append((of, count, others))
        drift = 1 + 0.02 * len(turns)
        return drift * {"gemm": 2.0, "copy": 0.5}[of] * (1 + (0.1 if of == "gemm" else 0.25) * (others > 0))

    monkeypatch.setattr(device._Concurrent, "ms", ms)
    monkeypatch.setattr(device, "LEAST_MS", 20.0)
    row = device._contention(gpu, "dma", torch.float32, 31)
    assert row["gemm_slowed_pct"] == pytest.approx(10, abs=3)
    assert row["copy_slowed_pct"] == pytest.approx(25, abs=3)
    measured = turns[3:]
    assert len(measured) == 4 * 31
    rounds = [tuple((of, others > 0) for of, _, others in measured[i : i + 4]) for i in range(0, 124, 4)]
    assert all(len(set(each)) == 4 for each in rounds)
    assert len(set(rounds)) > 5  # in many orders, so that a drift of the clock does not favour a side
    for of, count, others in measured:
        if others:  # the other side outlasts the timed one, even a slowed one
            lasts = others * (0.5 if of == "gemm" else 2.0)
            assert lasts >= 1.9 * count * (2.0 if of == "gemm" else 0.5)


def test_the_pieces_of_a_gemm_make_up_the_gemm(gpu, monkeypatch):
    made = []
    monkeypatch.setattr(
        device,
        "interleaved",
        lambda _, works, __: [work() for work in works.values()] and dict.fromkeys(works, 1.0),
    )
    keep = gpu.empty
    gpu.empty = lambda *size, **more: made.append(keep(*size, **more)) or made[-1]
    operands = []
    gpu.randn = lambda *size, **more: operands.append(torch.randn(*size)) or operands[-1]
    device._cuts(gpu, (128, 32, 128), torch.float32, 1)
    torch.testing.assert_close(made[0], operands[0] @ operands[1], rtol=1e-4, atol=1e-3)


def test_a_gpu_that_the_model_does_not_know_stands_alone(gpu):
    gpu.cuda.get_device_name = lambda *_: "Some GPU"
    document = device.measured([(64, 64, 64)], "fp32", repeats=1)
    assert all("simulated_loss_pct" not in row for row in document["decomposition"])


def test_without_a_gpu_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="use --device sim:NAME"):
        device.torch_with_gpu()


def test_the_document_of_measured_schedules_keeps_the_contract():
    case = Case(operation="all_gather_matmul", m=8192, n=8192, k=8192, ranks=8, gpu="h200", topology="host")
    found = {(name, engine): 3.0 for name in SCHEDULES for engine in FUSED_ENGINES}
    found |= {("serial", "dma"): 4.0, ("serial", "sm"): 4.2, ("hetero-fused-1d", "dma"): 2.5}
    del found["uniform-fused-2d", "dma"], found["uniform-fused-2d", "sm"]
    times = {**found, "product": 1.5, "transfer": 2.4}
    document = explore_device._document(case, "NVIDIA H200", times, found, {"uniform-fused-2d dma": "no"})
    assert (document["best"], document["best_engine"]) == ("hetero-fused-1d", "dma")
    rows = {row["name"]: row for row in document["schedules"]}
    assert "uniform-fused-2d" not in rows
    assert rows["serial"]["ms"] == 4.0
    assert rows["hetero-fused-1d"]["speedup_vs_serial"] == pytest.approx(1.6)
    assert rows["hetero-fused-1d"]["fraction_of_ideal"] == pytest.approx(1.5 / 1.6)
    assert document["bound"] == pytest.approx(4.0 / 2.4)
    assert document["picked"] in SCHEDULES


def test_peers_that_host_memory_cannot_hold_are_refused(gpu, monkeypatch):
    monkeypatch.setattr(explore_device, "torch_with_gpu", lambda: gpu)
    with pytest.raises(UsageError, match="GiB of pinned host memory"):
        explore_device.measure_schedules("all_gather_matmul", 1 << 20, 64, 1 << 15, 8, "bf16")
