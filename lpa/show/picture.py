"""The picture as a PNG: one moment of the recording, and where it looks in every layer."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from .legend import INTRO, PULSES, guide, percent, ticks
from .looks import Layer
from .pulses import text_rows
from .scene import Scene, shown

BACK, INK, MUTED, ACCENT = "#fcfcfa", "#1d2126", "#59626a", "#0a6c8f"
PALE, SHADE, HAIR, WAVE = "#cfe3ea", "#f1f2ef", "#d5d9db", "#9aa3aa"  # hills behind pulses, words, lines, waveform
MAP = 300  # rows and columns of a matrix that are drawn
WIDTH, LABEL, STRIP, SIDE = 13.0, (0.25, 2.2), (2.65, 8.7), (11.55, 1.2)  # inches: of all, and left and width of each
COLUMNS = (  # what is explained above each, with the letters that fit a line of it
    (LABEL, 42, ("difficulty", "importance")),
    (STRIP, 165, ("hills", "bars", "swept")),
    (SIDE, 24, ("squares",)),
)
HEARD, LAYER = 2.0, 1.5  # inches: of the waveform with its words and times, and of a layer at the least
LETTERS = 60  # of a word that are written: more than any word, fewer than a strip is wide
LINE, ROW = 0.062, 0.14  # inches: between two lines of pulses, at the least, and of a row of text under them


def draw(scene: Scene, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    told = {name: text.replace("`", "") for name, text in guide(bool(scene.kinds), bool(scene.swept)).items()}
    notes = [
        list(chain(*(textwrap.wrap(f"{name}: {told[name]}", letters) for name in names if name in told)))
        for _, letters, names in COLUMNS
    ]
    head = 1.0 + 0.17 * -(-len(scene.kinds) // 2)
    explained = 0.125 * max(map(len, notes)) + 0.3
    tall = [max(LAYER, 0.3 + LINE * len(layer.lines) + text_height(layer)) for layer in scene.layers]
    whole = head + HEARD + explained + sum(tall) + 0.35
    figure = pyplot.figure(figsize=(WIDTH, whole), dpi=130, facecolor=BACK)

    def panel(column: tuple[float, float], top: float, high: float) -> Any:
        """A part of the picture in inches, down from its own top left corner."""
        axis = figure.add_axes((column[0] / WIDTH, 1 - (top + high) / whole, column[1] / WIDTH, high / whole))
        axis.set(xticks=[], yticks=[], facecolor="none", xlim=(0, column[1]), ylim=(high, 0))
        axis.spines[:].set_visible(False)
        return axis

    moment = (scene.focus + 0.5) * scene.step
    write_head(panel((0.25, WIDTH - 0.5), 0, head), scene)
    note = panel(LABEL, head, HEARD)
    note.text(0, 0.4, "What is heard", fontsize=10, color=INK, weight="bold")
    note.text(0, 0.62, f"the line marks the moment at {moment:.2f} s", fontsize=7.5, color=MUTED)
    note.text(0, 1.17, "the words the model reads from it", fontsize=7.5, color=MUTED)
    draw_wave(panel(STRIP, head, 1.0), scene, moment)
    write_words(panel(STRIP, head + 1.0, 0.65), scene)
    write_times(panel(STRIP, head + 1.65, 0.01), scene)
    top = head + HEARD
    for (column, _, _), lines in zip(COLUMNS, notes, strict=True):
        note = panel(column, top, explained)
        note.text(0, 0, "\n".join(lines), fontsize=7, color=MUTED, va="top", linespacing=1.25)
    top += explained
    for layer, high in zip(scene.layers, tall, strict=True):
        write_label(panel(LABEL, top, high - 0.15), layer, scene)
        draw_strip(panel(STRIP, top, high - 0.15), layer, scene, high - 0.15)
        draw_map(panel(SIDE, top, SIDE[1]), layer, scene)
        top += high
    write_times(panel(STRIP, top - 0.15, 0.01), scene)
    figure.savefig(out, dpi="figure", facecolor=BACK, metadata={"Software": None})  # as its texts were measured
    pyplot.close(figure)


def write_head(axis: Any, scene: Scene) -> None:
    axis.text(0, 0.33, scene.name, fontsize=13, color=INK, weight="bold", parse_math=False)
    axis.text(0, 0.53, scene.model, fontsize=9, color=MUTED, parse_math=False)
    axis.text(0, 0.75, INTRO, fontsize=8.5, color=INK)
    for number, kind in enumerate(scene.kinds):
        x, y = 6.2 * (number % 2), 0.97 + 0.17 * (number // 2)
        axis.plot([x, x + 0.25], [y - 0.04] * 2, color=PULSES[kind].light, linewidth=5, solid_capstyle="butt")
        axis.text(x + 0.32, y, kind, fontsize=8, color=PULSES[kind].light, weight="bold")
        axis.text(x + 1.05, y, PULSES[kind].about, fontsize=8, color=MUTED)


def draw_wave(axis: Any, scene: Scene, moment: float) -> None:
    loud = scene.peaks()
    axis.fill_between(np.linspace(0, scene.seconds, len(loud)), -loud, loud, color=WAVE, linewidth=0)
    axis.axvline(moment, color=INK, linewidth=0.9)
    axis.set(xlim=(0, scene.seconds), ylim=(-1.05, 1.05))


def write_words(axis: Any, scene: Scene) -> None:
    """Under where they are heard, each in the first of three rows that has room; the word that is looked from first."""
    axis.set_xlim(0, scene.seconds)
    if not scene.words:
        axis.text(0, 0.2, scene.wordless, fontsize=8.5, color=MUTED)
        return
    middle = (scene.focus + 0.5) * scene.step
    rows: list[list[tuple[float, float]]] = [[], [], []]
    here = [word.start <= middle < word.end for word in scene.words]
    for word, marked in sorted(zip(scene.words, here, strict=True), key=lambda pair: not pair[1]):
        style = {"color": ACCENT, "weight": "bold"} if marked else {"color": INK}
        told = word.word if len(word.word) <= LETTERS else word.word[: LETTERS - 1] + "…"
        label = axis.text((word.start + word.end) / 2, 0, told, fontsize=8.5, ha="center", parse_math=False, **style)
        left, right = span(label, axis)
        shift = max(0.0, -left) - max(0.0, right - scene.seconds)  # inside the picture
        left, right, gap = left + shift, right + shift, 0.006 * scene.seconds
        free = (n for n, row in enumerate(rows) if all(right + gap < a or b + gap < left for a, b in row))
        row = next(free, None)
        if row is None:
            label.remove()  # better left out than unreadable
            continue
        rows[row].append((left, right))
        label.set_position(((left + right) / 2, 0.2 + 0.19 * row))
        label.set_gid("word")


def write_times(axis: Any, scene: Scene) -> None:
    axis.set_xlim(0, scene.seconds)
    axis.set_xticks(*zip(*ticks(scene.seconds), strict=True))
    axis.tick_params(length=3, color=HAIR, labelsize=8, labelcolor=MUTED)


def span(text: Any, axis: Any) -> tuple[float, float]:
    """Where a text starts and ends, on the axis."""
    box = text.get_window_extent().transformed(axis.transData.inverted())
    return box.x0, box.x1


def write_label(axis: Any, layer: Layer, scene: Scene) -> None:
    axis.text(0, 0.14, f"Layer {layer.index}", fontsize=10, color=INK, weight="bold")
    axis.text(0.82, 0.14, layer.mixer, fontsize=10, color=ACCENT, weight="bold")
    y = 0.36
    for name, share in scene.shares(layer).items():
        colour = INK if name == "importance" else ACCENT
        axis.text(0, y, name, fontsize=7.5, color=MUTED)
        axis.text(2.1, y, percent(share), fontsize=7.5, color=INK, ha="right")
        for end, shade in ((1.0, HAIR), (min(1.0, share), colour)):
            axis.plot([0.68, 0.68 + 0.8 * end], [y - 0.035] * 2, color=shade, linewidth=3.5, solid_capstyle="butt")
        y += 0.18
    for number, line in enumerate(scene.facts(layer)):
        axis.text(0, y + 0.02 + 0.15 * number, line, fontsize=7.5, color=MUTED)


def draw_strip(axis: Any, layer: Layer, scene: Scene, high: float) -> None:
    """Behind, where words are; then how much is taken from where; in front the pulses. Inches, from the top."""
    axis.set(xlim=(0, scene.seconds), ylim=(high, 0))
    for word in scene.words or ():
        axis.axvspan(word.start, word.end, color=SHADE, linewidth=0)
    row = layer.weight[scene.focus].numpy()
    row = np.sqrt(row / max(float(row.max()), 1e-12))
    edges = np.arange(scene.frames + 1) * scene.step
    hills = PALE if layer.lines else ACCENT
    axis.stairs(high - row * (high - 0.05), edges, baseline=high, fill=True, color=hills, linewidth=0)
    axis.axhline(high, color=HAIR, linewidth=0.8)
    moment = (scene.focus + 0.5) * scene.step
    used = [[float(pulse.used[scene.focus]) for pulse in line] for line in layer.lines]
    most = max(chain(*used), default=0.0)
    room = (high - text_height(layer)) / max(1, len(layer.lines))
    tall, top = min(0.72 * room, 0.1), 0.0
    block: list[Told] = []
    for line, takes, text in zip(layer.lines, used, text_rows(layer.lines), strict=True):
        y = top + (room - tall) / 2
        for pulse, taken in zip(line, takes, strict=True):
            bars = [(a * scene.step, (b - a) * scene.step) for a, b in pulse.at(scene.focus)]
            if not bars:
                continue
            alpha = 0.18 + 0.82 * (taken / max(most, 1e-12)) ** 0.5
            look = {"color": PULSES[pulse.kind].light, "alpha": alpha, "linewidth": 0.4, "edgecolor": BACK}
            axis.broken_barh(bars, (y, tall), **look)
            near = min(bars, key=lambda bar: abs(bar[0] + bar[1] / 2 - moment))
            block.append(Told(taken, bars, near, y, scene.width(pulse, scene.focus)))
        top += room
        if text:
            write_widths(axis, block, y + tall, tall, moment)
            top += ROW
            block = []
    axis.axvline(moment, color=INK, linewidth=0.9)


def text_height(layer: Layer) -> float:
    return ROW * sum(text_rows(layer.lines))


@dataclass(frozen=True)
class Told:
    """A pulse as it is drawn: bars are (start, length), in seconds."""

    taken: float
    bars: list[tuple[float, float]]
    near: tuple[float, float]  # the bar next to the moment
    top: float
    text: str


def write_widths(axis: Any, block: list[Told], bottom: float, tall: float, moment: float) -> None:
    """Of the strongest pulses, under them how wide they are; of several lines, of the strongest only."""
    several = len({pulse.top for pulse in block}) > 1
    end = axis.get_xlim()[1]
    written: list[tuple[float, float]] = []
    for pulse in sorted(block, key=lambda pulse: -pulse.taken):
        label = axis.text(0, bottom + 0.03, pulse.text, fontsize=7, color=INK, ha="center", va="top")
        left, right = span(label, axis)
        half = (right - left) / 2 + 0.003 * end
        start, stop = pulse.near[0], sum(pulse.near)
        middle = min(max((start + stop) / 2, half), end - half)
        places = [middle]
        if abs(middle - moment) < half:  # beside the line
            places = [moment + half] * (stop > moment) + [moment - half] * (start < moment)
        under = [p for p in places if several or (start < p + half and p - half < stop)]
        inside = [p for p in under if half <= p <= end - half]
        free = [p for p in inside if all(abs(p - other) >= half + its for other, its in written)]
        if not free:
            label.remove()
            continue
        place = free[0]
        label.set(x=place, gid="width")
        axis.broken_barh(pulse.bars, (pulse.top, tall), facecolor="none", edgecolor=INK, linewidth=0.7)
        written.append((place, half))
        if several:
            break


def draw_map(axis: Any, layer: Layer, scene: Scene) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    side = min(MAP, scene.frames)
    colours = LinearSegmentedColormap.from_list("accent", [SHADE, ACCENT])
    axis.imshow(shown(layer.weight, side, side), cmap=colours, vmin=0, vmax=1, extent=(0, SIDE[1], SIDE[1], 0))
    axis.axhline((scene.focus + 0.5) / scene.frames * SIDE[1], color=INK, linewidth=0.6)
