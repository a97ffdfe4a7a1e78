"""The cheapest mixer for each layer whose losses, added up, fit a budget; or the least loss at a price."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import records
from ..errors import LpaError, choose
from .config import RECIPES, SweepConfig, record_once, write_json

MEASURES = {"wer": "wer_points", "kl": "kl", "relative": "relative"}  # what a layer's loss is -> its name in a sweep
FRONT = 50_000  # states kept; beyond it only the cheapest of equally heavy ones: feasible still, and hardly dearer
ATTENTION_SECONDS = 10  # attention's cost a second grows with the recording; it is priced at this length


@dataclass(frozen=True)
class Option:
    """One thing that could sit in a layer."""

    mixer: str  # "attention": left as it is
    cost: float  # MFLOP a second of audio
    loss: float  # never below 0: a layer that happens to gain does not pay for another
    config: dict[str, Any] | None = None
    points: float | None = None  # of WER, whatever the loss is measured in; as little below 0


def cheapest(prices: Sequence[Sequence[tuple[float, float]]], limit: float) -> list[int] | None:
    """One (price, weight) a row, so that weights add up to at most `limit` and prices to the least; None: none fits.

    Exact: row by row, of all sums so far only those that no other beats in both price and weight are kept.
    """
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]  # weight, price, choice
    for row in prices:
        sums = [
            (weight + w, price + p, (*choice, i)) for weight, price, choice in front for i, (p, w) in enumerate(row)
        ]
        front = undominated([s for s in sums if s[0] <= limit * (1 + 1e-12)], limit)
        if not front:
            return None
    return list(min(front, key=lambda state: (state[1], state[0]))[2])


def undominated(states: list[tuple[float, float, tuple[int, ...]]], limit: float) -> list:
    """States by weight, each cheaper than all lighter ones."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for state in sorted(states):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    if len(kept) <= FRONT:
        return kept
    bins = {int(weight / limit * FRONT): (weight, price, choice) for weight, price, choice in kept}
    return list(bins.values())  # of a bin the last, which is its heaviest and cheapest


def plan(options: Sequence[Sequence[Option]], *, loss: float | None = None, cost: float | None = None) -> list[Option]:
    """One option a layer: the cheapest within a total loss, or the least loss within a total cost."""
    if (loss is None) == (cost is None):
        raise LpaError("a plan has one budget: WER points, or MFLOP a second")
    if loss is not None:
        chosen = cheapest([[(o.cost, o.loss) for o in row] for row in options], loss)
    else:
        assert cost is not None
        chosen = cheapest([[(o.loss, o.cost) for o in row] for row in options], cost)
    if chosen is None:
        least = sum(min(o.cost if loss is None else o.loss for o in row) for row in options)
        raise LpaError(
            f"no choice of mixers fits a budget of {loss if cost is None else cost:g}; the least is {least:g}"
        )
    return [row[i] for row, i in zip(options, chosen, strict=True)]


def make_plan(
    config: SweepConfig,
    mixers: Sequence[str],
    out: Path,
    *,
    measure: str = "wer",
    loss: float | None = None,
    cost: float | None = None,
    record: Path | None = None,
) -> dict[str, Any] | None:
    """Sweep every mixer as it would be used (into OUT/NAME), choose, write OUT/choice.json; None where time was up.

    Settings of a mixer that are not given are those of the recipe `best`. `record`: folder of records.
    """
    from .session import started
    from .sweep import epochs_of, sweep

    key, out, began = choose(measure, MEASURES, "measure"), Path(out), time.monotonic()
    settings = {name: {**RECIPES["best"]["mixer_config"].get(name, {}), **config.settings(name)} for name in mixers}
    alone = replace(config, provision=0, l1=0.0, l2=0.0)
    sweeps = [replace(alone, mixer=name, mixer_config=given) for name, given in settings.items()]
    trains = any([epochs_of(one) > 0 for one in sweeps])  # of all: what is wrong with any is told before the first
    swept = []
    with started(replace(config, mixer="", mixer_config={}), out, trains) as session:  # all hold the same speakers out
        if trains and config.sources and not session.config.held_out:
            raise LpaError(
                f"{out} holds a plan of mixers that nothing was trained for, so it holds nobody out, and one of "
                f"{', '.join(settings)} trains; choose another --out"
            )
        for one in sweeps:
            left = config.max_minutes and max(1e-9, config.max_minutes - (time.monotonic() - began) / 60)
            one = replace(one, held_out=session.config.held_out, max_minutes=left)
            found = sweep(one, out / one.mixer, record)
            if found is None:
                return None
            swept.append(found["layers"])
        layers = [row["layer"] for row in swept[0]]
        options = [
            [attention, *(option(row, key) for row in rows)]
            for attention, rows in zip(attentions(config.model, layers), zip(*swept, strict=True), strict=True)
        ]
        chosen = plan(options, loss=loss, cost=cost)
        found = describe(chosen, measure, {"loss": loss, "mflop_per_second": cost}, layers)
        if session.main:
            write_json(out / "choice.json", found)
        if session.main and record is not None:
            held_out, names = session.config.held_out, ",".join(settings)
            asked = replace(alone, mixer=names, mixer_config=settings, held_out=held_out)
            record_once(out, f"{found['budget']} {measure}", partial(write_record, asked, found, record))
    return found


def write_record(config: SweepConfig, found: dict[str, Any], folder: Path) -> None:
    """What a plan is predicted to do; what it then did, `convert --plan` records."""
    records.write(
        "plan",
        what=f"prediction by {found['measure']}",
        figures={**found["predicted"], "layers": len(found["swaps"])},
        folder=folder,
        **config.facts(),
        budget=found["budget"],
        choice=[row["mixer"] for row in found["layers"]],
    )


def option(row: dict[str, Any], key: str) -> Option:
    if row.get(key) is None:
        raise LpaError(f"the sweep of {row['mixer']} has no {key}, for it has no posteriors; use --measure relative")
    points = row.get("wer_points")
    least = None if points is None else max(0.0, points)
    return Option(row["mixer"], row["mflop_per_second"], max(0.0, row[key]), row["config"], least)


def attentions(model: str, layers: Sequence[int]) -> list[Option]:
    """What each of these layers costs as it is."""
    from ..families import load

    network = load(model)
    return [Option("attention", price(network, index), 0.0, points=0.0) for index in layers]


def price(model: Any, index: int) -> float:
    """MFLOP that a layer's mixer, or attention, takes for a second of audio in recordings of ATTENTION_SECONDS."""
    from ..inspect import describe_layer

    (site,) = (site for site in model.sites() if site.index == index)
    return describe_layer(model, site)["mflop_per_second"][str(ATTENTION_SECONDS)]


def describe(
    chosen: Sequence[Option], measure: str, budget: dict[str, Any], layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """choice.json: the swaps, easiest first, as `convert --plan` takes them, and what they are predicted to do.

    `layers`: the indices of those chosen for; None: all from the first.
    """
    placed = list(zip(range(len(chosen)) if layers is None else layers, chosen, strict=True))
    replaced = [(o.loss, i, o) for i, o in placed if o.mixer != "attention"]
    swaps = [{"index": i, "mixer": o.mixer, "config": o.config} for _, i, o in sorted(replaced, key=lambda r: r[:2])]
    predicted = {MEASURES[measure]: sum(o.loss for o in chosen), "mflop_per_second": sum(o.cost for o in chosen)}
    points = [o.points for o in chosen if o.points is not None]
    if len(points) == len(chosen):
        predicted["wer_points"] = sum(points)
    rows = [{"layer": i, "mixer": o.mixer, "loss": o.loss, "mflop_per_second": o.cost} for i, o in placed]
    return {"budget": budget, "measure": measure, "predicted": predicted, "swaps": swaps, "layers": rows}


def render(found: dict[str, Any]):
    """The choice as a table for a terminal."""
    from rich.table import Table

    totals = ", ".join(f"{name} {value:.4g}" for name, value in found["predicted"].items())
    table = Table(title=f"predicted: {totals}")
    for name in ("layer", "mixer", found["measure"], "MFLOP/s of audio"):
        table.add_column(name, justify="right")
    for row in found["layers"]:
        table.add_row(str(row["layer"]), row["mixer"], f"{row['loss']:.4g}", f"{row['mflop_per_second']:.0f}")
    return table
