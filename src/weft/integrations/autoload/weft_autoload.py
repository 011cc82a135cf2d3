"""Torch loads this when it is imported in a job under `weft run --tune`, by the entry point beside this file.

It finds weft by an environment variable: the program's own module path stays as it is, and weft need not be
installed where the program runs.
"""

import importlib.util
import os
import sys
from pathlib import Path


def start() -> None:
    """Never raises: torch would pass it on to the program."""
    try:
        if os.environ.get("WEFT_TUNE") == "1":
            _import_weft(os.environ["WEFT_TUNE_HOME"])
            from weft import logs
            from weft.tuning.live import job

            logs.show()
            job.start()
    except Exception as error:
        sys.stderr.write(f"weft: this process is not tuned: {type(error).__name__}: {error}\n")


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
        del sys.modules["weft"]  # half of it helps nobody
        raise
