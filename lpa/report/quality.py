"""The paper's tables and figures on what is heard (4, 6, 7, 8; Figure 2) with ours beside them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from . import cleaning, paper
from .conversions import ORDERS, curve_name, curves, hours_a_layer, results, steps_a_layer, tested_curves
from .items import DIFFERENT, REPRODUCED, Cell, Chart, Figure, Grid, Item, Line, Verdict, gap, missing
from .measured import Record, as_it_is, figure, grouped, is_evaluation, of_paper_model, split_of

DATA = "--data LibriSpeech/dev-clean --held-out 1272,2035,5338,6241"
CONVERT = f"lpa convert models/wav2vec2-12 {DATA} --out runs/paper --recipe paper --record"
SUMMARY = f"{CONVERT.replace('runs/paper', 'runs/summary')} --mixer summary"
SWEEP = f"lpa sweep models/wav2vec2-12 {DATA} --out runs/sweep --record"
EVALUATE = "lpa evaluate --model runs/paper/step-08/model --data LibriSpeech/test-clean --record"
WALL = 9  # layers after which the paper's models collapse
# how curves by the paper's recipe begin
SWEPT, BY_DEPTH = (f"lpa, paper's recipe, {ORDERS[order]}" for order in ("sweep", "depth"))
AT_RANDOM, NAIVE = "lpa, paper's recipe, layers at random", "lpa, replaced naively"
SUMMARY_SWEPT = SWEPT.replace("lpa", "summary", 1)

Points = dict[int, Figure]  # WER by replaced layers


def table_4(found: list[Record]) -> Item:
    mine, clean = list(filter(of_paper_model, found)), cleaning.within_chunks(cleaning.enhanced(found))
    lpa, summary = trained_alike(curves(mine), SWEPT, SUMMARY_SWEPT)
    parts = [lpa, summary, clean.get("lpa", {}), clean.get("summary", {})]
    rows: list[list[Cell]] = []
    for n in sorted({*paper.SUMMARY, *(n for part in parts for n in part)}):
        theirs = paper.SUMMARY.get(n, (None,) * 4)
        rows.append([n, *(cell for pair in zip(theirs, (p.get(n) for p in parts), strict=True) for cell in pair)])
    names = ("LPA, WER %", "SummaryMixing, WER %", "LPA, dB", "SummaryMixing, dB")
    columns = ("layers", *(f"{who} {name}" for name in names for who in ("paper", "ours")))
    ends: dict[str, Points] = {}
    for r in results(mine):
        if r.tested is not None:
            ends.setdefault(f"{r.name}, {r.training}", {})[r.layers] = r.tested
    tested = trained_alike(ends, SWEPT, SUMMARY_SWEPT)
    for n in sorted(set(tested[0]) & set(tested[1])):
        rows.append([f"{n}, at the end, test-clean", None, tested[0][n], None, tested[1][n], *(None,) * 4])
    notes = [
        "The paper's WER on dev-clean; ours on the speakers of dev-clean that were not trained on, after each step, "
        "and for what was trained to its end on test-clean."
    ]
    verdict, also = judge_summary(lpa, summary, tested), cleaning.judge_summary(parts[2], parts[3])
    grid = Grid(columns, rows, ours=frozenset(range(2, 9, 2)))
    return Item("table-4", "Table 4", "LPA against SummaryMixing", verdict, grid, notes=notes, also=also)


def judge_summary(lpa: Points, summary: Points, tested: tuple[Points, Points]) -> Verdict:
    """What is heard: the paper has LPA ahead at every depth. `tested`: of both, what was trained to its end."""
    leads = {n: summary[n].value - lpa[n].value for n in sorted(set(lpa) & set(summary) - {0})}
    if not leads:
        return missing([CONVERT, SUMMARY])
    half, ahead = "speech recognition", [lead for lead in leads.values() if lead > 0]
    said = f"LPA is ahead after {len(ahead)} of {len(leads)} steps"
    said += f", by {min(ahead):.1f} to {max(ahead):.1f} points" if ahead else ""
    said += " (paper: after every one, by 1.2 to 19.1)"
    kept = True  # the lead, where both were trained to the end
    if ends := sorted(set(tested[0]) & set(tested[1])):
        one, other = tested[0][ends[-1]], tested[1][ends[-1]]
        level = within(one, other.value) and within(other, one.value)
        kept = one.value < other.value and not level
        said += f"; trained to the end {one.value:.2f} % WER and SummaryMixing {other.value:.2f} on test-clean"
        said += ", each in the other's interval" if level else ""
    if len(ahead) == len(leads) and kept:
        return Verdict(REPRODUCED, said, of=half)
    why = "both train alike here, where the paper's SummaryMixing heard a fourteenth of the speech"
    return Verdict(DIFFERENT, said, why, half)


def within(interval: Figure, value: float) -> bool:
    return interval.low is not None and interval.high is not None and interval.low <= value <= interval.high


def trained_alike(lines: dict[str, Points], one: str, other: str) -> tuple[Points, Points]:
    """Curves of two names that go on alike, as they do where the training is the same: the pair with the most points.

    Where there is none, the longest of the first name alone.
    """
    pairs = [
        (line, lines[other + name.removeprefix(one)])
        for name, line in lines.items()
        if name.startswith(one) and other + name.removeprefix(one) in lines
    ]
    return max(pairs, key=lambda pair: len(set(pair[0]) & set(pair[1])), default=(longest(lines, one), {}))


def longest(lines: dict[str, Points], name: str) -> Points:
    """Of the curves whose name starts so, the one with the most points."""
    return max((line for other, line in lines.items() if other.startswith(name)), key=len, default={})


def best_known(lines: dict[str, Points]) -> str:
    """The name of the curve of distilled pyramids that has the most points; empty: there is none."""
    names = [name for name in lines if name.startswith("pyramid of ") and name.endswith(" windows, distilled")]
    return max(names, key=lambda name: len(lines[name]), default="")


def by_recipe(found: list[Record]) -> tuple[dict[str, Points], dict[str, float]]:
    """Our curves by the paper's recipe in its order, and the hours of speech that each of their layers trained on."""
    found = list(filter(of_paper_model, found))
    lines = {n: line for n, line in curves(found).items() if n.startswith(SWEPT) and "hardened" not in n and 0 in line}
    return lines, hours_a_layer(found)


def beside_paper(found: list[Record]) -> list[str]:
    """In what our conversions by the paper's recipe differ from the paper's, by the records, and what that changes."""
    lines, hours = by_recipe(found)
    timed = sorted((n for n in lines if n in hours), key=lambda n: hours[n])
    if not timed:
        return []
    least, most = timed[0], timed[-1]
    said = f"a layer trains on {hours[least]:.0f}"
    said += f" to {hours[most]:.0f} h of speech" if most != least else " h of speech"
    said += ", in the paper eight times on 100 to 360 h"
    at = max((n for n in set(lines[least]) & set(lines[most]) if 0 < n < WALL), default=0)
    if most != least and at:
        change = gap(lines[most][at], lines[least][at], 1)
        said += f" (from the least to the most, held-out WER at {at} of 12 layers changes by {change} points)"
    start = f"our model starts at {lines[least][0].value:.0f} % on held-out speakers, where the paper's starts at "
    return [f"{start}{paper.PROGRESSIVE[0][-1]:.0f}", said]


def table_6(found: list[Record]) -> Item:
    swept = [r for r in found if r["kind"] == "sweep" and "layer" in r["figures"] and of_paper_model(r)]
    lpa = grouped((r for r in swept if mixer_of(r) == "lpa"), lambda r: r["figures"]["layer"])
    mse = {layer: figure(some, "mse", 3) for layer, some in lpa.items()}
    left = {layer: figure(some, "surviving", 0) for layer, some in lpa.items()}
    points = {layer: figure(some, "wer_points") for layer, some in lpa.items()}
    rows: list[list[Cell]] = [
        [layer, f"{error:.3f}", mse.get(layer), alive, left.get(layer), hard, points.get(layer)]
        for layer, error, alive, hard in paper.SWEEP
    ]
    columns = (
        *("layer", "paper, MSE", "ours, MSE", "paper, of 144 pulses survive", "ours, survive", "paper, difficulty"),
        "ours, points of WER if replaced alone",
    )
    lines = [
        Line("paper", [(layer, error) for layer, error, *_ in sorted(paper.SWEEP)]),
        Line("ours", sorted(mse.items()), ours=True),
    ]
    chart = Chart("chart-sweep", "How hard a layer is to replace", "layer", "MSE, log", lines, log_y=True)
    notes = [
        "Layers count from 0. An MSE depends on how large a model's activations are, so only its course over the "
        "layers compares.",
        "More pulses survive here because their penalty is averaged over them. Summed, as the formula has it, it left "
        "48 to 51 of 144 in the layers of Whisper's encoder, where 48 is the floor, and 5 of 6 layers the worse for it "
        "(`LOG.md`).",
    ]
    verdict = judge_sweep(*({n: f.value for n, f in some.items() if f is not None} for some in (mse, points)))
    grid = Grid(columns, rows, digits=0, ours=frozenset({2, 4, 6}))
    return Item("table-6", "Table 6", "The sweep: how hard each layer is", verdict, grid, [chart], notes)


def mixer_of(record: Record) -> str | None:
    return (record.get("config") or {}).get("mixer") or record.get("mixer")


def judge_sweep(mse: dict[int, float], alone: dict[int, float] | None = None) -> Verdict:
    """Whether the last layers are the hardest; `alone`: points of WER that each costs by itself."""
    if len(mse) < 3:
        return missing([SWEEP])
    order = sorted(mse)
    third = max(1, len(order) // 3)
    early, late = (sum(mse[n] for n in part) / third for part in (order[:third], order[-third:]))
    hardest = max(mse, key=lambda n: mse[n])
    said = f"the last third of the layers has {late / early:.1f} times the first's MSE; the hardest is layer {hardest}"
    if late > 2 * early and hardest == order[-1]:
        return Verdict(REPRODUCED, said)
    why = "the difficulty does not rise with depth in this model"
    if alone:
        costly = sorted(alone, key=lambda n: -alone[n])[:3]
        why = "words hang on other layers in this model: replaced alone, "
        why += ", ".join(f"layer {n} costs {alone[n]:.1f} points" for n in costly)
        why += f", and the last layer, {order[-1]}, {alone[order[-1]]:.1f}"
    return Verdict(DIFFERENT, said, why)


def table_7(found: list[Record]) -> Item:
    """The paper's columns, each with ours of the same order beside it; then what it has no column for."""
    here = list(filter(of_paper_model, found))
    splits = (("test-clean", tested_curves(here)), ("held-out", curves(here)))
    hours = hours_a_layer(here)
    columns: list[str] = []
    cells: list[dict[int, Cell]] = []  # of each column, by layers
    ours: set[int] = set()

    def theirs(name: str) -> None:
        place = paper.PROGRESSIVE_COLUMNS.index(name)
        columns.append(f"paper, {name}")
        cells.append({n: row[place] for n, row in paper.PROGRESSIVE.items()})

    def mine(start: str, label: str) -> None:
        """All that was trained so, the least training first: on test-clean, then on held-out speakers."""
        by_split = [(split, n, line) for split, lines in splits for n, line in lines.items() if len(line) > 2]
        long = [(split, n, line) for split, n, line in by_split if n.startswith(start) and "hardened" not in n]
        several = len({n for _, n, _ in long}) > 1
        for split, name, line in sorted(long, key=lambda found: hours.get(found[1], 0)):
            columns.append(", ".join([f"ours, {label}", split, *[name.rpartition(", ")[2]] * several]))
            cells.append(dict(line))
            ours.add(len(columns))

    theirs("+ order")
    mine(SWEPT, ORDERS["sweep"])
    theirs("+ architecture")
    mine(BY_DEPTH, ORDERS["depth"])
    theirs("+ recipe")
    theirs("naive")
    mine(NAIVE, "naive")
    mine(AT_RANDOM, "layers at random")
    rows = [[n, *(column.get(n) for column in cells)] for n in sorted({n for column in cells for n in column})]
    notes = [
        "The paper's on dev-clean up to 10 s; ours on test-clean, and on speakers of dev-clean that were not trained "
        "on. The verdict is on the longest training."
    ]
    verdict = judge_wall(most_trained(found), "; ".join(beside_paper(found)))
    grid = Grid(("layers", *columns), rows, ours=frozenset(ours))
    return Item("table-7", "Table 7", "WER as attention goes, layer by layer", verdict, grid, notes=notes)


def most_trained(found: list[Record]) -> Points:
    """Of our curves by the paper's recipe that pass the wall, the one whose layers trained the longest."""
    lines, hours = by_recipe(found)
    longest_first = sorted(lines, key=lambda n: (passes_wall(lines[n]), hours.get(n, 0)), reverse=True)
    return lines[longest_first[0]] if longest_first else {}


def passes_wall(line: Points) -> bool:
    """Whether a curve has the layers on both sides of the wall, and where it began."""
    return {0, WALL - 1, WALL, WALL + 1} <= set(line)


def judge_wall(line: Points, because: str = "") -> Verdict:
    if not passes_wall(line):
        return missing([CONVERT])
    gentle, steep = line[WALL - 1].value - line[0].value, line[WALL + 1].value - line[WALL].value
    if steep > 5 and steep > gentle / (WALL - 1) * 4:
        return Verdict(REPRODUCED, f"the tenth layer alone costs {steep:.1f} points: the wall is there")
    said = f"the tenth layer costs {steep:.1f} points, the first eight {gentle:.1f} (paper: 13.8 and 6.0)"
    last = max(line)
    total = line[last].value - line[0].value
    if total < gentle + steep + 5:
        return Verdict(DIFFERENT, f"{said}: no wall", because)
    costs = {b: line[b].value - line[a].value for a, b in pairwise(sorted(line)) if b == a + 1}
    worst = max(costs, key=lambda n: costs[n])
    climb = f"number {worst} alone {costs[worst]:.1f}, all {last} together {total:.1f}"
    return Verdict(DIFFERENT, f"{said}, {climb}: a slope that begins earlier", because)


def figure_2(found: list[Record]) -> Item:
    """Ours by the paper's recipe and by distillation, the paper's four curves, and ours on test-clean."""
    here = list(filter(of_paper_model, found))
    held, tested = curves(here), tested_curves(here)
    distilled = best_known(held)
    heard = {
        "paper's recipe, easiest layers first": most_trained(found),
        "paper's recipe, first layers first": longest(held, BY_DEPTH),
        "naive": longest(held, NAIVE),
        distilled: held.get(distilled, {}),
    }
    unheard = {
        "easiest layers first": longest(tested, SWEPT),
        "first layers first": longest(tested, BY_DEPTH),
        "layers at random": longest(tested, AT_RANDOM),
    }
    theirs = [
        Line(f"paper, {name}", [(n, row[i]) for n, row in paper.PROGRESSIVE.items() if row[i] is not None])
        for i, name in enumerate(paper.PROGRESSIVE_COLUMNS)
    ]

    def chart(id: str, title: str, lines: list[Line]) -> Chart:
        return Chart(id, title, "layers replaced, of 12", "WER %", lines)

    def ours(lines: dict[str, Points]) -> list[Line]:
        return [Line(f"ours, {name}", list(line.items()), ours=True) for name, line in lines.items() if len(line) > 2]

    charts = [
        chart("chart-layers", "Ours, held-out speakers", ours(heard)),
        chart("chart-layers-paper", "The paper's, dev-clean", theirs),
    ]
    if lines := ours(unheard):
        charts.append(chart("chart-layers-tested", "Ours by the paper's recipe, test-clean", lines))
    return Item("figure-2", "Figure 2", "WER against layers replaced", table_7(found).verdict, charts=charts)


def table_8(found: list[Record]) -> Item:
    here = list(filter(of_paper_model, found))
    tested = paper_run([r for r in here if is_evaluation(r) and as_it_is(r) and by_paper(r)])
    cells = grouped(tested, lambda r: (r["network"]["replaced"], split_of(r)))
    made = {key: f for key, some in cells.items() if (f := figure(some, "wer")) is not None}
    steps = steps_a_layer(here)
    name = next((curve_name(r, steps) for r in tested if r.get("config")), None)
    held = curves(here).get(name or "", {})
    made = {(n, "dev-clean"): f for n, f in held.items()} | made
    rows: list[list[Cell]] = []
    for n in sorted({*paper.BY_SPLIT, *(n for n, _ in made)}):
        dev, clean, other = paper.BY_SPLIT.get(n, (None,) * 3)
        rows.append([n, dev, made.get((n, "dev-clean")), clean, made.get((n, "test-clean")), other])
    columns = (
        *("layers", "paper, dev-clean", "ours, dev-clean"),
        *("paper, test-clean", "ours, test-clean", "paper, test-other"),
    )
    notes = [
        "Ours on test-other is not possible here, because it was not at hand. Our test-clean is half of it: 1,300 "
        "utterances of 20 of its 40 speakers."
    ]
    grid = Grid(columns, rows, ours=frozenset({2, 4}))
    return Item("table-8", "Table 8", "WER on other splits", judge_splits(made), grid, notes=notes)


def judge_splits(made: dict[tuple[int, str], Figure]) -> Verdict:
    """Whether test-clean tells what dev-clean does. `made`: by layers and split."""
    layers = sorted(n for n, split in made if split == "dev-clean" and (n, "test-clean") in made)
    if not layers:
        return missing([EVALUATE])
    apart = {n: made[n, "test-clean"].value - made[n, "dev-clean"].value for n in layers}
    most = max(map(abs, apart.values()))
    if most < 2:
        return Verdict(REPRODUCED, f"test-clean follows dev-clean within {most:.1f} points")
    why = "ours of dev-clean are the four speakers that were held out of its training"
    if 0 in apart:
        harder = "harder" if apart[0] < 0 else "easier"
        why += f", who are {abs(apart[0]):.1f} points {harder} than test-clean before any layer is replaced"
    return Verdict(DIFFERENT, f"test-clean is up to {most:.1f} points from dev-clean, in the paper 1.2", why)


def by_paper(record: Record) -> bool:
    """Whether a model is an unconverted one, or one that the paper's recipe replaced layers of by its own mixer."""
    network: dict[str, Any] = record.get("network") or {}
    config: dict[str, Any] = record.get("config") or {}
    if not network.get("layers") or config.get("keep_attention") or config.get("kl_weight"):
        return False
    return not network["replaced"] or network["mixers"] == ["lpa"]


def paper_run(tested: list[Record]) -> list[Record]:
    """The models of the run that was tested at the most depths, and the model it began with."""
    start = [r for r in tested if not r["network"]["replaced"]]
    runs = grouped((r for r in tested if r["network"]["replaced"]), run_of)
    return start + max(runs.values(), key=lambda rows: len({r["network"]["replaced"] for r in rows}), default=[])


def run_of(record: Record) -> str:
    """The folder of the conversion a model comes from: RUN/model, or RUN/step-03/model."""
    folder = Path(record["model"]).parent
    return str(folder.parent if folder.name.startswith("step-") else folder)
