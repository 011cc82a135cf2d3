"""The comparison as a table: one line for each configuration, and why where nothing was gained."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from weft.measure.intervals import ratio_ci

Rows = list[dict[str, Any]]


def write_table(out: Path, rows: Rows, tail: int) -> None:
    """Write table.md and summary.json."""
    names = list(dict.fromkeys(row["config"] for row in rows))
    lines = [summarise([row for row in rows if row["config"] == name], tail) for name in names]
    (out / "summary.json").write_text(json.dumps(lines, indent=1) + "\n")
    (out / "table.md").write_text(markdown(lines))


def summarise(rows: Rows, tail: int) -> dict[str, Any]:
    """One configuration: medians of steps after tuning, and of the search in one process."""
    good = [row for row in rows if row["ok"]]
    ways = {
        way: [row for row in good if row["way"] == way] for way in ("without", "tune", "search", "policy")
    }
    ms = {
        way: [median(row["times"][-tail:]) for row in ways[way] if row["times"]]
        for way in ("without", "tune", "policy")
    }
    search = next((row["search"] for row in ways["search"]), {})
    tunings = [row["tuning"] for row in ways["tune"] if row.get("tuning")]
    line: dict[str, Any] = {
        "config": rows[0]["config"],
        "about": search.get("about", ""),
        "share_pct": (search.get("communication") or {}).get("share_pct"),
        "without_ms": ms["without"],
        "tune_ms": ms["tune"],
        "policy_ms": ms["policy"],
        "tune_to_without": _ratio(ways["tune"], ways["without"], tail),
        "losses_identical": same_losses(good),
        "tuning": tunings,
        "problems": [f"{row['name']}: exit {row['exit']}" for row in rows if not row["ok"]],
    }
    if "best" in search:
        best, default = search["best"], search["confirmed"][0]
        # Of several tunings, the worst.
        tuned = max(search.get("also") or [default], key=lambda row: row["ms"])
        line |= {
            "search_default_ms": default["ms"],
            "search_tuned_ms": tuned["ms"],
            "tuned_label": tuned["label"],
            "tuned_to_default": tuned["to_default"],
            "best_ms": best["ms"],
            "best_label": best["label"],
            "best_to_default": best["to_default"],
            "tuned_to_best": tuned["ms"] / best["ms"],
            "without_communication_ms": search.get("without_communication_ms"),
            "kernels": search["communication"]["kernels"][:6],
        }
    return line


def same_losses(rows: Rows) -> bool | None:
    """Whether all processes of a job had the same losses, bit by bit; None: nothing to compare."""
    seen = [row["losses"] for row in rows if row.get("losses")]
    common = min(map(len, seen), default=0)
    return len({tuple(losses[:common]) for losses in seen}) == 1 if len(seen) > 1 else None


def _ratio(a: Rows, b: Rows, tail: int) -> list[float] | None:
    """Of step times after tuning, all processes of a way together; not interleaved, so take it with care."""
    x, y = ([ms for row in rows for ms in row["times"][-tail:]] for rows in (a, b))
    return list(ratio_ci(x, y)) if x and y else None


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table, then the verdicts and the kernels."""
    head = (
        "| configuration | communication, % of step | without weft, ms | `--tune`, ms | ratio "
        "| tuned policy, ms | best of all, ms | tuned / best | gain, % (95%) | steps | losses |\n"
        + "|---" * 11
        + "|\n"
    )
    body = "".join(_row(line) for line in lines)
    return head + body + "".join(_why(line) for line in lines)


def _row(line: dict[str, Any]) -> str:
    steps = [str(tuning.get("steps")) for tuning in line["tuning"]]
    gain = line.get("tuned_to_default")
    cells = [
        line["config"],
        _number(line["share_pct"], 0),
        " / ".join(_number(ms) for ms in line["without_ms"]),
        " / ".join(_number(ms) for ms in line["tune_ms"]),
        _number((line["tune_to_without"] or [None])[0], 3),
        f"{_number(line.get('search_tuned_ms'))} ({line.get('tuned_label', '')})",
        f"{_number(line.get('best_ms'))} ({line.get('best_label', '')})",
        _number(line.get("tuned_to_best"), 3),
        f"{100 * (1 - gain[0]):.1f} ({100 * (1 - gain[2]):.1f} to {100 * (1 - gain[1]):.1f})" if gain else "",
        " / ".join(steps),
        {True: "identical", False: "DIFFERENT", None: ""}[line["losses_identical"]],
    ]
    return "| " + " | ".join(cells) + " |\n"


def _why(line: dict[str, Any]) -> str:
    parts = [f"\n**{line['config']}** ({line['about']})\n\n"]
    parts += [f"- {tuning.get('text', '')}\n" for tuning in line["tuning"]]
    if line.get("without_communication_ms"):
        alone, default = line["without_communication_ms"], line["search_default_ms"]
        most = f"{max(0.0, 100 * (1 - alone / default)):.0f}% is the most that could be gained"
        parts.append(f"- without any communication a step takes {alone:.2f} of {default:.2f} ms: {most}\n")
    for kernel in line.get("kernels", []):
        blocks = kernel.get("blocks_per_sm")
        what = f"{blocks} blocks per SM" if blocks else "blocks per SM unknown"
        parts.append(
            f"- `{kernel['name'][:70]}`: {kernel['ms']:.2f} ms, {kernel['beside_ms']:.2f} shared; {what}\n"
        )
    parts += [f"- {problem}\n" for problem in line["problems"]]
    return "".join(parts)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
