"""Real jobs of two ranks over gloo in which no policy changes anything: how often is a gain claimed?

    python benchmarks/live/gloo.py [--jobs 100] [--steps 260] [--out FILE]

Steps are timed in real (wall-clock) time, with whatever else the machine does meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from document import show

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "jobs"


def scenarios(jobs: int, steps: int, folder: Path) -> list[dict[str, object]]:
    """The jobs in the form that tests/jobs/live_zoo.py reads."""
    env = {"REAL": "1", "STEPS": str(steps), "WEFT_TUNE": "1", "WEFT_TUNE_CONTROLS": "live_job:FakeControls"}
    return [
        {
            "folder": str(folder / str(n)),
            "ranks": 2,
            "env": {**env, "WEFT_STORE": str(folder / f"{n}.sqlite")},
        }
        for n in range(jobs)
    ]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = "".join(json.dumps(job) + "\n" for job in scenarios(args.jobs, args.steps, folder))
        paths = f"{ROOT / 'src'}:{JOBS}"
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WEFT_TUNE_HOME": str(ROOT / "src")}
        zoo = [sys.executable, str(JOBS / "live_zoo.py")]
        subprocess.run(zoo, env=env, check=True, input=lines, text=True, stdout=subprocess.DEVNULL)
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("*/tuning.0.json"))]
        codes = [json.loads(path.read_text()) for path in folder.glob("*/codes.json")]
    claims = [result["text"] for result in results if result["state"] == "kept"]
    over = [result for result in results if result["state"] != "stopped"]
    document = {
        "command": f"python benchmarks/live/gloo.py --jobs {args.jobs} --steps {args.steps}",
        "jobs": len(results),
        "searches_over": len(over),
        "claims": len(claims),
        "texts": claims,
        "scatter_pct": sorted(round(result["noise_pct"], 1) for result in over if result["noise_pct"]),
        "taken_back": sum(bool((result.get("watch") or {}).get("reverted")) for result in results),
        "all_exit_codes_0": all(code == 0 for job in codes for code in job),
    }
    show(document, args.out)


if __name__ == "__main__":
    main()
