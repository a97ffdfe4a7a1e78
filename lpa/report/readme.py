"""The README's tables, between markers, made from records: what is written there by hand is everything else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ..errors import LpaError, choose
from . import ours, speed
from .items import MISSING, ONE_RUN, Cell, Figure, Item
from .measured import Record, figure, grouped, split_of

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
    """An item's grid in Markdown, and below it how often that was measured."""
    if item.verdict.mark == MISSING or item.grid is None:
        return f"Not measured yet: {item.verdict.what}.\n"
    return table(item.grid.columns, item.grid.rows, item.grid.digits) + f"\n{runs(item.grid.figures())}\n"


def runs(figures: list[Figure]) -> str:
    """How the figures' spread is to be read, where they do not say it themselves."""
    alone = sum(f.low is None for f in figures)
    return (
        "One run each." if alone == len(figures) else "In brackets what the spread is; figures without are of one run."
    )


def table(columns: tuple[str, ...], rows: list[list[Cell]], digits: int = 2) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(said(cell, digits) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def said(cell: Cell, digits: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Figure):
        return cell.number() if cell.low is None else f"{cell.number()} ({cell.around()})"
    return f"{cell:,.{digits}f}" if isinstance(cell, float) else str(cell)


def layers(found: list[Record]) -> str:
    """Times as fast as attention, a column a mixer: of the CPU records in float32."""
    rows_of = [r for r in found if r["kind"] == "bench" and r["what"] == "layer, width 768, float32, cpu"]
    if not rows_of:
        return block(speed.layer_table([]))
    rows: list[list[Cell]] = []
    for frames, some in sorted(grouped(rows_of, lambda r: r["figures"]["frames"]).items()):
        by_mixer = grouped(some, lambda r: r["model"])
        length = frames / speed.FRAMES_A_SECOND
        audio = f"{length / 60:g} min" if length >= 60 else f"{length:g} s"
        gains = [figure(by_mixer.get(name, []), "speedup", 1) for name in MIXERS]
        rows.append([f"{frames:,} ({audio})", *gains])
    columns = ("frames (audio)", *(speed.NAMES.get(name, name) for name in MIXERS))
    last = max(rows_of, key=lambda r: r["date"])
    how = f"{ONE_RUN}, attention and all of these in turn (`results/bench.jsonl`)"
    source = f"`{last['command']}` on {last['machine']}: {how}."
    return f"{table(columns, rows)}\n{source}\n"


def whole_models(found: list[Record]) -> str:
    """Times as fast as attention, a row a model, a column a duration."""
    gains = {name: by for name, by in speed.whole_models(found, "speedup").items() if not name.startswith("attention")}
    if not gains:
        return block(speed.table_3([]))
    seconds = sorted({s for by in gains.values() for s in by})
    rows: list[list[Cell]] = [[name, *(by.get(s) for s in seconds)] for name, by in sorted(gains.items())]
    return f"{table(('all layers replaced', *(f'{s:g} s' for s in seconds)), rows)}\n{ONE_RUN.capitalize()} each.\n"


def models(found: list[Record]) -> str:
    """What was tested on speech nobody trained on: the models that are in the repository, or all where none is."""
    unheard = [r for r in found if (split_of(r) or "").startswith("test")]
    shipped = [r for r in unheard if r["model"] == "default" or r["model"].startswith("models/")]
    return block(ours.tested(shipped or unheard))


def conversions(found: list[Record]) -> str:
    """Those that have a control to stand beside, each with its latest training; or all where none has."""
    return block(ours.converted(found, newest=True))


BLOCKS: dict[str, Callable[[list[Record]], str]] = {
    "layers": layers,
    "conversions": conversions,
    "models": models,
    "peers": lambda found: block(speed.peers(found)),
    "speed": whole_models,
    "start-to-text": lambda found: block(speed.start_to_text(found)),
}
