"""GPU memory that torch's allocator kept because of trials: when it is released."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weft.tuning.live import cached_memory  # noqa: E402
from weft.tuning.live.cached_memory import CachedMemory  # noqa: E402

GIB = 1 << 30


class Allocator:
    """An allocator with `used` bytes in use, and cached ones besides."""

    def __init__(self, monkeypatch) -> None:
        self.used, self.kept, self.held, self.emptied = 20 * GIB, 2 * GIB, 0, 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.used + self.kept + self.held)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(cached_memory.time, "sleep", self.wait)

    def wait(self, seconds: float) -> None:
        if seconds > 0.1:
            self.kept, self.held = self.kept + self.held, 0

    def empty(self) -> None:
        self.kept, self.emptied = 0, self.emptied + 1


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def test_what_trials_left_goes_back_also_what_nccl_still_holds(allocator):
    cached = CachedMemory()
    cached.before()
    allocator.kept += GIB
    allocator.held += 5 * GIB
    cached.give_back()
    assert torch.cuda.memory_reserved() == 20 * GIB


@pytest.mark.parametrize("more", [0, GIB // 4, -GIB])
def test_a_program_keeps_its_cache_where_trials_left_nothing_notable(allocator, more):
    cached = CachedMemory()
    cached.before()
    allocator.kept += more
    cached.give_back()
    assert not allocator.emptied


def test_each_search_has_its_own_comparison(allocator):
    cached = CachedMemory()
    for _ in range(2):
        cached.before()
        allocator.kept += 5 * GIB
        cached.give_back()
        cached.give_back()
    allocator.kept += 5 * GIB  # cached later by the program itself
    cached.give_back()
    assert allocator.emptied == 2


def test_nothing_happens_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("there is none"))
    cached = CachedMemory()
    cached.before()
    cached.give_back()
