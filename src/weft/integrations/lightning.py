"""A callback for Lightning. Optional: `weft run` works without it.

    trainer = Trainer(callbacks=[WeftCallback("policy.json")])      # then: weft run -- python train.py

It applies a policy during `fit` and passes the verdict of `weft run --tune` to the trainer's loggers.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from weft.errors import UnavailableError
from weft.integrations.callback import Training
from weft.policy import Policy


def _base() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(name.split(".")[0]):
            return importlib.import_module(name).Callback
    raise UnavailableError("Lightning is not installed: pip install lightning")


class WeftCallback(_base()):  # type: ignore[misc]
    """Applies `policy` (a Policy or a policy file) during `fit` and logs the result of live tuning."""

    def __init__(self, policy: Policy | str | os.PathLike[str] | None = None) -> None:
        self._training = Training(policy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Apply the policy."""
        self._training.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the policy and log the verdict."""
        figures = self._training.end()
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the policy."""
        self._training.end()
