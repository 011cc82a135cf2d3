"""From the collected table of published runs to jobs that can be predicted, with what had to be assumed.

    python benchmarks/plan/rows.py COLLECTED.csv tests/data/published_training.csv

Keeps the sources with complete configurations: Korthikanti et al. (table 5, section 6.3), Narayanan et al.
SC'21 (tables 1 and 2), MegaScale, NVIDIA dgxc-benchmarking on H100, torchtitan. The half to be fitted is
drawn here, once, source by source, with the seed below.
"""

from __future__ import annotations

import csv
import random
import re
import sys
from pathlib import Path

SEED = 8
COLUMNS = [
    "source",
    "half",
    "label",
    "step_s",
    "software",
    "gpu",
    "network",
    "gpus",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "gated",
    "tied",
    "experts",
    "experts_per_token",
    "window",
    "parallel_block",
    "tp",
    "pp",
    "cp",
    "ep",
    "expert_tp",
    "dp",
    "interleave",
    "micro_batch",
    "global_batch",
    "seq_len",
    "sharding",
    "shard_ranks",
    "sequence_parallel",
    "recompute",
    "precision",
    "hide",
    "assumed",
    "published",
    "provenance",
    "confidence",
]

# NVIDIA/Megatron-LM examples/sc21/run_table_1.sh: micro-batch and layers of a virtual stage.
SC21 = {
    "GPT-1.7B": (16, 0),
    "GPT-7.5B": (16, 0),
    "GPT-39.1B": (4, 0),
    "GPT-76.1B": (2, 5),
    "GPT-145.6B": (2, 5),
    "GPT-310.1B": (1, 3),
    "GPT-529.6B": (1, 1),
    "GPT-1008.0B": (1, 0),
}


def number(text: str, default: int = 0) -> int:
    return int(float(text)) if text.strip() else default


def base(row: dict[str, str]) -> dict[str, object]:
    """What all sources write in the same columns."""
    extra = dict(re.findall(r"(cp|ep|etp)=(\d+)", row["ep_or_cp"]))
    gpu = {"A": "a100-80gb", "N": "a100-80gb"}.get(row["gpu"][0], "h100")
    if "96GB" in row["gpu"]:
        gpu = "h100-96gb"
    elif row["gpu"].startswith("H200"):
        gpu = "h200"
    return {
        "label": f"{row['model']} {row['n_gpus']} GPUs",
        "step_s": float(row["step_time_s"] or row["step_time_derived_s"] or 0),
        "gpu": gpu,
        "network": "hdr200" if gpu.startswith("a100") else "ndr400",
        "gpus": number(row["n_gpus"]),
        "layers": number(row["layers"]),
        "hidden": number(row["hidden"]),
        "heads": number(row["heads"]),
        "kv_heads": number(row["heads"]),
        "ffn": number(row["ffn"]),
        "vocab": number(row["vocab"], 51200),
        "gated": 0,
        "tied": 0,
        "experts": 0,
        "experts_per_token": 0,
        "window": 0,
        "parallel_block": 0,
        "tp": number(row["tp"], 1),
        "pp": number(row["pp"], 1),
        "cp": int(extra.get("cp", 1)),
        "ep": int(extra.get("ep", 1)),
        "expert_tp": int(extra.get("etp", 0)),
        "dp": number(row["dp"], 1),
        "interleave": number(row["interleave"], 1),
        "micro_batch": number(row["micro_batch"], 1),
        "global_batch": number(row["global_batch"]),
        "seq_len": number(row["seq_len"]),
        "sharding": "zero1",
        "shard_ranks": 0,
        "sequence_parallel": 1 if number(row["tp"], 1) > 1 else 0,
        "recompute": "none",
        "precision": "fp8" if "fp8" in row["precision"] else "bf16",
        "hide": "",
        "assumed": "",
        "published": f"{row['tflops_per_gpu'] or row['mfu_pct'] or row['tokens_per_s_per_gpu']}",
        "provenance": f"{row['source']}; {row['provenance']}",
        "confidence": row["confidence"].split(" ")[0],
    }


def sc21(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(
        source="sc21",
        software="megatron-2021",
        precision="fp16",
        tied=1,
        sequence_parallel=0,
        recompute="full",
        sharding="none",
    )
    if "Table 1" in row["source"]:
        micro, per_chunk = SC21[row["model"]]
        job["micro_batch"] = micro
        job["interleave"] = int(row["layers"]) // int(row["pp"]) // per_chunk if per_chunk else 1
        job["assumed"] = "micro-batch and interleaving from Megatron-LM examples/sc21/run_table_1.sh"
    elif "ZeRO-3" in row["notes"]:
        job.update(sharding="zero3", software="deepspeed-2021", tied=0)
        job["assumed"] = "parameters gathered layer by layer, forward and backward"
    elif "README" in row["source"]:
        job["assumed"] = "about 32 s as quoted"
    else:
        job["interleave"] = {12: 1, 35: 1}[int(row["pp"])]
        job["assumed"] = "not interleaved (table 2 does not say)"
    return job


def korthikanti(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    full = "full" in row["recompute"]
    job.update(
        source="korthikanti",
        software="megatron-2022",
        precision="fp16",
        tied=1,
        sequence_parallel=0 if full else 1,
        recompute="full" if full else "selective",
        sharding="none",
    )
    return job


def megascale(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    own = "(MegaScale)" in row["model"] or "misc" in row["model"]
    job.update(source="megascale", software="megascale-2024" if own else "megatron-2023", tied=1)
    job["assumed"] = "micro-batch 1, no recomputation (flash attention), window 512"
    if "530B" in row["model"]:
        job["assumed"] = "micro-batch 1, no recomputation (flash attention), the model itself unchanged"
    if (own and "530B" not in row["model"]) or "ablation" in row["model"]:
        job.update(parallel_block=1, window=512)
    if "DP overlap" in row["model"]:
        job["hide"] = "tp tp_backward pp grads params"
    rate = float(row["tflops_per_gpu"] or 0) or float(row["mfu_pct"]) * 3.12
    if not job["step_s"]:
        layers, hidden, seq, vocab = (int(job[k]) for k in ("layers", "hidden", "seq_len", "vocab"))  # type: ignore[call-overload]
        flops = 72 * int(row["global_batch"]) * layers * seq * hidden**2
        flops *= 1 + seq / 6 / hidden + vocab / 12 / layers / hidden
        job["step_s"] = round(flops / rate / 1e12 / int(row["n_gpus"]), 3)
    return job


def dgxc(row: dict[str, str]) -> dict[str, object] | None:
    job = base(row)
    old = "v25.02" in row["source"] or "v24" in row["source"]
    job.update(source="dgxc", software="megatron-2024" if old else "megatron-2025")
    name = row["model"]
    if "Llama-4" in name or "DeepSeek" in name:
        return None  # dimensions or recipe not published in full
    if "Llama" in name:
        job.update(gated=1, kv_heads=8)
    if "Nemotron" in name:
        job.update(kv_heads=8)
    if "Grok" in name:
        job.update(gated=1, kv_heads=8, experts=8, experts_per_token=2)
        job["hide"] = "tp_backward cp pp grads params"
    if "MaxText" in name:
        job.update(software="maxtext-2024", sharding="zero3", shard_ranks=128, recompute="selective")
        job["assumed"] = "queries, keys and values kept (remat_policy save_qkv_proj of the recipe)"
    if "340B" in name:
        job["recompute"] = "selective"
        if old:
            job["hide"] = "tp_backward grads params"
    if "GPT-3" in name:
        job.update(tied=1)
    return job


def torchtitan(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="torchtitan", gated=1, sharding="zero3", software="torchtitan-2024")
    job["kv_heads"] = job["heads"] if "13B" in row["model"] else 8
    job["recompute"] = "full" if row["recompute"] == "full" else "selective"
    notes = row["notes"].lower()
    if "eager" in notes or "performance.md" in row["source"]:
        job["software"] = "torchtitan-eager"
    if "asyncTP" in row["source"]:
        job["software"] = "torchtitan-2025"
    hide = {"cp", "grads", "params"}
    if "async" in notes and "vanilla" not in notes:
        hide |= {"tp", "tp_backward"}
    job["hide"] = " ".join(sorted(hide))
    if int(row["pp"] or 1) > 1:
        # The local batch is the sum of the micro-batches; torchtitan's default was one for each stage.
        job["micro_batch"] = max(1, int(row["micro_batch"]) // (int(row["pp"])))
        job["assumed"] = "as many micro-batches as stages"
        if "Interleaved" in row["notes"]:
            job["interleave"] = 2
            job["assumed"] += "; two chunks for each stage"
    return job


# Rows of torchtitan's tables that the collected table leaves out, added after the draw: all held out.
# Model, GPU, GPUs, tp, micro-batch, precision, recompute, software, hidden, tokens per second and GPU, table.
LLAMA = {
    "Llama-3.1 8B": (32, 4096, 32, 8, 14336, 128256, 8192),
    "Llama-3.1 70B": (80, 8192, 64, 8, 28672, 128256, 8192),
    "Llama-2 13B": (40, 5120, 40, 40, 13824, 32000, 4096),
}
OVERLAPS = "cp grads params"
MORE = [
    ("Llama-3.1 8B", "h100-96gb", 8, 1, 2, "fp8", "selective", "torchtitan-2024", OVERLAPS, 8532, "T1"),
    ("Llama-3.1 8B", "h100-96gb", 128, 1, 2, "bf16", "selective", "torchtitan-eager", OVERLAPS, 5605, "T3"),
    ("Llama-3.1 8B", "h100-96gb", 128, 1, 2, "bf16", "selective", "torchtitan-2024", OVERLAPS, 6514, "T3"),
    ("Llama-3.1 8B", "h100-96gb", 128, 1, 2, "fp8", "selective", "torchtitan-2024", OVERLAPS, 8380, "T3"),
    ("Llama-3.1 70B", "h100-96gb", 256, 8, 16, "fp8", "full", "torchtitan-2024", OVERLAPS, 829, "T4"),
    (
        *("Llama-3.1 70B", "h100-96gb", 256, 8, 16, "fp8", "full", "torchtitan-2024"),
        *(f"{OVERLAPS} tp tp_backward", 876, "T4"),
    ),
    (
        "Llama-3.1 70B",
        "a100-80gb",
        64,
        1,
        1,
        "bf16",
        "full",
        "torchtitan-eager",
        OVERLAPS,
        331,
        "performance.md",
    ),
    (
        "Llama-2 13B",
        "a100-80gb",
        64,
        1,
        2,
        "bf16",
        "none",
        "torchtitan-eager",
        OVERLAPS,
        2162,
        "performance.md",
    ),
    (
        *("Llama-2 13B", "a100-80gb", 64, 1, 2, "bf16", "selective", "torchtitan-eager"),
        *(OVERLAPS, 1914, "performance.md"),
    ),
]


def more() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name, gpu, gpus, tp, micro, precision, recompute, software, hide, rate, table in MORE:
        layers, hidden, heads, kv_heads, ffn, vocab, seq = LLAMA[name]
        batch = micro * gpus // tp
        blank = dict.fromkeys(COLUMNS, 0)
        found.append(
            blank
            | {
                "source": "torchtitan",
                "half": "held-out",
                "label": f"{name} {gpus} GPUs",
                "software": software,
            }
            | {"step_s": round(batch * seq / gpus / rate, 3), "gpu": gpu, "gpus": gpus, "gated": 1}
            | {
                "network": "hdr200" if gpu.startswith("a100") else "ndr400",
                "layers": layers,
                "hidden": hidden,
            }
            | {"heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab, "seq_len": seq, "tp": tp}
            | {"pp": 1, "cp": 1, "ep": 1, "dp": gpus // tp, "interleave": 1, "micro_batch": micro}
            | {"global_batch": batch, "sharding": "zero3", "sequence_parallel": int(tp > 1)}
            | {"recompute": recompute, "precision": precision, "hide": hide, "assumed": ""}
            | {"published": rate, "confidence": "high"}
            | {"provenance": f"pytorch/torchtitan llama3_h100_202412, docs/performance.md: {table}"}
        )
    return found


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    jobs: list[dict[str, object]] = []
    with Path(sys.argv[1]).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = row["source"]
            found = None
            if "SC21" in name or "README v2.6" in name:
                found = sc21(row)
            elif "Korthikanti" in name and "ONE layer" not in name:
                found = korthikanti(row)
            elif "MegaScale" in name:
                found = megascale(row)
            elif "dgxc" in name:
                found = dgxc(row)
            elif "torchtitan" in name:
                found = torchtitan(row)
            if found:
                jobs.append(found)
    draw = random.Random(SEED)
    for source in sorted({str(job["source"]) for job in jobs}):
        mine = [i for i, job in enumerate(jobs) if job["source"] == source]
        fitted = set(draw.sample(mine, len(mine) // 2))
        for i in mine:
            jobs[i]["half"] = "fit" if i in fitted else "held-out"
    jobs += more()
    with Path(sys.argv[2]).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(jobs)
    print(f"{len(jobs)} rows")


if __name__ == "__main__":
    main()
