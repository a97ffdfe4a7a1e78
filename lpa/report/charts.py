"""Charts as SVG text: lines and bars, plain or logarithmic axes. Colours are the page's and follow its theme."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from .items import Cell, Chart, Figure, Line

WIDTH, HEIGHT = 540, 320
SMALL = 310  # width of a chart that stands beside others of its kind
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 12, 46
TONES = 4
DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 4")
MARKS = ("circle", "square", "diamond", "triangle", "cross", "wedge")
STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))  # of a decade, coarse to fine
MANY = 24  # points beyond which a line has no marks
EMPTY = "not measured yet"

Scale = Callable[[float], float]


def number(cell: Cell) -> float | None:
    if isinstance(cell, Figure):
        return cell.value
    return float(cell) if isinstance(cell, int | float) else None


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers from `low` to `high`: about five; on a log axis decades, or more where these are few."""

    def inside(marks: list[float]) -> list[float]:
        return [m for m in marks if low * (1 - 1e-9) <= m <= high * (1 + 1e-9)]

    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        finer = [inside([s * 10.0**d for d in decades for s in steps]) for steps in STEPS]
        return next((marks for marks in finer if len(marks) >= 3), finer[-1])
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw)
    return inside([step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)])


def axis(values: list[float], log: bool, start: float, end: float, zero: bool = True) -> tuple[Scale, list[float]]:
    """The scale of values onto pixels from start to end, and its ticks. `zero`: a plain axis starts there."""
    high = max(values, default=1.0)
    if log:
        low = min((v for v in values if v > 0), default=1.0)
        low, high = (low / 1.25, high * 1.25) if low < high else (low / 2, low * 2)
        span = math.log10(high / low)
        return lambda v: start + (end - start) * math.log10(max(v, low) / low) / span, ticks(low, high, True)
    low = min(values, default=0.0)
    if zero or low == high:
        low = min(0.0, low)
        high = high * 1.05 if high > low else low + 1
    else:
        low, high = low - (high - low) * 0.1, high + (high - low) * 0.1
    return lambda v: start + (end - start) * (v - low) / (high - low), ticks(low, high, False)


def label(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if abs(value) >= 10 or value == round(value) else f"{value:g}"


def draw(chart: Chart) -> str:
    """The chart with its legend, as a <figure>."""
    ys = [y for line in chart.lines for _, cell in line.points if (y := number(cell)) is not None]
    body = bars(chart, ys) if chart.bars else curves(chart, ys)
    if not ys:
        empty = text(width(chart) / 2, HEIGHT / 2 - 20, EMPTY, "empty", "middle")
        body = frame(chart, lambda y: HEIGHT - BOTTOM, []) + empty
    svg = f'<svg viewBox="0 0 {width(chart)} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">{body}</svg>'
    kind = ' class="small"' if chart.small else ""
    return f'<figure id="{chart.id}"{kind}><figcaption>{escape(chart.title)}</figcaption>{svg}{legend(chart)}</figure>'


def width(chart: Chart) -> int:
    return SMALL if chart.small else WIDTH


def style(lines: list[Line] | tuple[Line, ...], index: int) -> tuple[str, str, str]:
    """Class, dash and mark of a line: ours in the accent colour and its tints, the paper's in grey.

    There are 4, 5 and 6 of these, so that of a dozen lines no two are alike in two of the three.
    """
    line = lines[index]
    place = sum(other.ours == line.ours for other in lines[:index])
    kind = "ours" if line.ours else "theirs"
    return f"{kind} tone{place % TONES}", DASHES[place % len(DASHES)], MARKS[place % len(MARKS)]


def drawn(chart: Chart) -> list[Line]:
    """The lines that there is something of: what a legend names."""
    return [line for line in chart.lines if line.points]


def curves(chart: Chart, ys: list[float]) -> str:
    lines = drawn(chart)
    xs = [float(x) for line in lines for x, _ in line.points]
    to_x, x_ticks = axis(xs, chart.log_x, LEFT, width(chart) - RIGHT)
    to_y, y_ticks = axis(ys, chart.log_y, HEIGHT - BOTTOM, TOP, chart.zero)
    if chart.log_x and xs and len(set(xs)) <= 7:
        x_ticks = sorted(set(xs))
    parts = [frame(chart, to_y, y_ticks)]
    for x in x_ticks:
        parts.append(text(to_x(x), HEIGHT - BOTTOM + 18, label(x), "tick", "middle"))
    for index, line in sorted(enumerate(lines), key=lambda pair: pair[1].ours):
        tone, dash, mark = style(lines, index)
        points = [(to_x(float(x)), to_y(y), c) for x, c in line.points if (y := number(c)) is not None]
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline class="line {tone}" stroke-dasharray="{dash}" points="{path}"/>')
        if len(points) <= MANY:
            parts += [dot(x, y, mark, tone, line.name, cell) for x, y, cell in points]
    return "".join(parts)


def bars(chart: Chart, ys: list[float]) -> str:
    lines = drawn(chart)
    to_y, y_ticks = axis(ys, chart.log_y, HEIGHT - BOTTOM, TOP)
    parts = [frame(chart, to_y, y_ticks)]
    slot = (width(chart) - RIGHT - LEFT) / len(chart.bars)
    thick = slot * 0.8 / max(1, len(lines))
    for i in range(len(chart.bars)):
        parts.append(text(LEFT + slot * (i + 0.5), HEIGHT - BOTTOM + 18, str(i + 1), "tick", "middle"))
    for index, line in enumerate(lines):
        tone, _, _ = style(lines, index)
        for place, cell in line.points:
            if (y := number(cell)) is None:
                continue
            x, top = LEFT + slot * (place + 0.1) + thick * index, to_y(y)
            name = f"{line.name}: {chart.bars[int(place)]}"
            size = f'width="{thick * 0.92:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
            shape = f'<rect class="bar {tone}" x="{x:.1f}" y="{top:.1f}" {size}>'
            parts.append(linked(shape + f"<title>{escape(name)}, {said(cell)}</title></rect>", cell))
    return "".join(parts)


def frame(chart: Chart, to_y: Scale, y_ticks: list[float]) -> str:
    parts = []
    for y in y_ticks:
        across = f'x1="{LEFT}" x2="{width(chart) - RIGHT}" y1="{to_y(y):.1f}" y2="{to_y(y):.1f}"'
        parts.append(f'<line class="grid" {across}/>')
        parts.append(text(LEFT - 7, to_y(y) + 4.5, label(y), "tick", "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="translate(13 {middle}) rotate(-90)"'
    parts.append(f'<text class="name" {turned}>{escape(chart.y)}</text>')
    parts.append(text((LEFT + width(chart) - RIGHT) / 2, HEIGHT - 8, chart.x, "name", "middle"))
    return "".join(parts)


def text(x: float, y: float, words: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def dot(x: float, y: float, mark: str, tone: str, name: str, cell: Cell) -> str:
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6"',
        "square": f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"',
        "diamond": f'<path d="M{x:.1f} {y - 4.6:.1f}l4.6 4.6-4.6 4.6-4.6-4.6z"',
        "triangle": f'<path d="M{x:.1f} {y - 4.4:.1f}l4.4 7.6h-8.8z"',
        "cross": f'<path d="M{x - 1.4:.1f} {y - 4.2:.1f}h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z"',
        "wedge": f'<path d="M{x - 4.4:.1f} {y - 3.4:.1f}h8.8l-4.4 7.6z"',
    }
    title = f"<title>{escape(name)}, {said(cell)}</title>"
    tag = shapes[mark].split(" ", 1)[0][1:]
    return linked(f'{shapes[mark]} class="dot {tone}">{title}</{tag}>', cell)


def linked(shape: str, cell: Cell) -> str:
    return f'<a href="#{cell.ids[0]}">{shape}</a>' if isinstance(cell, Figure) else shape


def said(cell: Cell) -> str:
    return f"{cell.number()} ({cell.around()})" if isinstance(cell, Figure) else f"{cell:g}" if cell is not None else ""


def legend(chart: Chart) -> str:
    lines = drawn(chart)
    if [line.name for line in lines] == [chart.y]:
        return ""  # the axis says it
    keys = []
    for index, line in enumerate(lines):
        tone, dash, mark = style(lines, index)
        if chart.bars:
            swatch = f'<rect class="bar {tone}" width="12" height="12" x="6" y="1"/>'
        else:
            swatch = f'<line class="line {tone}" stroke-dasharray="{dash}" x1="0" x2="24" y1="7" y2="7"/>'
            swatch += dot(12, 7, mark, tone, line.name, None) if len(line.points) <= MANY else ""
        keys.append(f'<li><svg width="24" height="14" aria-hidden="true">{swatch}</svg>{escape(line.name)}</li>')
    if chart.bars:
        keys += [f"<li class=number><b>{i}</b>{escape(name)}</li>" for i, name in enumerate(chart.bars, 1)]
    return f"<ul class=legend>{''.join(keys)}</ul>" if keys else ""
