"""The policy of the running process, from Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from weft.policy import Policy
from weft.shim import binding, restart

_current: ContextVar[Policy | None] = ContextVar("weft_policy", default=None)


@contextmanager
def overlap(policy: Policy) -> Iterator[None]:
    """Launch what is inside under `policy`; raises with the fix in a process not started by `weft run`.

    Holds for the whole process, from the next launch on; nests; the policy before comes back at the end.
    """
    restart.require()
    outer = _current.get()
    binding.set_policy(policy)
    token = _current.set(policy)
    try:
        yield
    finally:
        _current.reset(token)
        binding.set_policy(outer)


def again() -> None:
    """Set the policy of the innermost `overlap` anew, or the job's where there is none."""
    binding.set_policy(_current.get())
