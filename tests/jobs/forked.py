"""Runs a function or program in a forked rank, and exits without the interpreter's shutdown.

A fork has its parent's objects, and gloo threads; tearing them down may hang or abort (see `leaving`).
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


def run_to_end(part: Callable[[], object]) -> NoReturn:
    """Run `part`, then exit with 0, with the code of a SystemExit, or with a traceback and 1."""
    code = 1
    try:
        part()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_program(command: Sequence[str | Path]) -> None:
    """Run a Python program with its arguments as `python PROGRAM ARGUMENTS…` would."""
    sys.argv = [str(word) for word in command]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
