"""How a forked rank runs its part, and ends without the interpreter's own end.

A fork has its parent's objects and threads of gloo; tearing them down may hang or abort (see `leaving`).
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
    """Run `part` and end this process: with 0, the code of a SystemExit, or 1 and a traceback."""
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
