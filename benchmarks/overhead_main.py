"""Shared by the overhead benchmarks: options, output lines and the result file."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def main(about: str | None, name: str, measure: Callable[[int], Rows]) -> None:
    """Measure, print a line per row, and write the results if requested."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = measure(args.repeats)
    for row in rows:
        kernels = f"  {row['kernels']} kernels" if "kernels" in row else ""
        kernels += "  cold" if row.get("cold") else ""
        print(
            f"{row.get('policy', ''):<64} {row['threads']} threads{kernels}  {row['cost_ns']:>6} ns".lstrip()
        )
    if args.out:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        document = {"command": f"python benchmarks/{name}", "machine": machine, "rows": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
