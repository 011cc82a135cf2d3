"""A callback for the Hugging Face Trainer. Optional: `weft run` works without it.

    trainer = Trainer(…, callbacks=[WeftCallback("policy.json")])   # then: weft run -- python train.py

It applies a policy during `train` and adds the verdict of `weft run --tune` to the log history.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from weft.errors import UnavailableError
from weft.integrations.callback import Training
from weft.policy import Policy


def _base() -> Any:
    try:
        return importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise UnavailableError(f"transformers cannot be used ({error}): pip install transformers") from None


class WeftCallback(_base()):  # type: ignore[misc]
    """Applies `policy` (a Policy or a policy file) during training and logs the result of live tuning."""

    def __init__(self, policy: Policy | str | os.PathLike[str] | None = None) -> None:
        self._training = Training(policy)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Apply the policy."""
        self._training.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the policy and log the verdict."""
        figures = self._training.end()
        if figures:
            state.log_history.append({"step": state.global_step, **figures})
