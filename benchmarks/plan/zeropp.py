"""Compression against published runs: the speed-up of ZeRO++ over ZeRO-3 (arXiv:2306.10209, figures 6 to 8).

python benchmarks/plan/zeropp.py [--out benchmarks/results/plan/zeropp.json]

384 V100 in DGX-2 nodes of 16. Nothing is fitted to these rows; the figures are Megatron-LM's of 2022 with the
16-bit gradients of DeepSpeed. The comparison uses the ratio of the two rates, which does not depend on how
FLOPs are counted. Also: the uncompressed all-reduces of BERT-Large that the paper on 1-bit Adam
(arXiv:2102.02888, table 1) published. The paper on PowerSGD has no pair of step times with a complete
configuration.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.gpu.collectives import collective_s, group
from weft.gpu.presets import GPU_PRESETS
from weft.gpu.specs import Throughput
from weft.plan import Model, Network, TrainingJob, predict
from weft.plan.figures import shipped
from weft.plan.model_presets import MODELS as MODELS

V100 = replace(
    GPU_PRESETS["a100-40gb"],  # figures of the V100 data sheet and the DGX-2 user guide
    name="v100",
    title="NVIDIA V100 32GB",
    arch="sm_70",
    compute_capability=(7, 0),
    sms=80,
    memory_bytes=32 << 30,
    memory_bytes_per_s=900e9,
    throughput=Throughput(bf16_tflops=125.0, fp16_tflops=125.0, fp32_tflops=15.7, fp64_tflops=7.8),
    links=6,
    link_bytes_per_s=25e9,
)
# 12 l h^2 = 138B with the width of GPT-3; the paper gives no dimensions.
GPT_138B = Model(
    name="gpt-138b", layers=76, hidden=12288, heads=96, ffn=49152, vocab=51200, tied=True, positions=2048
)
# model, tokens of a micro-batch, Gbit/s of a node, TFLOP/s with ZeRO-3, with ZeRO++ (labels of the bars)
PUBLISHED = (
    ("gpt-18b", 1024, 400, 25, 35),
    ("gpt-138b", 1024, 400, 23, 36),
    ("gpt-18b", 2048, 400, 40, 53),
    ("gpt-138b", 2048, 400, 36, 50),
    ("gpt-18b", 1024, 100, 14, 31),
    ("gpt-138b", 1024, 100, 11, 22),
    ("gpt-18b", 2048, 100, 26, 46),
    ("gpt-138b", 2048, 100, 20, 38),
    ("gpt-18b", 2048, 200, 37, 50),
    ("gpt-18b", 2048, 800, 47, 54),
    ("gpt-138b", 2048, 200, 32, 48),
    ("gpt-138b", 2048, 800, 48, 55),
)
SOFTWARE = "megatron-2022"
# 1-bit Adam, table 1: network, GPUs, GPUs of a node, Gbit/s of a node (TCP: measured by iperf), milliseconds
ALL_REDUCES = (
    ("TCP", 64, 4, 4.1, 2205.86),
    ("TCP", 64, 4, 4.1, 2275.43),
    ("TCP", 64, 4, 4.1, 2259.36),
    ("TCP", 8, 4, 4.1, 1897.21),
    ("InfiniBand EDR", 64, 8, 100.0, 316.18),
    ("InfiniBand EDR", 64, 8, 100.0, 336.4),
    ("InfiniBand EDR", 64, 8, 100.0, 339.52),
    ("InfiniBand EDR", 8, 8, 100.0, 28.18),
)
BERT_LARGE_BYTES = 0.34e9 * 2


def all_reduces() -> list[dict[str, Any]]:
    """Published all-reduces of BERT-Large's 16-bit gradients next to the predicted ones."""
    rows = []
    for name, gpus, node, gbit, published_ms in ALL_REDUCES:
        network = Network(name=name, domain=node, rail_bytes_per_s=gbit / node / 8 * 1e9)
        ranks = group(gpus, 1, network)
        found = collective_s("all_reduce", BERT_LARGE_BYTES, ranks, V100, network, shipped().links)
        error = round(100 * (1e3 * found / published_ms - 1))
        rows.append({"network": name, "gpus": gpus, "published_ms": published_ms, "error_pct": error})
    return rows


def compare() -> dict[str, Any]:
    """Every published pair next to the predicted one."""
    figures = shipped().with_software(SOFTWARE, grad_bytes=2.0)
    rows = []
    for name, tokens, gbit, base, fast in PUBLISHED:
        job = TrainingJob(
            model=MODELS["gpt-18b"] if name == "gpt-18b" else GPT_138B,
            gpu=V100,
            gpus=384,
            seq_len=tokens,
            sharding="zero3",
            recompute="full",
            precision="fp16",
            network=Network(name="dgx2", domain=16, rail_bytes_per_s=gbit / 16 / 8 * 1e9, leaf_gpus=4096),
            software=SOFTWARE,
        )
        plain = predict(job, figures, check_memory=False)
        packed = predict(job.but(compression="zero++"), figures, check_memory=False)
        ratio = plain.step_s / packed.step_s
        rows.append(
            {
                "model": name,
                "tokens": tokens,
                "node_gbit_s": gbit,
                "published_speedup": round(fast / base, 3),
                "predicted_speedup": round(ratio, 3),
                "error_pct": round(100 * (ratio / (fast / base) - 1), 1),
            }
        )
    errors = [abs(row["error_pct"]) for row in rows]
    mean = round(sum(errors) / len(errors), 1)
    return {"rows": rows, "mean_pct": mean, "max_pct": max(errors), "all_reduces": all_reduces()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan/zeropp.json"))
    options = parser.parse_args()
    found = compare()
    for row in found["rows"]:
        print(row)
    print(f"mean error of the speed-up {found['mean_pct']}%, largest {found['max_pct']}%")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": "python benchmarks/plan/zeropp.py", "simulated": True, **found}
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
