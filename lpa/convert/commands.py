"""The verbs sweep, convert, control, ablate, plan and table of the `lpa` command. What they run is imported inside."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import LpaError

RESULTS = Path("results")

Model = Annotated[str, typer.Argument(help="Model folder, Hugging Face folder or hub id.")]
Data = Annotated[
    list[str] | None, typer.Option("--data", help="LibriSpeech folder, JSONL manifest, shards; may be given again.")
]
Out = Annotated[Path, typer.Option(help="Run folder; the same command again goes on where it was.")]
HeldOut = Annotated[
    str, typer.Option(help="Speakers kept out of training, A,B,C, to be measured on; unnamed: a tenth of them.")
]
Mixer = Annotated[str | None, typer.Option(help="What takes attention's place; for `convert` also one a layer: A,B,C.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="key=value, over the recipe's own.")]
Minutes = Annotated[float, typer.Option(min=0, help="Stop after this long; the same command goes on. 0: no limit.")]
Record = Annotated[bool, typer.Option("--record", help="Add the results to the folder of --results.")]
Results = Annotated[Path, typer.Option(help="Where --record writes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def register(app: typer.Typer) -> None:
    for verb in (sweep, convert, control, ablate, plan, table):
        app.command()(verb)


def sweep(
    model: Model,
    out: Out,
    data: Data = None,
    mixer: Mixer = None,
    held_out: HeldOut = "",
    overrides: Set = None,
    max_minutes: Minutes = 0.0,
    record: Record = False,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Measure how well a mixer can stand in for each layer's attention, one layer at a time."""
    from dataclasses import replace

    from .sweep import render
    from .sweep import sweep as run

    config = _sweep_config(model, data, mixer, held_out, overrides, max_minutes)
    config = replace(config, mixer_config=config.settings(config.mixer))
    with _going_on():
        found = run(config, out, results if record else None)
    if found is not None:
        _show(found, render, as_json)


def convert(
    model: Model,
    out: Out,
    data: Data = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Replace so many layers.")] = None,
    budget: Annotated[float | None, typer.Option(help="Stop once the held-out WER, in per cent, exceeds this.")] = None,
    mixer: Mixer = None,
    order: Annotated[str | None, typer.Option(help="sweep, kl, depth, reverse, random:SEED or 0,3,1.")] = None,
    recipe: Annotated[str, typer.Option(help="paper, best, none, or a TOML file.")] = "paper",
    plan: Annotated[str | None, typer.Option(help="choice.json of `lpa plan`.")] = None,
    held_out: HeldOut = "",
    overrides: Set = None,
    max_minutes: Minutes = 0.0,
    record: Record = False,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Replace attention layer by layer, as a recipe says, and keep what each step gave."""
    from .config import read
    from .loop import convert as run
    from .loop import essentials

    given = {"model": model, "sources": data, "held_out": _speakers(held_out), "layers": layers, "budget": budget}
    given |= {"mixer": mixer, "order": order, "plan": plan, "max_minutes": max_minutes}
    config = read(recipe, overrides or (), **given)
    with _going_on():
        folder = run(config, out, results if record else None)
    _tell(json.dumps(essentials(out)) if as_json else folder)


def control(
    run: Annotated[Path, typer.Argument(help="The --out of an `lpa convert`.")],
    out: Out,
    max_minutes: Minutes = 0.0,
    record: Record = False,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Train as a conversion did, with attention left in: what its result has to be compared with."""
    from .control import compare
    from .control import control as start

    with _going_on():
        folder = start(run, out, results if record else None, max_minutes)
    both = compare(run, out)
    if as_json:
        _tell(json.dumps(both))
    elif both is None or both["points"] is None:
        _tell(folder)
    else:
        values = [both[name + both["measure"]] for name in ("", "control_")]
        unit = {"wer": "%"}.get(both["measure"], "dB")
        _tell(f"converted {values[0]:.2f} {unit}, control {values[1]:.2f} {unit}, {both['points']:+.2f} points")


def ablate(
    model: Model,
    out: Out,
    data: Data = None,
    layers: Annotated[int, typer.Option(min=1, help="Replace so many layers.")] = 8,
    held_out: HeldOut = "",
    recipe: Annotated[str, typer.Option(help="What the last row is: paper, or a TOML file.")] = "paper",
    row: Annotated[int | None, typer.Option(min=0, help="Only this row, for several processes to share them.")] = None,
    overrides: Set = None,
    max_minutes: Minutes = 0.0,
    record: Record = False,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """The cumulative table: a naive conversion, then one technique more a row."""
    from .ablate import ablate as run
    from .ablate import render
    from .config import read

    given = {"model": model, "sources": data, "held_out": _speakers(held_out), "layers": layers}
    config = read(recipe, overrides or (), **given, max_minutes=max_minutes)
    with _going_on():
        found = run(config, out, results if record else None, row)
    if found is not None:
        _show(found, render, as_json)


def plan(
    model: Model,
    out: Out,
    data: Data = None,
    budget: Annotated[float | None, typer.Option(help="Most that may be lost in all, in units of --measure.")] = None,
    mflop: Annotated[float | None, typer.Option(help="Most that mixing may cost: MFLOP a second of audio.")] = None,
    measure: Annotated[str, typer.Option(help="What a layer loses: wer (points), kl or relative.")] = "wer",
    mixer: Annotated[list[str] | None, typer.Option(help="The mixers to choose from, A,B,C or one each time.")] = None,
    held_out: HeldOut = "",
    overrides: Set = None,
    max_minutes: Minutes = 0.0,
    record: Record = False,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Choose a mixer for each layer: the cheapest within a loss, or the best at a price. `convert --plan` takes it."""
    from .planner import make_plan, render

    if (budget is None) == (mflop is None):
        raise LpaError("give one budget: --budget (what may be lost) or --mflop (what it may cost)")
    config = _sweep_config(model, data, None, held_out, overrides, max_minutes)
    named = [name.strip() for text in mixer or ["lpa,ladder,pyramid,window"] for name in text.split(",")]
    names, folder = list(dict.fromkeys(named)), results if record else None
    with _going_on():
        found = make_plan(config, names, out, measure=measure, loss=budget, cost=mflop, record=folder)
    if found is not None:
        _show(found, render, as_json)


def table(
    runs: Annotated[list[Path], typer.Argument(help="The --out of conversions and of their controls.")],
    data: Annotated[str | None, typer.Option(help="Measure every step's model on this; else as the runs did.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many utterances.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    record: Record = False,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Several conversions side by side, by the number of layers replaced."""
    from .table import make_table, render

    if record and data is None:
        raise LpaError("what the runs measured is recorded by `lpa convert --record`; name other data with --data")
    found = make_table(runs, data, limit=limit, device=device, record=results if record else None)
    _show(found, render, as_json)


def _sweep_config(model, data, mixer, held_out: str, overrides, max_minutes: float):
    from .config import SweepConfig, override

    given = {"model": model, "sources": data, "held_out": _speakers(held_out), "mixer": mixer}
    known = {key: value for key, value in given.items() if value is not None}
    return override(SweepConfig, {**known, "max_minutes": max_minutes}, overrides or ())


def _speakers(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


@contextmanager
def _going_on() -> Iterator[None]:
    """Inside, what is interrupted is told that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        if _main():
            print("stopped; the same command goes on where it was", file=sys.stderr)
        raise


def _main() -> bool:
    """Of several processes that do a command together the one that answers. Known before torch is there to be asked."""
    return os.environ.get("RANK", "0") == "0"


def _tell(answer: Any) -> None:
    if _main():
        print(answer)


def _show(found, render, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        _tell(json.dumps(found))
    elif _main():
        Console().print(render(found))
