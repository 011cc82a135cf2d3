"""Precompute how much compute and collectives slow each other: the table that plans look up.

    python benchmarks/plan/contention.py

Writes src/weft/plan/data/contention.json. Run it again when the simulator or its profiles change; a test
compares a few entries. Pairs that are not in the table are simulated on demand.
"""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.gpu.collectives import Group
from weft.plan.overlap import CANDIDATES, COPY, KERNELS, TABLE, network_rate_gb_s, simulate_pair
from weft.policy import Policy

GPUS = ("h100", "h200", "a100-40gb", "a40", "mi250x", "mi300x")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
POLICIES = (Policy(), *CANDIDATES, COPY)


def main() -> None:
    pairs: list[dict[str, Any]] = []
    for gpu in GPUS:
        rates = sorted({0.0, *(network_rate_gb_s(gpu, Group(64, n, 64)) for n in (1, 2, 4, 8))})
        for kernel, collective, rate in product(KERNELS, COLLECTIVES, rates):
            line = []
            for policy in POLICIES:
                if policy.engine == "dma" and (rate or collective in ("reduce_scatter", "all_reduce")):
                    line.append(None)
                    continue
                found = simulate_pair(gpu, kernel, collective, rate, policy)
                line.append([round(value, 4) for value in astuple(found)])
            pairs.append({"pair": [gpu, kernel, collective, rate], "contention": line})
        print(gpu, len(pairs))
    head = {
        "what": "time while compute runs over time alone; "
        "compute seconds lost for each second of the collective; time alone over that without a control",
        "command": "python benchmarks/plan/contention.py",
        "policies": [policy.to_dict() for policy in POLICIES],
    }
    lines = ",\n".join("  " + json.dumps(pair) for pair in pairs)
    text = json.dumps(head, indent=1).rstrip("}\n") + ',\n "pairs": [\n' + lines + "\n ]\n}\n"
    json.loads(text)
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
