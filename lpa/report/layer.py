"""One layer: the paper's Figure 1 and its roofline, Table 11, with ours beside it; every mixer by the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from . import paper
from .items import DIFFERENT, OURS, REPRODUCED, Cell, Chart, Figure, Grid, Item, Line, Verdict, missing
from .measured import Record, figure, grouped

WHOLE = "whole layer"
LAYER = "lpa bench layer --rounds 25 --record"
ROOFLINE = "lpa bench roofline --record"
NAMES = {"lpa-hard": "lpa, hard gates", "lpa-plain": "lpa, not folded", "window": "window ±64"}
ORDER = ("attention", "lpa, 12 pulses", "lpa, 36 pulses")  # as the paper has them


def figure_1(found: list[Record]) -> Item:
    """One pulse of each family over four seconds, by its formula."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    gates: dict[str, Callable[[int], float]] = {
        "Aperiodic: where its query finds it": lambda t: sigmoid((t - 70) / 0.5) * sigmoid((118 - t) / 0.5),
        "Periodic: again and again": lambda t: sigmoid((math.cos(math.tau * t / 40) - 0.4) / 0.05),
        "Positional: at a fixed place of the recording": lambda t: sigmoid(
            (math.sin(math.tau * t / 200) + 0.6 * math.cos(3 * math.tau * t / 200)) / 0.1
        ),
    }
    charts = [
        Chart(
            f"chart-gates-{n}",
            *(name, "seconds", "gate"),
            [Line("gate", [(t / 50, gate(t)) for t in range(201)], True)],
            small=True,
        )
        for n, (name, gate) in enumerate(gates.items(), 1)
    ]
    said = "drawn from the formulas; `lpa show FILE --model MODEL` draws them on a recording"
    notes = [
        "Half (a) is attention's n × n map, which takes a model and a recording, and this page is made from records "
        "alone: `lpa show` draws it for every layer that has attention, beside the pulses of those that have none."
    ]
    verdict = Verdict(REPRODUCED, said, of="half (b), the pulses")
    return Item("figure-1", "Figure 1", "Pulses in attention's place", verdict, charts=charts, notes=notes)


def table_11(found: list[Record]) -> Item:
    benched = [r for r in found if r["kind"] == "bench" and r["what"].startswith("roofline") and "us" in r["figures"]]
    latest = max(benched, key=lambda r: r["date"], default=None)
    benched = [r for r in benched if latest and r["machine"] == latest["machine"]]
    cells = grouped(benched, lambda r: (r["model"], r.get("part")))
    ours = {key: f for key, some in cells.items() if (f := figure(some, "us", 0)) is not None}
    clocked = {model: figure(some, "measured_us", 0) for (model, part), some in cells.items() if part == WHOLE}
    whole = {model: f for (model, part), f in ours.items() if part == WHOLE}
    others = sorted({model for model, _ in ours} - set(ORDER))

    def row(part: str, theirs: Sequence[Cell], of: Callable[[str], Cell]) -> list[Cell]:
        pairs = [(their, of(model)) for their, model in zip(theirs, ORDER, strict=True)]
        return [part, *(cell for pair in pairs for cell in pair), *map(of, others)]

    def of_part(part: str) -> Callable[[str], Cell]:
        return lambda model: ours.get((model, part))

    def scaled(found: Figure, by: float, digits: int) -> Figure:
        low, high = (None if end is None else end * by for end in (found.low, found.high))
        return replace(found, value=found.value * by, low=low, high=high, digits=digits)

    rows = [row(part, theirs, of_part(part)) for part, *theirs in paper.ROOFLINE]
    twelve = {model: scaled(f, 12 / 1000, 1) for model, f in whole.items()}
    rows.append(row("× 12 layers, ms", paper.TWELVE_LAYERS_MS, twelve.get))
    if any(clocked.values()):
        rows.append(row("whole layer, by the clock", (None,) * 3, clocked.get))
    pairs = zip(("attention", "LPA, 12 pulses", "LPA, 36 pulses"), ORDER, strict=True)
    names = ("part", *(name for their, own in pairs for name in (f"paper, {their}", f"ours, {own}")))
    names += tuple(f"ours, {model}" for model in others)

    *parts, (_, *wholes) = paper.ROOFLINE
    labels = [part for part, *_ in parts]
    lines = [
        Line(f"paper, {model}", [(i, 100 * times[n] / wholes[n]) for i, (_, *times) in enumerate(parts)])
        for n, model in enumerate(ORDER)
    ]
    for model in ORDER:
        timed = [(i, ours[model, label]) for i, label in enumerate(labels) if (model, label) in ours and model in whole]
        lines.append(Line(f"ours, {model}", [(i, scaled(f, 100 / whole[model].value, 0)) for i, f in timed], True))
    title = "Roofline: where a layer's time goes"
    chart = Chart("chart-roofline", title, "", "% of the layer's time", lines, bars=labels)
    notes = [
        "A roofline is the least time that a machine's bandwidth and arithmetic allow. The paper computes it for an "
        "Apple M4 Pro; ours follow from what our machine was measured to give."
    ]
    grid = Grid(names, rows, digits=1, ours=frozenset({2, 4, 6, *range(7, len(names))}))
    title = "Roofline of one layer at 6,000 frames, µs"
    return Item("table-11", "Table 11", title, judge_roofline(benched), grid, [chart], notes)


def judge_roofline(benched: list[Record]) -> Verdict:
    """What more pulses cost, with the part that grows and why: all from the roofline's own figures."""
    latest = {(r["model"], r.get("part")): r["figures"] for r in sorted(benched, key=lambda r: r["date"])}
    few, many = (
        {part: figures for (model, part), figures in latest.items() if model == f"lpa, {pulses} pulses"}
        for pulses in (12, 36)
    )
    if WHOLE not in few or WHOLE not in many:
        return missing([ROOFLINE])
    more = 100 * (many[WHOLE]["us"] / few[WHOLE]["us"] - 1)
    said = f"three times the pulses make a layer {more:.1f} % dearer (paper: 0.6 %)"
    if more < 5:
        return Verdict(REPRODUCED, said)
    parts = [part for part in few if part in many and part != WHOLE]
    grown = max(parts, key=lambda part: many[part]["us"] - few[part]["us"])
    because = f"“{grown}” goes from {few[grown]['us'] / 1000:.1f} to {many[grown]['us'] / 1000:.1f} ms"
    memory, arithmetic = many[grown].get("gb_per_second"), many[grown].get("gflop_per_second")
    if memory and arithmetic and many[grown]["mflop"] / arithmetic > many[grown]["mb"] / memory:
        apple = paper.ROOFLINE_GFLOP / paper.ROOFLINE_GB
        because += (
            f": this processor has time for {arithmetic / memory:.0f} operations while it reads a byte, the M4 Pro for "
            f"{apple:.0f}, so that its bound is arithmetic, which grows with the pulses, and not memory"
        )
    if (projections := paper.ROOFLINE[0][0]) in parts:
        shares = [100 * figures[projections]["us"] / figures[WHOLE]["us"] for figures in (few, many)]
        (_, *first), (_, *wholes) = paper.ROOFLINE[0], paper.ROOFLINE[-1]
        theirs = [100 * first[n] / wholes[n] for n in (1, 2)]
        because += f"; projections fall from {shares[0]:.0f} to {shares[1]:.0f} % of the layer, "
        because += f"in the paper from {theirs[0]:.1f} to {theirs[1]:.1f}"
    return Verdict(DIFFERENT, said, because)


def layer_table(found: list[Record]) -> Item:
    """One layer of every mixer against attention: the records of the latest `lpa bench layer` of each setting."""
    rows_of = [r for r in found if r["kind"] == "bench" and r["what"].startswith("layer") and "frames" in r["figures"]]
    settings = grouped(rows_of, lambda r: (r["what"], r["machine"]))
    rows: list[list[Cell]] = []
    for (what, machine), some in settings.items():
        for frames, at in sorted(grouped(some, lambda r: r["figures"]["frames"]).items()):
            for mixer, one in grouped(at, lambda r: r["model"]).items():
                time, gain = (figure(one, name) for name in ("median_ms", "speedup"))
                cost = one[-1]["figures"].get("mflop_per_frame")  # counted, not measured
                rows.append(
                    [NAMES.get(mixer, mixer), f"{frames:,}", time, gain, cost, what.partition(", ")[2], machine]
                )
    columns = ("mixer", "frames", "ms", "times as fast", "MFLOP a frame", "setting", "machine")
    verdict = Verdict(OURS, "projections included, all in turn in one run") if rows else missing([LAYER])
    grid = Grid(columns, rows, ours=frozenset({2, 3, 4}))
    return Item("layers", "Ours", "One layer of every mixer against PyTorch's fused attention", verdict, grid)
