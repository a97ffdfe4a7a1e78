"""The README's picture, from records like everything else: what attention's removal costs, by depth and by duration."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from importlib.resources import files

from . import charts, ours, paper, quality
from .conversions import curves
from .items import Chart, Line
from .measured import Record, of_paper_model

PLACE = "docs/headline.svg"  # as the README names it
BUILT_FROM = "whisper-base-ctc"  # what the built-in model was converted from
ROW, HEAD = 19, 34  # pixels of a line of the legend, and above a chart


def picture(found: list[Record]) -> str:
    """Two charts side by side as one SVG file, in the page's colours, light or dark as the reader's screen is."""
    panels = [by_depth(found), by_duration(found)]
    legends = max(len(panel.lines) for panel in panels)
    width, height = charts.WIDTH * len(panels), HEAD + charts.HEIGHT + ROW * legends + 8
    body = "".join(f'<g transform="translate({charts.WIDTH * i} 0)">{draw(p)}</g>' for i, p in enumerate(panels))
    style = files(__package__).joinpath("charts.css").read_text(encoding="utf-8")
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    back = f'<rect width="{width}" height="{height}" style="fill: var(--card)"/>'
    font = "text { font-family: system-ui, sans-serif; fill: var(--ink); } .head { font-weight: 600; font-size: 16px; }"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}\n{font}</style>{back}{body}</svg>\n'


def draw(chart: Chart) -> str:
    """A chart with its title above and its legend below, without links, which a picture cannot have."""
    lines = [
        replace(line, points=[(x, charts.number(cell)) for x, cell in line.points]) for line in charts.drawn(chart)
    ]
    plain = replace(chart, lines=lines)
    ys = [y for line in plain.lines for _, y in line.points if isinstance(y, float)]
    parts = [charts.text(charts.LEFT, 22, chart.title, "head", "start")]
    parts.append(f'<g transform="translate(0 {HEAD})">{charts.curves(plain, ys)}</g>')
    for index, line in enumerate(lines):
        tone, dash, mark = charts.style(lines, index)
        y = HEAD + charts.HEIGHT + ROW * index + 4
        parts.append(
            f'<line class="line {tone}" stroke-dasharray="{dash}" x1="{charts.LEFT}" x2="{charts.LEFT + 28}" '
            f'y1="{y}" y2="{y}"/>{charts.dot(charts.LEFT + 14, y, mark, tone, line.name, None)}'
            f'<text class="tick" x="{charts.LEFT + 38}" y="{y + 4.5}">{escape(line.name)}</text>'
        )
    return "".join(parts)


def by_depth(found: list[Record]) -> Chart:
    """Points of WER that a conversion adds, by the layers it has replaced, of 12."""
    theirs = [(float(n), row[-1] - paper.PROGRESSIVE[0][-1]) for n, row in paper.PROGRESSIVE.items()]
    lines = [Line("the paper's recipe, as published (wav2vec2-base)", theirs)]
    ours_here = curves(filter(of_paper_model, found))
    named = {
        "our recipe (wav2vec2-12)": ours_here.get(quality.best_known(ours_here), {}),
        "the paper's recipe, here (wav2vec2-12)": quality.most_trained(found),
    }
    for name, line in named.items():
        if 0 in line:
            lines.append(Line(name, [(float(n), f.value - line[0].value) for n, f in line.items()], ours=True))
    title = "What it costs to replace attention"
    return Chart("", title, "layers replaced, of 12", "points of WER, held-out speakers", lines)


def by_duration(found: list[Record]) -> Chart:
    """WER by duration, with attention and positions, and without either."""
    drawn = ours.durations(found).get(BUILT_FROM, [])

    def best(start: str, end: str = "") -> Line | None:
        """Of the lines named so, which differ in size or in how recordings were cut, the one that ends lowest."""
        lines = [line for line in drawn if line.name.startswith(start) and end in line.name and line.points]
        return min(lines, key=lambda line: charts.number(line.points[-1][1]) or 0.0, default=None)

    attention, pyramid = best(ours.UNCHANGED), best("pyramid", "no positions")
    lines = []
    if attention:
        cut = attention.name.removeprefix(ours.UNCHANGED)
        lines.append(replace(attention, name=f"with attention and positions{cut}", ours=False))
    if pyramid:
        lines.append(replace(pyramid, name="with neither, in one pass (as the built-in model)"))
    return Chart("", "WER as recordings get longer", *ours.DURATION_AXES, lines, log_x=True)
