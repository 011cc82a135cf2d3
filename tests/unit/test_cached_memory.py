"""GPU memory that torch's allocator kept because of trials: when it is released."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weft.policy import Policy  # noqa: E402
from weft.tuning.live import cached_memory, frameworks  # noqa: E402
from weft.tuning.live.cached_memory import CachedMemory  # noqa: E402
from weft.tuning.live.frameworks import Frameworks  # noqa: E402

GIB = 1 << 30


class Allocator:
    """An allocator with `used` bytes in use, and cached ones besides."""

    def __init__(self, monkeypatch) -> None:
        self.used, self.kept, self.held, self.emptied = 20 * GIB, 2 * GIB, 0, 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(cached_memory.time, "sleep", self.wait)

    @property
    def reserved(self) -> int:
        return self.used + self.kept + self.held

    def stats(self) -> dict[str, int]:
        return {"reserved_bytes.all.current": self.reserved}

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
    assert allocator.reserved == 20 * GIB


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


class Models(Frameworks):
    """Can be changed in every way, and need no memory for it."""

    def _models(self, policy):
        return None, None


@pytest.mark.parametrize(
    ("trials", "emptied"),
    [
        ((Policy(max_ctas=8), Policy(priority="high")), 0),
        ((Policy(bucket_mb=100.0), Policy()), 1),
        ((Policy(reshard_after_forward=False), Policy()), 1),
    ],
)
def test_memory_goes_back_only_where_a_trial_may_have_taken_it(allocator, trials, emptied):
    """Inputs that become longer raise what the allocator keeps, too: it would have to get that again."""
    models = Models()
    for policy in trials:
        models.prepare(policy)
        models.apply(policy)
        allocator.kept += GIB
    models.release()
    assert allocator.emptied == emptied


def test_a_job_that_goes_on_under_framework_controls_keeps_its_cache(allocator):
    models, kept = Models(), Policy(bucket_mb=100.0)
    models.apply(kept)
    models.release()
    for policy in (kept, Policy(bucket_mb=100.0, max_ctas=8), kept):
        models.apply(policy)
        allocator.kept += GIB
    models.release()
    assert not allocator.emptied


def test_an_allocator_that_counts_nothing_is_left_alone(allocator, monkeypatch):
    def stats():
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GIB, 141 * GIB))
    models = Models()
    models.apply(Policy(bucket_mb=100.0))
    models.release()
    assert not allocator.emptied
    assert 70 * GIB < frameworks.spare_bytes() < 80 * GIB
