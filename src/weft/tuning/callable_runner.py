"""Runs a callable under one policy after another, on all ranks, and leaves the process unchanged."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft.errors import UnavailableError, WeftError
from weft.policy import Policy
from weft.ranks import Ranks

if TYPE_CHECKING:
    from weft.tuning.live.options import Facts

_log = logging.getLogger(__name__)

LEARNT_CALLS = 3  # profiled calls before any policy is tried
SAMPLE_MS = 20.0  # a shorter callable is called several times per measurement
MOST_CALLS = 100
MOST_CANDIDATES = 40


class CallableRunner:
    """Context manager that runs the callable under one policy after another, then restores the process."""

    def __init__(
        self, fn: Callable[[], object], setup: Callable[[], object] | None, device: str, ranks: Ranks
    ) -> None:
        self.fn, self.setup, self.ranks = fn, setup, ranks
        self.cuda = device == "cuda"
        self.calls = 1
        self.facts: Facts | None = None
        self.applied: Policy | None = None
        self.controls: Any = None
        if self.cuda:
            self.controls = _controls(ranks.size)

    def __enter__(self) -> CallableRunner:
        try:
            if self.controls is None:
                self._run(1)
            else:
                self._learn()
            took = self.ranks.most(self._run(1))
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self.calls = max(1, min(MOST_CALLS, math.ceil(SAMPLE_MS / max(took, 1e-3))))
        return self

    def __exit__(self, *problem: object) -> None:
        if self.controls is None:
            return
        from weft.shim import apply

        self.controls.apply(Policy())
        apply.restore()
        if problem[0] is None:
            self.synchronize()
            self.ranks.gather(None)  # no rank still uses a communicator released here
            self.controls.release()

    def options(self) -> list[Policy]:
        """The policies that can matter for this callable, judged from all ranks' profiles."""
        from weft.tuning.live.levers import search_stages

        if self.facts is None:
            return []
        choices = [[{}, *stage.changes] for stage in search_stages(self.facts, Policy())]
        changes = sorted(itertools.product(*choices), key=lambda parts: sum(map(bool, parts)))
        policies = [
            dataclasses.replace(Policy(), **{k: v for part in parts for k, v in part.items()})
            for parts in changes
        ]
        return [policy for policy in policies if not policy.is_neutral][:MOST_CANDIDATES]

    def prepared(self, policies: Sequence[Policy]) -> list[Policy]:
        """Prepare the policies' CTA counts; returns the policies whose count works on every rank."""
        wanted = sorted({p.max_ctas for p in policies if p.max_ctas is not None})
        ready: set[int | None] = {None}
        for ctas in wanted if self.controls is not None else ():
            self.synchronize()
            self.ranks.gather(None)
            try:
                self.controls.prepare(Policy(max_ctas=ctas), None)
                done = True
            except WeftError as error:
                _log.debug("%d CTAs are not tried: %s", ctas, error)
                done = False
            ready |= {ctas} if all(self.ranks.gather(done)) else set()
        return [p for p in policies if p.max_ctas in ready or self.controls is None]

    def measure(self, policy: Policy) -> float:
        """Milliseconds per call on the slowest rank."""
        changed, problem = policy != self.applied, ""
        try:
            self._apply(policy)
        except WeftError as error:
            problem = str(error)
        problems = [text for text in self.ranks.gather(problem) if text]
        if problems:  # all ranks must run the callable, or none: it may hold collectives
            self.applied = None
            raise UnavailableError(problems[0])
        if changed:
            self._run(1)  # warm up: kernels are reloaded when their launch method changes
        return self.ranks.most(self._run(self.calls))

    def synchronize(self) -> None:
        if self.controls is not None:
            self.controls.synchronize()

    def _apply(self, policy: Policy) -> None:
        if self.controls is not None and policy != self.applied:
            self.synchronize()
            self.controls.apply(policy)
        self.applied = policy

    def _learn(self) -> None:
        from weft.tuning.live.options import Facts, merge

        self._run(1)
        self._ready()
        self.controls.learn()  # until facts(), only the callable may run
        self._timed(LEARNT_CALLS)
        own = self.controls.facts(LEARNT_CALLS)
        self.facts = merge([Facts.from_dict(found) for found in self.ranks.gather(own.to_dict())])

    def _run(self, calls: int) -> float:
        """Milliseconds per call on this rank; all ranks start together."""
        self._ready()
        return self._timed(calls)

    def _ready(self) -> None:
        if self.setup is not None:
            self.setup()
        self.synchronize()
        self.ranks.gather(None)

    def _timed(self, calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            self.fn()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e3 / calls


def _controls(world: int) -> Any:
    """The live controls for this process's GPU. Raises UnavailableError, with the fix, if there are none."""
    try:
        import torch
    except ImportError:
        raise UnavailableError("weft.tune needs PyTorch: pip install torch") from None
    if not torch.cuda.is_available():
        raise UnavailableError(
            'this machine has no GPU that PyTorch can use; weft.tune(fn, device="cpu") tunes without one'
        )
    from weft.shim import restart
    from weft.tuning.live.controls import LaunchControls

    restart.require()
    return LaunchControls(Policy(), world)
