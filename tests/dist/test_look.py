"""A look through torch's profiler: what it makes of spans, and that it gives way to the program's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from weft.tuning.live.look import Look, seen_in  # noqa: E402

MS = 1_000_000


def event(name: str, start_ms: float, ms: float, stream: int = 7):
    return SimpleNamespace(
        start_ns=lambda: int(start_ms * MS),
        duration_ns=lambda: int(ms * MS),
        device_resource_id=lambda: stream,
        device_type=lambda: "DeviceType.CUDA",
        name=lambda: name,
    )


def profiler_of(*events):
    results = SimpleNamespace(events=lambda: list(events))
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))


def test_it_tells_what_runs_beside_collectives_from_what_is_launched_then():
    seen = seen_in(
        profiler_of(
            event("gemm", 0, 4),
            event("ncclDevKernel_AllReduce", 2, 6, stream=20),
            event("norm", 4, 1),
            event("gemm", 10, 4),
        ),
        steps=2,
    )
    assert seen is not None
    assert (seen.span_ms, seen.comm_ms, seen.exposed_ms) == (7, 3, 1.5)
    assert seen.kernels == {"gemm": (4, 1), "norm": (0.5, 0.5)}


def test_without_a_gpu_there_is_nothing_to_see():
    look = Look()
    look.begin()
    torch.ones(8).sum()
    assert look.end(1) is None
    assert Look().end(1) is None


@pytest.fixture
def on_cpu(monkeypatch):
    """The look's profiler watches the CPU: here is no GPU to watch, and it would not begin."""

    class OnCpu(torch.profiler.profile):
        def __init__(self, **options) -> None:
            super().__init__(**{**options, "activities": [torch.profiler.ProfilerActivity.CPU]})

    monkeypatch.setattr(torch.profiler, "profile", OnCpu)


def test_the_programs_own_profiler_comes_first(on_cpu):
    from torch.autograd import profiler as module

    before = module._prepare_profiler, module._enable_profiler
    look = Look()
    look.begin()
    assert module._prepare_profiler is not before[0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(8).sum()
    assert any(e.key == "aten::sum" for e in own.key_averages())
    assert look.end(1) is None
    assert (module._prepare_profiler, module._enable_profiler) == before


def test_it_can_be_dropped_at_any_time_and_leaves_nothing_behind(on_cpu):
    from torch.autograd import profiler as module

    before = module._prepare_profiler, module._enable_profiler
    look = Look()
    look.begin()
    assert torch.autograd._profiler_enabled()
    look.drop()
    look.drop()
    assert not torch.autograd._profiler_enabled()
    assert (module._prepare_profiler, module._enable_profiler) == before
    assert look.end(1) is None


def test_it_keeps_out_where_a_profiler_runs_already(on_cpu):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        look = Look()
        look.begin()
        torch.ones(8).sum()
        assert look.end(1) is None
    assert any(e.key == "aten::sum" for e in own.key_averages())


def test_it_keeps_out_where_a_profiler_warms_up(on_cpu):
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=2, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, schedule=schedule, on_trace_ready=lambda _: None) as own:
        look = Look()
        look.begin()
        for _ in range(4):
            torch.ones(8).sum()
            own.step()
        assert look.end(1) is None
    assert any(e.key == "aten::sum" for e in own.key_averages())
