"""The paper's Table 1: what each technique is worth, one more a row, with ours beside it."""

from __future__ import annotations

from itertools import pairwise

from . import paper
from .conversions import ablation_row, layers_of, results, sweeps, tested_curves, training_key
from .items import DIFFERENT, REPRODUCED, Cell, Chart, Figure, Grid, Item, Line, Verdict, gap, missing, signed
from .measured import Record, as_it_is, figure, grouped, is_evaluation, of_paper_model, split_of
from .quality import BY_DEPTH, DATA, beside_paper, longest

COMMAND = f"lpa ablate models/wav2vec2-12 {DATA} --out runs/ablate --record"
LENGTHS = ("warm_epochs", "settle_epochs", "final_epochs")  # of alignment no: the ablation switches it off
Rows = dict[int, Figure]  # WER by row


def table_1(found: list[Record]) -> Item:
    tested, held, control = ablation(found)
    rows: list[list[Cell]] = []
    for number, (name, wer) in enumerate(paper.ABLATION):
        before = paper.ABLATION[number - 1][1] if number else None
        rows.append([name, wer, None if before is None else signed(wer - before)])
        for ours in (tested, held):
            mine, previous = ours.get(number), ours.get(number - 1)
            rows[-1] += [mine, gap(mine, previous)]
    if any(control):
        rows.append(["the last row's training with attention left in", None, None, control[0], None, control[1], None])
    columns = ("configuration", "paper, WER %", "points", "ours, test-clean", "points", "ours, held-out", "points")
    lines = [
        Line("paper", [(i, wer) for i, (_, wer) in enumerate(paper.ABLATION)]),
        Line("ours, test-clean", list(tested.items()), ours=True),
        Line("ours, held-out", list(held.items()), ours=True),
    ]
    labels = [name for name, _ in paper.ABLATION]
    chart = Chart("chart-ablation", "Each technique added", "", "WER %", lines, bars=labels)
    notes = [
        "The paper's on dev-clean, its first five rows measured with an evaluation that read padding, and corrected by "
        "9.3 points. Ours is one run a row, with the same speech in every one. Held-out: speakers of dev-clean that "
        "were not trained on."
    ]
    judged = tested if len(tested) == len(paper.ABLATION) else held
    verdict = judge_ablation(judged, why_ablation(found, judged))
    grid = Grid(columns, rows, ours=frozenset({3, 4, 5, 6}))
    return Item("table-1", "Table 1", "What each technique is worth, at 8 of 12 layers", verdict, grid, [chart], notes)


def ablation(found: list[Record]) -> tuple[Rows, Rows, tuple[Figure | None, Figure | None]]:
    """WER by row of the cumulative ablation, on test-clean and held out, and both of the last row's control.

    Of finished conversions trained alike: those that make the most rows.
    """
    finals = [r for r in found if r["kind"] == "convert" and r["what"] == "final" and r.get("config")]
    rows = [r for r in finals if of_paper_model(r) and ablation_row(r["config"]) is not None]
    alike = grouped(rows, row_training)
    fullest = max(alike.values(), key=lambda some: len({ablation_row(r["config"]) for r in some}), default=[])
    if len({ablation_row(r["config"]) for r in fullest}) <= 2:
        return {}, {}, (None, None)
    heard = [r for r in found if is_evaluation(r) and as_it_is(r) and r.get("config") and "/step-" not in r["model"]]
    heard = [r for r in heard if split_of(r) == "test-clean" and ablation_row(r["config"]) is not None]
    heard = [r for r in heard if row_training(r) == row_training(fullest[0])]
    made = []
    for some in (heard, fullest):
        by_row = sorted(grouped(some, lambda r: ablation_row(r["config"])).items())
        made.append({number: f for number, rows in by_row if (f := figure(rows, "wer")) is not None})
    last = {training_key(r) for r in fullest if ablation_row(r["config"]) == len(paper.ABLATION) - 1}
    control = next(((r.tested_control, r.held_control) for r in results(found) if r.key in last), (None, None))
    return made[0], made[1], control


def row_training(record: Record) -> tuple[float, ...]:
    """What rows of one table share."""
    return (layers_of(record), *(record["config"][n] for n in LENGTHS), record["config"]["batch_seconds"])


def why_ablation(found: list[Record], ours: Rows) -> str:
    """What of the records explains the gain of the order: the layer that costs the most when it comes in its turn."""
    found = list(filter(of_paper_model, found))
    reasons = beside_paper(found)
    by_depth = longest(tested_curves(found), BY_DEPTH)
    costs = {b - 1: by_depth[b].value - by_depth[a].value for a, b in pairwise(sorted(by_depth)) if b == a + 1}
    swept = next((layers for name, layers in sweeps(found).items() if name.endswith(", lpa")), {})
    if costs and len(ours) == len(paper.ABLATION):
        worst = max(costs, key=lambda layer: costs[layer])
        order = sorted(swept, key=lambda layer: swept[layer]["mse"])
        if worst in order[len(by_depth) :]:
            gain = ours[6].value - ours[7].value
            said = (
                f"with the first layers first, layer {worst} alone costs {costs[worst]:.0f} points; the sweep puts it "
            )
            said += f"behind these {len(by_depth)}, so that its order is worth {gain:.0f} points (paper: 0.4)"
            reasons.insert(0, said)
    return "; ".join(reasons)


def judge_ablation(ours: Rows, because: str = "") -> Verdict:
    if len(ours) < len(paper.ABLATION):
        return missing([COMMAND])
    drops = {b: ours[a].value - ours[b].value for a, b in pairwise(sorted(ours))}
    largest = max(drops, key=lambda n: drops[n])
    worse = [f"{paper.ABLATION[n][0].removeprefix('+ ')} ({signed(-drop, 1)})" for n, drop in drops.items() if drop < 0]
    if largest == 1 and not worse:
        return Verdict(REPRODUCED, "every technique lowers WER, and starting from the attention's weights by the most")
    said = f"the most is gained by “{paper.ABLATION[largest][0].removeprefix('+ ')}”, {drops[largest]:.1f} points"
    said += f", and something lost by {' and by '.join(worse)}" if worse else ""
    return Verdict(DIFFERENT, said, because)
