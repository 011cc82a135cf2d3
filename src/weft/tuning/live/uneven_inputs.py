"""Ranks with uneven inputs: torch's Join lets the others continue when one rank has used up its inputs.

That rank then takes part in their collectives but has no steps of its own, so it comes to no meeting of live
tuning: the others would wait for it there, and it would wait for their collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_log = logging.getLogger("weft.live")
_COUNT = "_get_num_nonjoined_procs"


def on_inputs_used_up(early: Callable[[], None]) -> Callable[[], None]:
    """Call `early` whenever this rank has no inputs left but others do; returns a function that undoes this.

    Join counts the ranks that still have inputs, in a collective that those ranks enter before their next
    step. So all ranks have ended the same steps by then.
    """
    from torch.distributed.algorithms.join import Join

    join: Any = Join
    real = getattr(join, _COUNT, None)
    if real is None:
        _log.debug("Join of this torch does not count ranks: its uneven inputs are not detected")
        return lambda: None

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        others = real(self, *args, **options)
        if others:
            with suppress(Exception):
                early()
        return others

    setattr(join, _COUNT, counted)

    def restore() -> None:
        if getattr(join, _COUNT, None) is counted:
            setattr(join, _COUNT, real)

    return restore
