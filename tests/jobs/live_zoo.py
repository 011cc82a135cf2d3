"""Runs many small jobs of `live_job`, each with ranks forked from this process: torch is imported only once.

Reads a job per line, {"folder": "…", "ranks": 4, "weft": true, "env": {…}}, and answers "played" when it is over.
Leaves in the folder: rankN.json (what the job recorded), N.out, N.err, tuning.N.json, and codes.json.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from pathlib import Path

import live_job
import torch
from ports import held_port

from weft.shim.inject import AUTOLOAD

sys.path.append(str(AUTOLOAD))
import weft_autoload

DEADLINE_S = 150


def rank(number: int, scenario: dict, folder: Path, port: int) -> object:
    """Run one rank in a forked child. Returns objects to keep alive: tearing them down in a fork may hang."""
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{number}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
    common = {"WORLD_SIZE": str(scenario["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {
        **common,
        "RANK": str(number),
        "RECORD": str(folder),
        "WEFT_JOB": str(folder),
        **scenario["env"],
    }
    live_job.settings()
    if scenario.get("weft", True):
        weft_autoload.start()
    return live_job.main()


def play(scenario: dict, folder: Path, port: int) -> None:
    folder.mkdir()
    children, began = {}, time.monotonic()
    locked = None
    if scenario.get("lock"):
        locked = sqlite3.connect(scenario["env"]["WEFT_STORE"], isolation_level=None)
        locked.execute("BEGIN EXCLUSIVE")
    for number in range(scenario["ranks"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                kept = rank(number, scenario, folder, port)
                code = 0 if kept else 1
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        children[pid] = number
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[children[pid]] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - began > DEADLINE_S:
            for left in [pid for pid, number in children.items() if number not in codes]:
                os.kill(left, 9)
        time.sleep(0.02)
    if locked is not None:
        locked.close()
    (folder / "codes.json").write_text(json.dumps([codes[n] for n in range(len(codes))]))


def warm_up() -> None:
    """Trigger torch's late imports once for all ranks."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    weight = torch.zeros(2, requires_grad=True)
    weight.sum().backward()
    for kind in (torch.optim.SGD, torch.optim.Adam):
        kind([weight], lr=0.1).step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up()
    for line in sys.stdin:
        scenario = json.loads(line)
        with held_port() as port:
            play(scenario, Path(scenario["folder"]), port)
        print("played", flush=True)
