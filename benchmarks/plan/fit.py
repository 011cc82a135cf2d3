"""Fit the planner's figures to the half of the published runs that may be fitted.

    python benchmarks/plan/fit.py [--write]

Reads tests/data/published_training.csv (made by rows.py, which draws the half), prints the figures, and with
--write puts them into src/weft/plan/data/figures.json. The other half is judged by validate.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.plan.figures import SHIPPED, shipped
from weft.plan.fit import Free, fit
from weft.plan.published import load

ROOT = Path(__file__).resolve().parents[2]


def of(field: str, prior: float, spread: float, *software: str, most: float = 1e9) -> Free:
    return Free(tuple(f"software.{name}.{field}" for name in software), prior, spread, most)


SELENE = ("megatron-2021", "megatron-2022", "deepspeed-2021")
BYTEDANCE = ("megatron-2023", "megascale-2024")
NEMO = ("megatron-2024", "megatron-2025")
TITAN = ("torchtitan-2024", "torchtitan-2025", "torchtitan-eager")

# Few figures, each with a meaning and with what is known of it beforehand. The reference of `speed` is
# megatron-2022 on A100 and megatron-2025 on H100: theirs is 1.
FREE = [
    Free(("gemm.a100-80gb.bf16",), 0.80, 0.10, 1.0),
    Free(("gemm.h100.bf16",), 0.68, 0.10, 1.0),
    Free(("gemm.h100.fp8",), 0.58, 0.15, 1.0),
    # 500 W instead of 700 W
    Free(("scale.h100-96gb.h100",), 0.85, 0.10, 1.0),
    Free(("gemm_k_half",), 128.0, 0.7),
    Free(("gemm_tail",), 0.5, 0.5, 1.0),
    Free(("power",), 0.2, 0.5, 1.0),
    Free(("links.congestion",), 0.03, 0.7),
    of("speed", 0.95, 0.05, "megatron-2021", "deepspeed-2021"),
    of("speed", 0.85, 0.10, "megatron-2023"),
    of("speed", 0.90, 0.10, "megascale-2024"),
    of("speed", 1.0, 0.05, "megatron-2024"),
    of("speed", 1.0, 0.10, "maxtext-2024"),
    of("speed", 1.0, 0.10, *TITAN),
    of("attention_efficiency", 0.5, 0.3, *SELENE),
    of("attention_efficiency", 0.5, 0.3, *NEMO, "maxtext-2024"),
    of("attention_efficiency", 0.35, 0.3, *TITAN),
    of("elementwise", 1.4, 0.3, *SELENE),
    of("elementwise", 1.3, 0.3, *BYTEDANCE),
    of("elementwise", 1.2, 0.3, *NEMO, "maxtext-2024"),
    of("elementwise", 1.2, 0.3, "torchtitan-2024", "torchtitan-2025"),
    of("elementwise", 2.5, 0.3, "torchtitan-eager"),
    of("cast", 1.0, 0.5, *NEMO, "maxtext-2024"),
    of("cast", 2.0, 0.5, "torchtitan-2024"),
    of("cast", 4.0, 0.5, "torchtitan-2025"),
    of("routing", 1.5, 0.7, *NEMO),
    of("fusion", 0.7, 0.4, "torchtitan-2025", "torchtitan-2024", "torchtitan-eager", most=1.0),
    of("layer_us", 60.0, 0.4, *NEMO),
    of("network", 0.2, 0.5, "deepspeed-2021"),
    of("network", 0.6, 0.4, *BYTEDANCE),
    of("skew", 0.004, 0.7, *SELENE),
    of("skew", 0.004, 0.7, *BYTEDANCE),
    of("skew", 0.004, 0.7, *NEMO, "maxtext-2024"),
    of("skew", 0.004, 0.7, *TITAN),
    of("skew_fp8", 0.006, 0.7, *NEMO, *TITAN),
    of("skew_fp8", 0.006, 0.7, "maxtext-2024"),
]


ABOUT = {
    "command": "python benchmarks/plan/fit.py --write; links: benchmarks/plan/collectives.py --write",
    "data": "tests/data/published_training.csv (rows marked fit) and published_collectives.csv",
    "links": {
        "domain_share": "nccl-tests issues 212 and 326: 360 to 370 of 450 GB/s by ring on H100",
        "switch_gain": "the same: 480 GB/s where the switch adds",
        "others": "fitted to half of the published nccl-tests points",
    },
    "known": {
        "memory_share": "assumed; elementwise and cast are fitted on top of it",
        "attention, hides, grad_bytes, selective": "papers and recipes of each software (see rows.py)",
        "joins_maxima, gathers_fp8": "Transformer Engine's delayed scaling; torchao's tensorwise float8",
        "context_balanced": "torchtitan's long-sequence tables grow as without a balanced causal split",
        "speed": "reference 1: megatron-2022 on A100, megatron-2025 on H100; others fitted",
    },
}


def main() -> None:
    rows = [row for row in load(ROOT / "tests" / "data" / "published_training.csv") if row.half == "fit"]
    found = fit(shipped(), FREE, rows)
    document = json.loads(SHIPPED.read_text(encoding="utf-8"))
    for one in FREE:
        path = one.paths[0]
        if path.startswith("software."):
            name, field = path.removeprefix("software.").rsplit(".", 1)
            value = getattr(found.software[name], field)
        elif path.startswith("gemm."):
            _, gpu, precision = path.split(".")
            value = found.gemm[gpu][precision]
        elif path.startswith("scale."):
            _, gpu, other = path.split(".")
            document["gemm"][gpu] = {k: float(f"{v:.4g}") for k, v in found.gemm[gpu].items()}
            print(
                f"{found.gemm[gpu]['bf16'] / found.gemm[other]['bf16']:10.4g}  (prior {one.prior:g})  {path}"
            )
            continue
        elif path.startswith("links."):
            value = getattr(found.links, path.removeprefix("links."))
        else:
            value = getattr(found, path)
        print(f"{value:10.4g}  (prior {one.prior:g})  {' '.join(one.paths)}")
        for each in one.paths:
            home = document
            *way, last = each.split(".") if each.startswith(("gemm.", "links.")) else _way(each)
            for key in way:
                home = home[key]
            home[last] = float(f"{value:.4g}")
    document["about"] = ABOUT | {
        "fitted": {path: f"prior {one.prior:g}, spread {one.spread:g}" for one in FREE for path in one.paths},
        "rows": {
            source: sum(row.source == source for row in rows) for source in sorted({r.source for r in rows})
        },
    }
    if "--write" in sys.argv:
        SHIPPED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _way(path: str) -> list[str]:
    if not path.startswith("software."):
        return [path]
    name, field = path.removeprefix("software.").rsplit(".", 1)
    return ["software", name, field]


if __name__ == "__main__":
    main()
