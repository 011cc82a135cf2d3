"""Loaded by torch in a job under `weft run --tune`, `--trace`, `--steps` or `--ops`.

Torch finds this module by the entry point next to it. The module finds weft through an environment variable:
the program's module path is left unchanged, and weft need not be installed in the program's environment.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path


def start() -> None:
    """Start what the environment requests. Never raises: torch would pass the exception on to the program."""
    _start("WEFT_TUNE", "weft.tuning.live.job", "is not tuned")
    _start("WEFT_TRACE", "weft.tuning.live.tracing", "is traced by time, not by steps")
    _start("WEFT_STEPS", "weft.tuning.live.step_hook", "publishes no step times")
    _start("WEFT_OPS", "weft.ops.adopt", "uses no fused operations")


def _start(variable: str, module: str, otherwise: str) -> None:
    try:
        if os.environ.get(variable):
            _import_weft(os.environ["WEFT_TUNE_HOME"])
            importlib.import_module("weft.logs").show()
            importlib.import_module(module).start()
    except Exception as error:
        sys.stderr.write(f"weft: this process {otherwise}: {type(error).__name__}: {error}\n")


def _import_weft(home: str) -> None:
    if "weft" in sys.modules:
        return
    folder = Path(home, "weft")
    spec = importlib.util.spec_from_file_location(
        "weft", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["weft"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["weft"]  # do not leave a partly initialised module
        raise
