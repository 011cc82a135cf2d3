"""Charts for the docs as SVG text, without a plotting library: lines, bars and a heatmap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito's palette, which colour-blind readers can distinguish.
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
_INK, _FAINT = "#222222", "#d9d9d9"
_Value = float | None


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, extra: str = "") -> str:
    head = f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{_INK}"'
    return f"{head} {extra}>{escape(words)}</text>"


def _page(width: float, height: float, title: str, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}" '
        'font-family="system-ui, sans-serif">'
    )
    paper = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, paper, _text(16, 24, title, size=15), *body, "</svg>"]) + "\n"


def _legend(names: Sequence[str], x: float, y: float, width: float) -> tuple[list[str], float]:
    """The legend, wrapped to the width, and the y position of its last line."""
    parts, at = [], x
    for i, name in enumerate(names):
        length = 30 + 6.4 * len(name)
        if at > x and at + length > width:
            at, y = x, y + 18
        colour = _PALETTE[i % len(_PALETTE)]
        parts.append(f'<rect x="{at:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(at + 14, y, name, size=11))
        at += length
    return parts, y


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, six steps at most."""
    power = 10.0 ** math.floor(math.log10(max(high - low, 1e-3) / 6))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= 6)
    first = int(low / step)
    return [round(i * step, 6) for i in range(first, int(high / step) + 2) if low <= i * step <= high + 1e-9]


def lines(
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[_Value]]],
    x_labels: Sequence[str],
    *,
    y_label: str,
    columns: int = 2,
    low: float | None = None,
) -> str:
    """Line charts over common x positions; None is a gap. All panels share the y axis and the legend."""
    values = [v for panel in panels.values() for line in panel.values() for v in line if v is not None]
    bottom = low if low is not None else min(values, default=0.0)
    top = max(values, default=1.0)
    top += 0.05 * (top - bottom or 1.0)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    columns = min(columns, max(1, len(panels)))
    wide, tall, left = 420.0 if columns > 1 else 700.0, 230.0, 56.0
    rows = -(-len(panels) // columns)
    body, reached = _legend(names, 16, 46, left + columns * (wide + 60) - 30)
    above = reached + 20
    for number, (panel, series) in enumerate(panels.items()):
        x0, y0 = left + (number % columns) * (wide + 60), above + (number // columns) * (tall + 62)
        body += _panel(panel, series, names, x_labels, (x0, y0, wide, tall), (bottom, top))
    body.append(
        _text(14, above + tall / 2, y_label, anchor="middle", size=11, extra=_turn(14, above + tall / 2))
    )
    return _page(left + columns * (wide + 60) - 30, above + rows * (tall + 62), title, body)


def _turn(x: float, y: float) -> str:
    return f'transform="rotate(-90 {x:.1f} {y:.1f})"'


def _panel(
    name: str,
    series: Mapping[str, Sequence[_Value]],
    names: Sequence[str],
    x_labels: Sequence[str],
    box: tuple[float, float, float, float],
    span: tuple[float, float],
) -> list[str]:
    x0, y0, wide, tall = box
    bottom, top = span

    def y_of(value: float) -> float:
        return y0 + 16 + (tall - 16) * (top - value) / (top - bottom)

    def x_of(index: int) -> float:
        return x0 + wide * (index + 0.5) / max(1, len(x_labels))

    body = [_text(x0 + wide / 2, y0 + 8, name, anchor="middle")]
    for tick in _ticks(bottom, top):
        y = y_of(tick)
        body.append(f'<path d="M{x0:.1f} {y:.1f}h{wide:.1f}" stroke="{_FAINT}"/>')
        body.append(_text(x0 - 6, y + 4, f"{tick:g}", anchor="end", size=11))
    for i, label in enumerate(x_labels):
        body.append(_text(x_of(i), y0 + tall + 16, label, anchor="middle", size=11))
    for line, points in series.items():
        colour = _PALETTE[names.index(line) % len(_PALETTE)]
        pen, path = "M", []
        for i, value in enumerate(points):
            if value is None:
                pen = "M"
                continue
            path.append(f"{pen}{x_of(i):.1f} {y_of(value):.1f}")
            body.append(f'<circle cx="{x_of(i):.1f}" cy="{y_of(value):.1f}" r="3" fill="{colour}"/>')
            pen = "L"
        if path:
            body.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return body


def bars(
    title: str,
    groups: Mapping[str, Mapping[str, _Value]],
    *,
    unit: str = "",
    mark: tuple[str, float] | None = None,
    digits: int = 1,
) -> str:
    """Grouped horizontal bars, labelled with their values; `mark` is a labelled vertical line."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    values = [v for group in groups.values() for v in group.values() if v is not None]
    top = max([*values, mark[1] if mark else 0.0, 0.0]) * 1.12 or 1.0
    left, wide, thick = 16 + 6.8 * max(map(len, groups), default=4), 520.0, 15.0
    step = thick * len(names) + 9
    body, reached = _legend(names, 16, 46, left + wide) if len(names) > 1 else ([], 46.0)
    y = reached + 16
    for label, group in groups.items():
        body.append(_text(left - 6, y + step / 2 - 1, label, anchor="end"))
        for i, name in enumerate(names):
            value, at = group.get(name), y + i * thick
            if value is None:
                continue
            length = max(0.0, wide * value / top)
            colour = _PALETTE[i % len(_PALETTE)]
            size = f'width="{length:.1f}" height="{thick - 3:.1f}"'
            body.append(f'<rect x="{left:.1f}" y="{at:.1f}" {size} fill="{colour}"/>')
            said = f"{round(value, digits) + 0.0:.{digits}f}{unit}"  # never -0
            body.append(_text(left + length + 4, at + thick - 5, said, size=11))
        y += step
    if mark is not None:
        x = left + wide * mark[1] / top
        body.append(f'<path d="M{x:.1f} 56V{y:.1f}" stroke="{_INK}" stroke-dasharray="4 3"/>')
        body.append(_text(x, y + 14, f"{mark[0]} {mark[1]:.{digits}f}{unit}", anchor="middle", size=11))
    return _page(left + wide + 70, y + 26, title, body)


def heatmap(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[_Value]],
    *,
    middle: float = 0.0,
    digits: int = 0,
) -> str:
    """A table whose cells are coloured by their distance from `middle`: blue above, orange below."""
    known = [v for row in values for v in row if v is not None]
    reach = max((abs(v - middle) for v in known), default=1.0) or 1.0
    left, wide, tall, above = 20 + 6.8 * max(map(len, rows), default=4), 58.0, 28.0, 60.0
    body = [
        _text(left + (i + 0.5) * wide, above - 8, c, anchor="middle", size=11) for i, c in enumerate(columns)
    ]
    for r, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = above + r * tall
        body.append(_text(left - 6, y + tall / 2 + 4, name, anchor="end"))
        for c, value in enumerate(row):
            x = left + c * wide
            fill = "#f4f4f4" if value is None else _shade(value - middle, reach)
            words = "" if value is None else f"{value:.{digits}f}"
            size = f'width="{wide - 2:.1f}" height="{tall - 2:.1f}"'
            body.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{fill}"/>')
            dark = value is not None and abs(value - middle) > 0.6 * reach
            body.append(
                f'<text x="{x + wide / 2 - 1:.1f}" y="{y + tall / 2 + 3:.1f}" text-anchor="middle" '
                f'font-size="11" fill="{"#ffffff" if dark else _INK}">{words}</text>'
            )
    return _page(left + len(columns) * wide + 20, above + len(rows) * tall + 16, title, body)


def _shade(distance: float, reach: float) -> str:
    target = (0, 90, 160) if distance >= 0 else (200, 85, 0)
    share = min(1.0, abs(distance) / reach)
    return "#" + "".join(f"{round(250 + (t - 250) * share):02x}" for t in target)
