"""Do two runs of a suite agree within their intervals?

    PYTHONPATH=src python3 benchmarks/lab/agree.py RUN1/quick.jsonl RUN2/quick.jsonl

Prints each candidate timed in both runs whose intervals do not overlap; exit code 1 if these are more than
one in twenty.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.bench.results import load_results
from weft.measure.intervals import bootstrap_ci


def by_key(path: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["cell"], row["candidate"]): row for row in load_results(Path(path))[1] if row["ci_ms"]}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    first, second = map(by_key, sys.argv[1:])
    shared = [key for key in first if key in second]
    if not shared:
        sys.exit("the two files have no candidate in common")
    apart = []
    for key in shared:
        low, high = bootstrap_ci(first[key]["samples_ms"])
        other_low, other_high = bootstrap_ci(second[key]["samples_ms"])
        if low > other_high or other_low > high:
            apart.append(key)
            print(
                f"{key[0]} {key[1]}: {low:.3f} to {high:.3f} ms, then {other_low:.3f} to {other_high:.3f} ms"
            )
    ratios = sorted(second[key]["ms"] / first[key]["ms"] for key in shared)
    middle = ratios[len(ratios) // 2]
    print(f"{len(shared) - len(apart)} of {len(shared)} agree; second over first: median {middle:.4f}")
    print(f"smallest {ratios[0]:.4f}, largest {ratios[-1]:.4f}")
    sys.exit(len(apart) > len(shared) / 20)


if __name__ == "__main__":
    main()
