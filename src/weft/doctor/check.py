"""Check, a single finding; and `guarded`, which turns errors and hangs of a check into findings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weft.errors import WeftError

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One finding. `fail`: overlap cannot work on this machine until it is fixed."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """A command or a setting; empty if nothing needs to be done."""

    def to_dict(self) -> dict[str, str]:
        """The finding as it appears in `weft doctor --json`."""
        return {"name": self.name, "status": self.status, "detail": self.detail, "fix": self.fix}


def guarded(name: str, check: Callable[[], list[Check]], limit_s: float) -> list[Check]:
    """The findings of a check; a single `fail` if it raises or takes longer than `limit_s` seconds."""
    found: list[Check] = []

    def work() -> None:
        try:
            found.extend(check())
        except WeftError as error:
            found.append(Check(name, "fail", str(error)))
        except Exception as error:
            detail = f"the check itself failed: {type(error).__name__}: {error}"
            found.append(Check(name, "fail", detail, "report it with the output of `weft doctor --json`"))

    # A thread that hangs in a library cannot be stopped, but a daemon thread does not keep the process alive.
    thread = threading.Thread(target=work, name=f"doctor {name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        fix = "check for a hung driver with `nvidia-smi` and `dmesg`"
        return [Check(name, "fail", f"no answer within {limit_s:.0f} s", fix)]
    return list(found)
