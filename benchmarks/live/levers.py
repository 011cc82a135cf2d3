"""The levers that compare.py tries one by one, each by `weft run --policy`, and what each of them brought."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

from configs import BASELINE_CTAS, RANKS, Config

Rows = list[dict[str, Any]]
TAIL = 40  # steps at the end of a process that are compared

_COMM: dict[str, dict[str, Any]] = {
    "ctas6": {"comm": {"max_ctas": 6}},
    "ctas16": {"comm": {"max_ctas": 16}},
    "ctas24": {"comm": {"max_ctas": 24}},
    "head5": {"comm": {"head_start_us": 5}},
    "placed": {"comm": {"head_start": "placed"}},
    "priority": {"comm": {"priority": "high"}},
    "ctas8-placed": {"comm": {"max_ctas": 8, "head_start": "placed"}},
    "reserve": {"compute": {"sm_reserve": RANKS * BASELINE_CTAS}},
    "ctas8-reserve": {"comm": {"max_ctas": 8}, "compute": {"sm_reserve": RANKS * 8}},
}
_DDP: dict[str, dict[str, Any]] = {
    "bucket5": {"framework": {"bucket_mb": 5}},
    "bucket400": {"framework": {"bucket_mb": 400}},
    "bucket1600": {"framework": {"bucket_mb": 1600}},
}
_FSDP2: dict[str, dict[str, Any]] = {
    "forward1": {"framework": {"forward_prefetch": 1}},
    "forward2": {"framework": {"forward_prefetch": 2}},
    "backward2": {"framework": {"backward_prefetch": 2}},
    "keep": {"framework": {"reshard_after_forward": False}},
    "rsgroup": {"framework": {"reduce_scatter_group": True}},
    "rs-ctas6": {"comm": {"rules": [{"collective": "reduce_scatter", "ctas": 6}]}},
}


def levers_of(config: Config) -> dict[str, dict[str, Any]]:
    """By name: the policies that can matter for a job."""
    found = dict(_COMM)
    if config.script in ("ddp.py", "triton_ddp.py"):
        found |= _DDP
    elif config.script == "fsdp2.py":
        found |= _FSDP2
    return {name: {"version": 1, **policy} for name, policy in found.items()}


def write_levers(out: Path, rows: Rows) -> None:
    """Write levers.md and levers.json."""
    names = list(dict.fromkeys(row["config"] for row in rows))
    found = [summary for name in names if (summary := of_config([r for r in rows if r["config"] == name]))]
    (out / "levers.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "levers.md").write_text(markdown(found))


def of_config(rows: Rows) -> dict[str, Any] | None:
    """What each lever took less than the job without weft, in percent, and how much there is to win."""
    good = [row for row in rows if row["ok"] and row.get("times")]
    without = [median(row["times"][-TAIL:]) for row in good if row["way"] == "without"]
    if not without:
        return None
    base = fmean(without)
    gains: dict[str, list[float]] = {}
    for row in good:
        if row["way"] != "without":
            name = row["name"].rsplit("-", 1)[0].removeprefix("lever-")
            gains.setdefault(name, []).append(100 * (1 - median(row["times"][-TAIL:]) / base))
    tuned = [row["tuning"] for row in good if row.get("tuning")]
    held = next((t["bound"]["held_ms"] for t in tuned if t.get("bound")), None)
    alone = next((r["floor"].get("without_communication_ms") for r in rows if r.get("floor")), None)
    floor = None if alone is None else alone + (held or 0.0)
    most = None if floor is None else 100 * max(0.0, 1 - floor / base)
    tune = fmean(gains["tune"]) if gains.get("tune") else None
    return {
        "config": rows[0]["config"],
        "without_ms": without,
        "scatter_pct": 100 * (max(without) / min(without) - 1),
        "gains_pct": gains,
        "tune_pct": tune,
        "without_communication_ms": alone,
        "held_ms": held,
        "floor_ms": floor,
        "could_win_pct": most,
        "share_won": tune / most if tune is not None and most else None,
        "losses_differ": [row["name"] for row in good if not same_start(row, good[0])],
        "problems": [f"{row['name']}: {row['exit']}" for row in rows if not row["ok"]],
        "said": [t["text"] for t in tuned],
    }


def same_start(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two processes had the same losses, bit by bit, as far as both went."""
    both = min(len(a.get("losses") or ()), len(b.get("losses") or ()))
    return not both or a["losses"][:both] == b["losses"][:both]


def markdown(found: list[dict[str, Any]]) -> str:
    """A block for each job, then the averages."""
    parts = ["Gains in percent of the step without weft; every figure is a process of its own.\n"]
    for one in found:
        parts.append(f"\n**{one['config']}**: {_list(one['without_ms'])} ms without weft")
        if one["floor_ms"] is not None:
            held = f" and {one['held_ms']:.2f} ms of SM-time" if one["held_ms"] is not None else ""
            parts.append(
                f"; floor {one['floor_ms']:.2f} ms ({one['without_communication_ms']:.2f} alone{held})"
            )
            parts.append(f": {one['could_win_pct']:.1f}% could be won")
        parts.append("\n\n| lever | gain, % |\n|---|---|\n")
        ordered = sorted(one["gains_pct"].items(), key=lambda item: -fmean(item[1]))
        parts += [f"| {name} | {_list(values)} |\n" for name, values in ordered]
        parts += [f"- {said}\n" for said in one["said"]]
        parts += [f"- losses differ: {', '.join(one['losses_differ'])}\n"] if one["losses_differ"] else []
        parts += [f"- {problem}\n" for problem in one["problems"]]
    tuned = [one["tune_pct"] for one in found if one["tune_pct"] is not None]
    shares = [one["share_won"] for one in found if one["share_won"] is not None]
    if tuned:
        parts.append(f"\nMean gain of `--tune`: {fmean(tuned):.2f}% over {len(tuned)} jobs")
        parts.append(f"; of what could be won: {100 * fmean(shares):.0f}%\n" if shares else "\n")
    return "".join(parts)


def _list(values: list[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)
