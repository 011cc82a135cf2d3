"""Diagnostics: the standard `logging` under the name `weft`, on stderr on request.

`WEFT_LOG=debug` (or info, warning) shows them in every process of a job, `weft -v …` in the command itself.
Without either, nothing is shown and no handler is added.
"""

from __future__ import annotations

import logging
import os

LOG_VARIABLE = "WEFT_LOG"
LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "weft %(process)d %(levelname).1s %(relativeCreated).0f ms %(name)s: %(message)s"


def show(level: str | None = None) -> None:
    """Print diagnostics of this level and above on stderr; None: the level in WEFT_LOG, if it is set.

    An unknown level counts as debug.
    """
    wanted = (level if level is not None else os.environ.get(LOG_VARIABLE, "")).strip().lower()
    if not wanted:
        return
    logger = logging.getLogger("weft")
    logger.setLevel(wanted.upper() if wanted in LEVELS else "DEBUG")
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        handler = _Handler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False  # the program's own handlers would print each line twice


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs to stderr; an error while logging never reaches the program."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass
