"""How long is a step of each configuration, and how much of it is communication? A minute for all of them.

    weft run -- python benchmarks/live/look.py [--gate FILE] [NAME …] [--tiny]

Prints a line of JSON for each: ms of a step, of its communication, of what is exposed, and of a step without
any. A configuration that hangs ends the program after its time.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import runpy
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from configs import CONFIGS, EXAMPLES, RANKS, Config
from job import take_gate
from search import Job, look

DEADLINE_S = 60


def measure(config: Config, step: Callable[[int], Any]) -> dict[str, Any]:
    """A few steps as they are, and without communication."""
    job = Job(step)
    job.steps(6)
    ms = statistics.median(job.ms_as_is(4) for _ in range(3))
    found = {"config": config.name, "ms": ms, **look(job)}
    job.silence()
    found["without_communication_ms"] = statistics.median(job.ms_as_is(4) for _ in range(3))
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", default=["*"], help="of configurations, * and ? allowed")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(take_gate(sys.argv[1:]))
    import torch
    import torch.distributed as dist

    from weft.comm import ghost

    ghost.impersonate(RANKS)
    sys.path.insert(0, str(EXAMPLES))
    import common

    for name in (name for name in CONFIGS if any(fnmatch.fnmatch(name, only) for only in args.names)):
        config, start = CONFIGS[name].tiny() if args.tiny else CONFIGS[name], time.monotonic()
        signal.alarm(DEADLINE_S)

        def loop(step: Callable[[int], Any], _: Any, config: Config = config) -> None:
            found = measure(config, step)
            found["kernels"] = found["kernels"][:4]
            print(json.dumps(found), flush=True)

        common.loop, sys.argv = loop, config.arguments(steps=1)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception as error:
            print(json.dumps({"config": name, "problem": f"{type(error).__name__}: {error}"}), flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
