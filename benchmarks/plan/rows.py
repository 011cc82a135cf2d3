"""Turns the collected tables of published runs into jobs that can be predicted, with the assumptions made.

    python benchmarks/plan/rows.py COLLECTED.csv [MORE.csv ...] tests/data/published_training.csv

Keeps the rows whose configuration is complete, or can be completed from the recipe that the publication
names. Each row carries its source (one publication), the assumptions where the publication is silent, and
the peak memory if published. Left out: rows without a model or a split (PowerSGD, Domino, the
Crusoe blog), models that are not transformers (Nemotron Nano), one-layer timings, and ZeRO++ (zeropp.py
compares its ratios).
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

COLUMNS = [
    "source",
    "label",
    "step_s",
    "memory_gib",
    "model",
    "software",
    "gpu",
    "network",
    "rail_gbit",
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
    "head_dim",
    "parallel_block",
    "tp",
    "pp",
    "cp",
    "ep",
    "expert_tp",
    "dp",
    "interleave",
    "schedule",
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
    return int(float(text)) if re.fullmatch(r"[0-9.]+", text.strip()) else default


def base(row: dict[str, str]) -> dict[str, object]:
    """The columns that all sources share."""
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
        "head_dim": 0,
        "model": "",
        "memory_gib": "",
        "rail_gbit": "",
        "schedule": "",
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
        job.update(sharding="zero3", software="deepspeed-2020", tied=0)
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


def dgxc(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    old = "v25.02" in row["source"] or "v24" in row["source"]
    job.update(source="dgxc", software="megatron-2024" if old else "megatron-2025")
    name = row["model"]
    if "Llama-4" in name:
        job.update(model="llama4-maverick", sharding="zero1", interleave=1)
        job["hide"] = "tp_backward cp pp grads params"
        job["assumed"] = "one chunk: the log shows none, the README lists 12 with one stage"
        return job
    if "DeepSeek" in name:
        # nemo/collections/llm/recipes/deepseek_v3.py: DeepEP, and the MoE and MLP blocks are recomputed
        job.update(model="deepseek-v3", recompute="full", sharding="zero1", software="megatron-2026")
        job["hide"] = "tp_backward cp pp grads params"
        job["assumed"] = "NeMo's recipe: DeepEP, recomputation of MoE and MLP counted as full"
        return job
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
    job["recompute"] = row["recompute"].split(" ")[0]
    job["memory_gib"] = MEMORY.get((part(row["source"]), row["tokens_per_s_per_gpu"]), "")
    notes = row["notes"].lower()
    # Async TP is a pass of torch.compile, so runs with it are compiled.
    if "eager" in notes or ("performance.md" in row["source"] and "async" not in notes):
        job["software"] = "torchtitan-eager"
    if "asyncTP" in row["source"]:
        job["software"] = "torchtitan-2025"
    hide = {"cp", "grads", "params"}
    if "asynctp" in notes.replace(" ", "") and "vanilla" not in notes:
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


# Peak memory in GiB by table and rate: pytorch/torchtitan benchmarks/llama3_h100_202412 and
# llama3-8b_h200_202506.
MEMORY = {
    ("T1+T3", "5762"): 82.4,
    ("T1+T3", "6667"): 77.0,
    ("T1+T3", "8532"): 76.8,
    ("T1+T3", "5605"): 67.0,
    ("T1+T3", "6514"): 62.0,
    ("T1+T3", "8380"): 61.8,
    ("T2", "3890"): 83.9,
    ("T2", "2540"): 84.2,
    ("T2", "1071"): 84.0,
    ("T2", "548"): 84.5,
    ("T4", "829"): 71.9,
    ("T4", "876"): 67.6,
    ("T5", "100"): 82.5,
    ("T5", "128"): 72.7,
    ("T6", "76"): 75.3,
    ("T6", "47"): 75.9,
    ("T6", "31"): 77.1,
    ("T6", "16"): 84.9,
    ("llama3-8b_h200_202506", "10938"): 47.96,
}


def flops_of(job: dict[str, object], *, attention: float = 1.0, recompute: bool = False) -> float:
    """FLOPs of a step from the dimensions: 6 per parameter and token, and this share of the full square."""
    layers, hidden, ffn = (int(str(job[k])) for k in ("layers", "hidden", "ffn"))
    seq, vocab = int(str(job["seq_len"])), int(str(job["vocab"]))
    kv = int(str(job["kv_heads"])) / int(str(job["heads"]))
    matrices = 3 if job["gated"] else 2
    layer = hidden * hidden * (2 + 2 * kv) + matrices * hidden * ffn + attention * 2 * hidden * seq
    times = 8 if recompute else 6
    return int(str(job["global_batch"])) * seq * (times * layers * layer + 6 * vocab * hidden)


def step_from(job: dict[str, object], tflops: float, **how: float | bool) -> float:
    """Seconds of a step at that many TFLOP/s on each GPU."""
    return round(flops_of(job, **how) / tflops / 1e12 / int(str(job["gpus"])), 3)  # type: ignore[arg-type]


def llama3(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="llama3", software="megatron-2024", gated=1, kv_heads=8, vocab=128256, interleave=4)
    job["step_s"] = step_from(job, float(row["tflops_per_gpu"]), attention=0.5)
    job["assumed"] = "four chunks for each stage; rates count causal attention; Megatron's overlap"
    return job


def mcore(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="mcore", software="megatron-2024", tied=1)
    stages = number(row["pp"], 1)
    job["interleave"] = number(row["layers"]) // stages if stages > 1 else 1
    if stages == 1:
        job["micro_batch"] = number(row["global_batch"]) // number(row["dp"])
    job["assumed"] = "one micro-batch without stages, else of one sequence; one layer for each chunk"
    return job


# Dimensions of the models that NeMo's summary only names: layers, hidden, heads, kv heads, ffn, vocabulary.
NEMO = {
    "GPT3-20B": (44, 6144, 48, 48, 24576, 51200),
    "Nemotron-8B": (32, 4096, 32, 32, 16384, 256000),
    "Nemotron-22B": (40, 6144, 48, 48, 24576, 256000),
}
NAMED = {
    "GPT3-175B": "gpt-175b",
    "Llama2-70B": "llama2-70b",
    "Nemotron-340B": "nemotron4-340b",
    "Llama3-8B": "llama3-8b",
    "Llama3-70B": "llama3-70b",
}


def nemo(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="nemo-24.12", software="megatron-2024", model=NAMED.get(row["model"], ""))
    if row["model"] in NEMO:
        keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        job.update(zip(keys, NEMO[row["model"]], strict=True))
        job["assumed"] = "dimensions of NeMo's recipe of that name"
    if "340B" in row["model"]:
        job["recompute"] = "selective"
    return job


def examples(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="megatron-lm", software="megatron-2025", gated=1, kv_heads=8)
    return job


BRIDGE = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3-405b"}
BRIDGE |= {"GPT": "gpt-oss-120b", "Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3_235B_a22B": "qwen3-235b-a22b"}


def bridge(row: dict[str, str]) -> dict[str, object] | None:
    name = row["model"].split(" ")[0]
    if name not in BRIDGE:
        return None
    job = base(row)
    job.update(source="bridge", software="megatron-2026", model=BRIDGE[name])
    if re.search(r"FSDP=[1-9]", row["notes"]):
        job.update(sharding="zero3", shard_ranks=0)
    if "a22B" in name or "a3B" in name or "GPT" in name:
        job["expert_tp"] = 1
        # scripts/performance/configs of Megatron-Bridge: tensor-parallel overlap is off for these on H100,
        # the expert all-to-all overlaps in the 235B recipe, which uses NCCL's all-to-all.
        overlaps = "tp_backward cp pp grads params"
        job["hide"] = f"ep {overlaps}" if "235B" in name else overlaps
        job["assumed"] = "recipe of scripts/performance/configs; no recomputation"
        if "GPT" in name and number(row["micro_batch"]) > 1:
            job["recompute"] = "full"
            job["assumed"] = "full recomputation: without it four sequences do not fit into 80 GB"
    return job


def ibm(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="ibm-fsdp", gated=1, sharding="zero3", software="torchtitan-eager")
    if "torch.compile" in row["notes"] and "no-compile" not in row["notes"]:
        job["software"] = "torchtitan-2024"
    job["kv_heads"] = 8 if ("70B" in row["model"] or "34B" in row["model"]) else job["heads"]
    # The second blog repeats the first one's MFU without the compiler, so its recomputation is the same.
    size = row["model"].split(" ")[1]
    job["recompute"] = {"7B": "none", "13B": "selective"}.get(size, "full")
    node = re.search(r"([0-9.]+)(Gb|Tb)/s", row["gpu"])
    assert node
    job["rail_gbit"] = float(node[1]) * (1000 if node[2] == "Tb" else 1) / 8
    job["hide"] = "cp grads params"
    job["assumed"] = "torchtitan's software; recomputation by model size as in the first blog's table"
    if not job["step_s"]:
        peak = 312 if str(job["gpu"]).startswith("a100") else 989.4
        job["step_s"] = step_from(job, float(row["mfu_pct"]) / 100 * peak)
    return job


def fsdp(row: dict[str, str]) -> dict[str, object]:
    job = base({**row, "n_gpus": "256", "dp": "256"})
    job.update(source="fsdp-paper", sharding="zero3", software="torchtitan-eager", recompute="full")
    job.update(rail_gbit=250, global_batch=256 * number(row["micro_batch"]), hide="cp grads params")
    job["step_s"] = step_from(job, float(row["tflops_per_gpu"]), recompute=True)
    job["assumed"] = "256 GPUs of the 128 to 512 over which it is linear; rates count recomputation"
    return job


def azure(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="azure", sharding="zero3", software="deepspeed-2021", precision="fp16")
    job.update(recompute="full")
    job["assumed"] = "Megatron-DeepSpeed's unfused attention; no gradient accumulation"
    return job


def deepseek(row: dict[str, str]) -> dict[str, object]:
    job = base(row)
    job.update(source="deepseek", software="deepseek-2024", model="deepseek-v3", gpu="h800")
    job.update(schedule="dualpipe", micro_batch=1, expert_tp=1, network="ndr400")
    job.update(recompute="selective")
    job["assumed"] = (
        "micro-batch 1; recomputation of norms, up-projections and activations as the report says"
    )
    return job


# Rows of torchtitan's tables that are missing from the collected tables.
# Model, GPU, GPUs, tp, micro-batch, precision, recompute, software, hidden, tokens per second and GPU, table.
LLAMA = {
    "Llama-3.1 8B": (32, 4096, 32, 8, 14336, 128256, 8192),
    "Llama-3.1 70B": (80, 8192, 64, 8, 28672, 128256, 8192),
    "Llama-2 13B": (40, 5120, 40, 40, 13824, 32000, 4096),
}
OVERLAPS = "cp grads params"
TABLES = {"T1": "T1+T3", "T3": "T1+T3", "performance.md": "2024-08"}
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
                "source": f"torchtitan/{TABLES.get(table, table)}",
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
            | {"published": rate, "confidence": "high", "model": "", "rail_gbit": "", "schedule": ""}
            | {"memory_gib": MEMORY.get((TABLES.get(table, table), str(rate)), "")}
            | {"provenance": f"pytorch/torchtitan llama3_h100_202412, docs/performance.md: {table}"}
        )
    return found


READERS: tuple[tuple[str, Callable[[dict[str, str]], dict[str, object] | None]], ...] = (
    ("SC21", sc21),
    ("README v2.6", sc21),
    ("ONE layer", lambda row: None),
    ("Korthikanti", korthikanti),
    ("MegaScale", megascale),
    ("dgxc", dgxc),
    ("torchtitan", torchtitan),
    ("Llama 3 Herd", llama3),
    ("Megatron-Core r0.8", mcore),
    ("NeMo 24.12", nemo),
    ("examples/llama", examples),
    ("Megatron-Bridge", bridge),
    ("PyTorch/IBM", ibm),
    ("PyTorch FSDP", fsdp),
    ("DeepSpeed Azure", azure),
    ("DeepSeek-V3", deepseek),
)
KEY = ("model", "layers", "hidden", "gpus", "tp", "precision", "recompute", "hide", "step_s", "software")


def part(source: str) -> str:
    """The table or release of a publisher that a row is from; its rows are left out together."""
    release = re.search(
        r"v?\d+\.\d+(\.\d+)?(?= NeMo|$)|(Table|Fig|T)s? ?[\d/+T]+$|sec [\d.]+|r0\.8\.0 README \w+", source
    )
    words = release[0] if release else source.split(" ")[-1].split("/")[-1]
    return {"2024)": "2024-08"}.get(words, words).strip("()").replace(" ", "-").replace("/", "+")


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    jobs: list[dict[str, object]] = []
    for path in sys.argv[1:-1]:
        with Path(path).open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                reader = next((read for words, read in READERS if words in row["source"]), None)
                found = reader(row) if reader else None
                if found:
                    found["source"] = f"{found['source']}/{part(row['source'])}"
                    jobs.append(found)
    known = {tuple(str(job[k]) for k in KEY) for job in jobs}
    jobs += [job for job in more() if tuple(str(job[k]) for k in KEY) not in known]
    with Path(sys.argv[-1]).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(jobs)
    print(f"{len(jobs)} rows")


if __name__ == "__main__":
    main()
