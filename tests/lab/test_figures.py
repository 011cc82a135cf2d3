"""The charts: well-formed, with every value, escaped text, and gaps for missing values."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from weft.report.figures import bars, heatmap, lines

SVG = "{http://www.w3.org/2000/svg}"


def parse(text):
    root = ElementTree.fromstring(text)
    return root, [node.text or "" for node in root.iter(f"{SVG}text")]


def inside(root):
    """Whether every element lies within the page."""
    width, height = float(root.get("width")), float(root.get("height"))
    return all(
        0 <= float(node.get(x, 0)) <= width and 0 <= float(node.get(y, 0)) <= height
        for node in root.iter()
        for x, y in (("x", "y"), ("cx", "cy"))
    )


def test_lines():
    panels = {"<a&b>": {"one": [1.0, None, 3.0], "two": [2.0, 2.5, 2.0]}, "second": {"one": [1.0, 1.0, 1.0]}}
    root, words = parse(lines("title", panels, ["8", "16", "natural"], y_label="ms"))
    assert {"title", "<a&b>", "second", "one", "two", "8", "natural", "ms"} <= set(words)
    assert len(list(root.iter(f"{SVG}circle"))) == 8
    paths = [node.get("d") for node in root.iter(f"{SVG}path") if node.get("fill") == "none"]
    assert sum(path.count("M") for path in paths) == 4  # the gap begins a new piece
    assert inside(root)


def test_a_long_legend_stays_on_the_page():
    series = {f"a rather long name of a line {i}": [1.0, 2.0] for i in range(8)}
    root, words = parse(lines("t", {"": series}, ["a", "b"], y_label="y"))
    assert sum("rather long" in word for word in words) == 8
    assert inside(root)


def test_bars():
    groups = {"w1": {"plain": 50.0, "best": 90.0}, "w2": {"plain": None, "best": 80.0}}
    root, words = parse(bars("t", groups, unit="%", mark=("bound", 72.0), digits=0))
    assert {"50%", "90%", "80%", "bound 72%", "w1", "w2"} <= set(words)
    widths = [float(node.get("width")) for node in root.iter(f"{SVG}rect")]
    assert max(widths[1:]) > 0
    assert inside(root)


def test_heatmap():
    root, words = parse(heatmap("t", ["r1", "r2"], ["c1", "c2"], [[1.0, -2.0], [None, 0.0]], digits=1))
    assert {"1.0", "-2.0", "0.0", "r1", "c2"} <= set(words)
    fills = [node.get("fill") for node in root.iter(f"{SVG}rect")][1:]
    assert fills[2] == "#f4f4f4"
    assert fills[0] != fills[1]
    assert inside(root)


def test_an_empty_chart_is_still_drawn():
    for text in (lines("title", {}, [], y_label="y"), bars("title", {}), heatmap("title", [], [], [])):
        assert "title" in parse(text)[1]
