"""Make the charts and tables of docs/lab.md from result files. Needs no GPU.

    PYTHONPATH=src python3 benchmarks/lab/figures.py [RESULTS_FOLDER] [--docs docs]

Reads paper.jsonl, modern.jsonl and quick.jsonl if present, writes docs/lab/*.svg, and replaces what
stands between `<!-- results: NAME -->` and `<!-- end -->` in docs/lab.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.bench.results import load_results
from weft.bench.suites import PAPER_GRIDS
from weft.bench.tables import by_cell, chosen, geometric_mean, regret
from weft.execute.base import NO_ROOM
from weft.policy import Policy
from weft.report.figures import bars, heatmap, lines

HERE = Path(__file__).resolve().parent
Cells = dict[str, dict[str, dict[str, Any]]]
GRIDS = [*map(str, PAPER_GRIDS), "natural"]
CONFIGS = [f"{w}-{o}" for w in ("cb-ar", "cb-a2a", "mb-ar", "mb-a2a") for o in ("opt1", "opt2")]


def figure(row: dict[str, Any] | None, key: str, scale: float = 1.0) -> float | None:
    value = row.get(key) if row else None
    if (
        row
        and key.startswith("fraction")
        and row["sequential_ms"] - row["ideal_ms"] < NO_ROOM * row["sequential_ms"]
    ):
        return None  # results of older versions
    return None if value is None else value * scale


def best_of(cell: dict[str, Any], match: str) -> dict[str, Any] | None:
    """The fastest candidate whose name matches."""
    rows = [row for name, row in cell.items() if re.search(match, name) and row["ms"] is not None]
    return min(rows, key=lambda row: row["ms"], default=None)


def paper_pictures(cells: Cells) -> dict[str, str]:
    kinds = {
        "overlap": "^overlap$",
        "priority": "^priority$",
        "priority and residency": r"^priority\+res\d$",
        "with head start": "head",
    }
    panels = {
        config: {
            label: [figure(best_of(cells.get(f"{config}-{g}", {}), match), "time_ratio") for g in GRIDS]
            for label, match in kinds.items()
        }
        for config in CONFIGS
    }
    gains = [[gain(cells.get(f"{config}-{grid}", {})) for grid in GRIDS] for config in CONFIGS]
    pictures = {
        "paper_time_ratio": lines(
            "Time over sequential time, by grid X=Y (arXiv:2606.09200's workloads, one H200)",
            panels,
            GRIDS,
            y_label="time / sequential",
        ),
        "paper_gain": heatmap(
            "Percent less time than plain overlap, best policy", CONFIGS, GRIDS, gains, digits=1
        ),
    }
    pictures["fig2"] = fig2(cells)
    best = cells.get("cb-ar-best")
    if best:
        groups = {name: {"ms": row["ms"]} for name, row in best.items() if row["ms"] is not None}
        ideal = next((row["ideal_ms"] for row in best.values() if row.get("ideal_ms")), None)
        title = "cb-ar, tile 64x64x64, natural grid: ms of the pipeline"
        pictures["cb_ar"] = bars(title, groups, mark=("ideal", ideal) if ideal else None, digits=2)
    return pictures


def gain(cell: dict[str, Any]) -> float | None:
    plain, best = figure(cell.get("overlap"), "ms"), figure(chosen(cell), "ms")
    return None if plain is None or best is None else 100 * (1 - best / plain)


def fig2(cells: Cells) -> str:
    """The paper's diagonal and both interpretations."""
    paper = json.loads((HERE.parents[1] / "src/weft/reproduce/data/fig2_time_ratio.json").read_text())
    places = [paper["grid"].index(n) for n in PAPER_GRIDS]
    theirs = {f"{gpu} (paper)": [table[i][i] for i in places] for gpu, table in paper["gpus"].items()}
    ours = {
        "H200, one compute stream": [
            figure(cells.get(f"cb-ar-opt2-{n}", {}).get("overlap"), "time_ratio") for n in PAPER_GRIDS
        ],
        "H200, four compute streams": [
            figure(cells.get(f"cb-ar-opt2-{n}-streams4", {}).get("overlap"), "time_ratio")
            for n in PAPER_GRIDS
        ],
    }
    title = "Fig. 2 of the paper (cb-ar, plain overlap, X=Y) and both readings on an H200"
    return lines(
        title, {"": {**theirs, **ours}}, [*map(str, PAPER_GRIDS)], y_label="time / sequential", low=0.2
    )


def modern_pictures(cells: Cells) -> dict[str, str]:
    groups = {
        name: {
            "plain overlap": figure(cell.get("overlap"), "fraction_of_ideal", 100),
            "best policy": figure(chosen(cell), "fraction_of_ideal", 100),
        }
        for name, cell in cells.items()
    }
    title = "Percent of the ideal gain over sequential"
    return {"modern": bars(title, groups, unit="%", mark=("ConCCL with DMA", 72.0), digits=0)}


def label(row: dict[str, Any]) -> str:
    """The current label of a candidate; older results order its parts differently."""
    name = str(row["candidate"])
    today = Policy.from_dict(row["policy"]).label
    return today if sorted(today.split("+")) == sorted(name.split("+")) else name


def markdown(cells: Cells) -> str:
    head = ["workload", "sequential", "overlap", "best", "ideal", "overlap, % of ideal", "best, % of ideal"]
    head += ["best, % of own ideal", "best, over the bound", "overlap rate, %", "policy"]
    body = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, cell in cells.items():
        best, plain = chosen(cell), cell.get("overlap")
        if best is None:
            problem = next((row["problem"] for row in cell.values() if row["problem"]), "no result")
            body.append(f"| {name} | | | | | | | | | | {problem} |")
            continue
        numbers = [
            figure(cell.get("sequential"), "ms"),
            figure(plain, "ms"),
            figure(best, "ms"),
            figure(best, "ideal_ms"),
            figure(plain, "fraction_of_ideal", 100),
            figure(best, "fraction_of_ideal", 100),
            figure(best, "fraction_of_own_ideal", 100),
            figure(best, "over_bound"),
            figure(best, "overlap_rate", 100),
        ]
        places = (2, 2, 2, 2, 0, 0, 0, 3, 0)
        shown = ["-" if n is None else f"{n:.{d}f}" for n, d in zip(numbers, places, strict=True)]
        body.append(f"| {name} | {' | '.join(shown)} | {label(best)} |")
    body += ["", summary(cells)]
    return "\n".join(body)


def summary(cells: Cells) -> str:
    plain = geometric_mean(figure(cell.get("overlap"), "fraction_of_ideal") for cell in cells.values())
    best = geometric_mean(figure(chosen(cell), "fraction_of_ideal") for cell in cells.values())
    regrets = [value for value in map(regret, cells.values()) if value is not None]
    lost = [
        f"{name}: {row['candidate']} {row['status']}"
        for name, cell in cells.items()
        for row in cell.values()
        if row["status"] not in ("ok", "dropped")
    ]
    words = []
    if plain is not None and best is not None:
        both = f"{_share(plain)} plain overlap, {_share(best)} best policy"
        words.append(f"Geometric mean of the fraction of ideal: {both}.")
    own = geometric_mean(figure(chosen(cell), "fraction_of_own_ideal") for cell in cells.values())
    if own is not None:
        words.append(
            "Geometric mean of the fraction of own ideal (the ideal with the faster collective of the chosen "
            f"number of CTAs): {_share(own)}."
        )
    if regrets:
        worst = max(regrets)
        words.append(
            f"Remeasured, the chosen policy takes at most {worst:.3f} times as long as the better baseline."
        )
    if lost:
        words.append(f"Not measured: {'; '.join(lost)}.")
    return " ".join(words)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def how(headers: list[dict[str, Any]]) -> str:
    if not headers:
        return ""
    last, machine = headers[-1], headers[-1]["machine"]
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    return f"`{last['command']}` on {facts}; weft {last['weft']}, {last['started']}."


def replace(text: str, name: str, new: str) -> str:
    pattern = re.compile(rf"(<!-- results: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{new}\n{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, default=HERE.parent / "results" / "lab")
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    args = parser.parse_args()
    page = args.docs / "lab.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    folder = args.docs / "lab"
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("paper", paper_pictures), ("modern", modern_pictures), ("quick", lambda cells: {})):
        headers, rows = load_results(args.results / f"{name}.jsonl")
        if not rows:
            continue
        cells = by_cell(rows)
        for picture, svg in draw(cells).items():
            (folder / f"{picture}.svg").write_text(svg, encoding="utf-8")
        text = replace(text, name, f"{how(headers)}\n\n{markdown(cells)}")
        print(f"{name}: {len(cells)} workloads. {summary(cells)}")
    if text:
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
