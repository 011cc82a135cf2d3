"""JobOutput: what a rank of a tuned job prints, and what it writes for `weft run` and `weft top`."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.files import write_whole
from weft.policy import Policy
from weft.shim.step_times import STEPS_VARIABLE
from weft.tuning.live.settings import start_policy
from weft.tuning.live.step_hook import published_steps
from weft.tuning.live.trial import Record
from weft.tuning.live.tuned_job import RECORD_FILE, result_file

if TYPE_CHECKING:
    from weft.tuning.live.session import Session

_log = logging.getLogger("weft.live")


def warn(line: str) -> None:
    """Print a line on stderr, on any rank."""
    with suppress(Exception):
        sys.stderr.write(f"weft: {line}\n")
        sys.stderr.flush()


class JobOutput:
    """Output of one rank. Never raises: a full disk or a closed stderr must not end the program."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.leads = False
        """Whether this rank reports for the job."""
        self.record: Record | None = None
        self._published: Any = None
        self._publishes = STEPS_VARIABLE not in os.environ  # else a separate hook counts the steps
        self._shown: tuple[str, Policy] | None = None

    def say(self, line: str) -> None:
        """Print a line, on the leader only."""
        if self.leads:
            warn(line)

    def tell(self, result: dict[str, Any]) -> None:
        """Write the result for `weft run`, which reads it after the program ends, for whatever reason."""
        folder = os.environ.get("WEFT_JOB")
        if folder and self.rank is not None:
            with suppress(Exception):
                write_whole(Path(folder, result_file(self.rank)), json.dumps(result))

    def write_record(self) -> None:
        """Write all steps, for the page of `weft run --tune --html`."""
        folder = os.environ.get("WEFT_JOB")
        if folder and self.leads and self.record is not None:
            with suppress(Exception):
                labels = [policy.label for policy in self.record.policies]
                write_whole(Path(folder, RECORD_FILE), json.dumps(self.record.to_dict(labels)))

    def publish(self, session: Session | None, *, ended: int = 0, over: bool = False) -> None:
        """Publish ended steps and the tuning's phase for `weft top`: a few stores into shared memory.

        `session`: the tuning; None before it begins. `over`: whether it has ended; its policy stays.
        """
        try:
            if self._published is None:
                self._published = published_steps(self.rank)
            if ended and self._publishes:
                self._published.step(ended)
            watching = session is not None and session.watching
            phase = "over" if over else "watching" if watching else "searching"
            policy = start_policy() if session is None else session.policy
            if self._shown is None or phase != self._shown[0] or policy is not self._shown[1]:
                self._published.tuning(phase, policy.label)
                self._shown = phase, policy
        except Exception:
            _log.debug("steps are not published", exc_info=True)
