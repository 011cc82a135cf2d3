"""One job: an example as rank 0 of two, the other a ghost. It starts up, then waits for its turn on the GPU.

python benchmarks/live/job.py [--gate FILE] examples/ddp.py …
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from configs import RANKS


def wait_for(gate: Path) -> None:
    """Wait until the file is there; end with whoever should make it."""
    parent = os.getppid()
    while not gate.exists():
        time.sleep(0.02)
        if os.getppid() != parent:
            sys.exit(1)


def take_gate(arguments: list[str]) -> list[str]:
    """Do the imports, which take seconds and no GPU, then wait; returns the rest of the command line."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.nn.parallel  # noqa: F401

    if arguments[:1] == ["--gate"]:
        wait_for(Path(arguments[1]))
        return arguments[2:]
    return arguments


def main() -> None:
    rest = take_gate(sys.argv[1:])
    from weft.comm import ghost

    ghost.run_script(["--ranks", str(RANKS), *rest])


if __name__ == "__main__":
    main()
