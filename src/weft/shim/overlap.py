"""The policy of the running process, from Python."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from weft.errors import UnavailableError, WeftError
from weft.policy import Policy
from weft.shim import binding, communicators, restart

PREPARE_S = 20.0  # for new communicators

_current: ContextVar[Policy | None] = ContextVar("weft_policy", default=None)
_routed: int | None = None
"""CTAs that all ranks agreed on; None: as the communicators were made."""


@contextmanager
def overlap(policy: Policy) -> Iterator[None]:
    """Launch what is inside under `policy`; raises with the fix in a process not started by `weft run`.

    Holds for the whole process, from the next launch on; nests; the policy before comes back at the end.
    A policy with `max_ctas` moves the collectives to other communicators, between two waits for the GPU: all
    ranks enter and leave together, after the first collective, and best around the loop, not in it. Where
    that cannot be had on every rank, a warning says why, and the rest of the policy holds.
    """
    restart.require()
    outer = _current.get()
    before = outer.max_ctas if outer else None
    if policy.max_ctas != before:
        _use_ctas(policy.max_ctas)
    binding.set_policy(policy)
    token = _current.set(policy)
    try:
        yield
    finally:
        _current.reset(token)
        binding.set_policy(outer)
        if policy.max_ctas != before:
            _use_ctas(before)


def again() -> None:
    """Set the policy of the innermost `overlap` anew, or the job's where there is none."""
    binding.set_policy(_current.get())
    if _routed is not None:
        communicators.route(_routed)


def _use_ctas(ctas: int | None) -> None:
    """From here on collectives have at most so many CTAs, on all ranks or none; None: as they were made."""
    global _routed
    if ctas is None:
        _routed = None
        if communicators.available():
            _wait_for_gpu()
            communicators.route(None)
        return
    _wait_for_gpu()
    problem = ""
    try:
        if not communicators.available():
            raise UnavailableError("the program has made no NCCL communicator yet")
        communicators.prepare(ctas, PREPARE_S)
    except WeftError as error:
        problem = str(error)
    problems = [text for text in _of_all_ranks(problem) if text]
    if problems:
        warnings.warn(
            f"weft: comm.max_ctas {ctas} is not applied ({problems[0]}); "
            "`weft run --policy` sets it when the program starts",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    communicators.route(ctas)
    _routed = ctas


def _wait_for_gpu() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _of_all_ranks(text: str) -> list[str]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return [text]
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return found
