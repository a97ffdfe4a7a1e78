"""The page's charts: lines that can be told apart, in the chart and in its legend."""

import re
from itertools import combinations

import pytest
import report_records

from lpa import records
from lpa.report import charts, measured, speed
from lpa.report.items import Chart, Line

DOZEN = 12


@pytest.mark.parametrize("ours", [True, False])
def test_of_a_dozen_lines_no_two_share_two_of_tone_dash_and_mark(ours):
    lines = [Line(str(n), [(n, 1.0)], ours) for n in range(DOZEN)]
    styles = [charts.style(lines, n) for n in range(DOZEN)]
    for one, other in combinations(range(3), 2):
        assert len({(style[one], style[other]) for style in styles}) == DOZEN


def test_the_legend_shows_each_line_as_it_is_drawn():
    named = [Line(f"line {n}", [(0, 1.0), (1, n + 1.0)] if n != 1 else [], ours=n % 2 > 0) for n in range(2 * DOZEN)]
    drawn, legend = charts.draw(Chart("c", "c", "x", "y", named)).split("<ul class=legend>")

    def looks(text: str) -> set[tuple[str, str, str]]:
        """Line, colour and the shape of its mark, wherever that is."""
        dots = re.findall(r'<(\w+ [^>]*) class="dot ([^"]+)"><title>(line \d+)', text)
        return {(name, kind, re.sub(r'M[\d.]+ [\d.]+|\b(cx|cy|x|y)="[^"]*"', "", shape)) for shape, kind, name in dots}

    assert looks(legend) == looks(drawn)
    assert len(looks(legend)) == 2 * DOZEN - 1  # the empty one is in neither, and shifts no other
    assert len({look[1:] for look in looks(legend)}) == 2 * DOZEN - 1
    dashes = re.compile(r'stroke-dasharray="([^"]*)"')
    assert sorted(dashes.findall(legend)) == sorted(dashes.findall(drawn))


def test_what_gives_no_text_is_not_drawn_as_text(tmp_path):
    figures = {"seconds": 20, "wall_s": 11.5, "ms_per_second": 575.0, "peak_mb": 1000.0}
    about = {"what": "enhance, torch", "model": "default", "data": "noisy.flac"}
    records.write("bench", figures=figures, folder=report_records.write(tmp_path), **about)
    found = measured.load(tmp_path)
    assert len(speed.start_to_text(found).grid.rows) == 3
    for figure in (speed.figure_3(found), speed.figure_4(found)):
        (chart,) = (chart for chart in figure.charts if chart.id.endswith("-start"))
        assert [line.name for line in chart.lines] == ["transcribe with onnx, default"]
