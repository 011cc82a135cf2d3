"""Rules for collectives on a real NCCL: CTAs and time of each collective under several rules.

Two ghost ranks on one GPU (NCCL 2.30 or newer), by per-call configuration and by the tuner plugin alone;
about 10 s each. The program is that of tests/gpu/test_rules_gpu.py.

    WEFT_NCCL=…/libnccl.so.2 python benchmarks/nccl_rules.py [--out benchmarks/results/gpu/nccl_rules.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tests/gpu/programs/rules_ghosts.py"
DEADLINE_S = 120
WAYS = {"config": "0", "tuner": "1"}  # value of WEFT_NO_CALL_CONFIG


def run(without_config: str) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "WEFT_NO_CALL_CONFIG": without_config}
    program = [sys.executable, str(PROGRAM)]
    with tempfile.TemporaryDirectory() as folder:
        policy = f"{folder}/policy.json"
        subprocess.run([*program, policy], env=env, timeout=DEADLINE_S, check=True)
        command = [sys.executable, "-m", "weft", "run", "--policy", policy, "--", *program]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for phase in found["phases"]:
        phase["digests"] = len(set(phase["digests"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = {"torch": importlib.metadata.version("torch"), "ranks": 2, "ways": {}}
    for way, without_config in WAYS.items():
        found = document["ways"][way] = run(without_config)
        print(f"{way}: NCCL {found['nccl']}, {found['why']}")
        for phase in found["phases"]:
            calls = (f"{name} {call['ctas']} {call['ms']:.3f} ms" for name, call in phase["calls"].items())
            print(f"  {phase['name']:<8} {'; '.join(calls)}")
        print(f"  limit 6: {found['limited']['ctas']}, {found['limit_bytes']} bytes; {found['counters']}")
        print(f"  send and receive: {found['exchanged']['ctas']}; captured: {found['captured']}")
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
