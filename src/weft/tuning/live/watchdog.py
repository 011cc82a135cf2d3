"""Guard: reverts to a harmless policy if a trial does not end in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Guard:
    """Calls `rescue` on a separate thread if it is not disarmed in time. `stop` ends the thread."""

    def __init__(self, rescue: Callable[[], None]) -> None:
        self._rescue = rescue
        self._changed = threading.Condition()
        self._until: float | None = None
        self._fired: float | None = None
        self._thread: threading.Thread | None = None

    def arm(self, seconds: float) -> None:
        """Start a countdown of this many seconds."""
        with self._changed:
            self._until, self._fired = time.monotonic() + seconds, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="weft stall guard", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def disarm(self) -> float | None:
        """Stop the countdown; returns the seconds since the deadline passed, or None if it has not."""
        with self._changed:
            fired, self._until, self._fired = self._fired, None, None
            return None if fired is None else time.monotonic() - fired

    def stop(self) -> None:
        """End the thread; `arm` starts a new one."""
        with self._changed:
            self._until = self._thread = None
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                left = None if self._until is None else self._until - time.monotonic()
                if left is not None and left <= 0:
                    # Record the deadline, not the current time: after a SIGSTOP this thread itself runs late.
                    self._until, self._fired = None, self._until
                    with suppress(Exception):  # an error in `rescue` must not end this thread
                        self._rescue()
                else:
                    self._changed.wait(left)
