"""The README's tables, between markers, made from records: what is written there by hand is everything else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import LpaError, choose
from . import cleaning, layer, ours, speed
from .conversions import Result, results
from .items import MISSING, ONE_RUN, Cell, Figure, Grid, Item, gap, machine_below
from .measured import Record, figure, grouped, split_of

STAND_IN = ("pyramid", "window")  # mixers that do attention's work before any training
MARKED = re.compile(r"(<!-- lpa report: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)
MIXERS = ("lpa", "lpa-hard", "ladder", "anchored", "pyramid", "window")  # what the README's layer table shows


def rewrite(text: str, found: list[Record], name: str = "README.md") -> str:
    """The text with every block between `<!-- lpa report: NAME -->` and `<!-- end -->` made again."""
    starts = text.count("<!-- lpa report:")
    if starts != len(MARKED.findall(text)):
        raise LpaError(f"{name}: every <!-- lpa report: NAME --> needs its <!-- end -->, and NAME is one word")
    return MARKED.sub(lambda m: f"{m[1]}{choose(m[2], BLOCKS, 'table')(found)}{m[4]}", text)


def read(path: Path) -> str:
    if not path.is_file():
        raise LpaError(f"{path} is not there; run this in a clone of the repository, or name --readme")
    return path.read_text(encoding="utf-8")


def block(item: Item) -> str:
    """An item's grid in Markdown, and below it how often that was measured, and what else there is to say."""
    if item.verdict.mark == MISSING or item.grid is None:
        return f"Not measured yet: {item.verdict.what}.\n"
    grid, *notes = machine_below(item.grid)
    return f"{table(grid)}\n{' '.join([runs(grid), *notes, *item.notes])}\n"


def runs(grid: Grid) -> str:
    """How the figures' spread is to be read, where they do not say it themselves."""
    if all(f.low is None for f in grid.figures()):
        return f"{ONE_RUN.capitalize()} each."
    return "In brackets what the spread is; figures without are of one run."


def table(grid: Grid) -> str:
    lines = ["| " + " | ".join(grid.columns) + " |", "|" + "---|" * len(grid.columns)]
    lines += ["| " + " | ".join(said(cell, grid.digits) for cell in row) + " |" for row in grid.rows]
    return "\n".join(lines) + "\n"


def said(cell: Cell, digits: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Figure):
        return cell.number() if cell.low is None else f"{cell.number()} ({cell.around()})"
    return f"{cell:,.{digits}f}" if isinstance(cell, float) else str(cell)


def layers(found: list[Record]) -> str:
    """Times as fast as attention, a column a mixer: of the CPU records in float32, on the machine of the latest."""
    timed = [r for r in found if r["kind"] == "bench" and r["what"] == "layer, width 768, float32, cpu"]
    if not timed:
        return block(layer.layer_table([]))
    last = max(timed, key=lambda r: r["date"])
    timed = [r for r in timed if r["machine"] == last["machine"]]
    rows: list[list[Cell]] = []
    for frames, some in sorted(grouped(timed, lambda r: r["figures"]["frames"]).items()):
        by_mixer = grouped(some, lambda r: r["model"])
        length = frames / speed.FRAMES_A_SECOND
        audio = f"{length / 60:g} min" if length >= 60 else f"{length:g} s"
        gains = [figure(by_mixer.get(name, []), "speedup", 1) for name in MIXERS]
        rows.append([f"{frames:,} ({audio})", *gains])
    grid = Grid(("frames (audio)", *(layer.NAMES.get(name, name) for name in MIXERS)), rows)
    how = f"`{last['command']}` on {last['machine']}, attention and all of these in turn (`results/bench.jsonl`)"
    return f"{table(grid)}\n{how}. {runs(grid)}\n"


def models(found: list[Record]) -> str:
    """What was tested on speech nobody trained on: the models that are in the repository, or all where none is."""
    unheard = [r for r in found if (split_of(r) or "").startswith("test")]
    shipped = [r for r in unheard if r["model"] == "default" or r["model"].startswith("models/")]
    return block(ours.tested(shipped or unheard))


def conversions(found: list[Record]) -> str:
    """For each mixer and length of training one conversion beside its control, on test-clean; each length together."""
    trained = [r for r in results(found) if r.tested and r.tested_control and r.training != "none" and not r.minutes]
    if not trained:
        return block(ours.converted(found))

    def wer(result: Result) -> float:
        return result.tested.value if result.tested else math.inf

    chosen: dict[tuple[str, int, float, str], Result] = {}
    for r in sorted(trained, key=lambda r: (len(r.tested.ids) if r.tested else 0, -wer(r))):
        chosen[r.model, r.layers, r.budget(), r.mixer] = r
    rows: list[list[Cell]] = []
    for r in sorted(chosen.values(), key=lambda r: (r.model, r.layers, r.budget(), wer(r))):
        rows.append([r.model, r.name, f"{r.layers} of {r.of}", r.training])
        rows[-1] += [r.tested, r.tested_control, gap(r.tested, r.tested_control)]
    columns = ("model", "what took attention's place", "layers", "training", "test-clean, WER %", "control", "points")
    grid = Grid(columns, rows)
    said = (
        "Only what trained for as long compares; it stands together, the shortest training first. Of each mixer the "
        "setting with the most seeds, then the least WER. All settings, what has no control (the paper's recipe), what "
        "trained by the clock or not at all, and held-out speakers of dev-clean are on the page of `lpa report`."
    )
    return f"{table(grid)}\n{runs(grid)} {said}\n"


def untrained(found: list[Record]) -> str:
    """Conversions that nothing was trained for, on test-clean, the best first."""
    free = [(r.tested.value, r) for r in results(found) if r.tested and r.training == "none" and r.mixer in STAND_IN]
    rows: list[list[Cell]] = [
        [
            r.model,
            r.name.replace(", not trained", ""),
            f"{r.layers} of {r.of}",
            r.tested,
            gap(r.tested, r.tested_control),
        ]
        for _, r in sorted(free, key=lambda pair: (pair[1].model, pair[0]))
    ]
    grid = Grid(("model", "what took attention's place", "layers", "test-clean, WER %", "points"), rows)
    return f"{table(grid)}\n{runs(grid)}\n" if rows else block(ours.converted(found))


BLOCKS: dict[str, Callable[[list[Record]], str]] = {
    "layers": layers,
    "conversions": conversions,
    "untrained": untrained,
    "models": models,
    "peers": lambda found: block(speed.peers(found)),
    "enhancement": lambda found: block(cleaning.enhancement(found)),
    "speed": lambda found: block(speed.twins(found)),
    "start-to-text": lambda found: block(speed.start_to_text(found)),
}
