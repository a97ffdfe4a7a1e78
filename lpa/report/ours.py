"""Tables and figures on what is heard that the paper does not have: our models, what was converted, what was tried."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

from ..convert.config import settings_of
from .conversions import full_name, layers_of, mixer_said, mixers_of, results, series, trained, training_key
from .items import OURS, Cell, Chart, Figure, Grid, Item, Line, Verdict, gap, missing
from .measured import Record, as_it_is, base_name, figure, grouped, is_evaluation, split_of
from .quality import DATA, EVALUATE, SWEEP

BEST = f"lpa convert models/wav2vec2-12 {DATA} --out runs/best --recipe best --record"
CONTROL = "lpa control runs/best --out runs/best-control --record"
UNCHANGED = "before conversion"
DURATION_AXES = ("seconds of joined speech, log", "WER %")


def converted(found: list[Record]) -> Item:
    """Every finished conversion, beside its control where it has one; what trained for as long stands together."""
    rows: list[list[Cell]] = []
    for r in sorted(results(found), key=lambda r: (r.model, r.layers, r.budget())):
        layers = f"{r.layers} of {r.of}" if r.of else str(r.layers)
        rows.append([r.model, r.name, layers, r.training])
        rows[-1] += [r.tested, r.tested_control, gap(r.tested, r.tested_control)]
        rows[-1] += [r.held, r.held_control, gap(r.held, r.held_control)]
    columns = (
        *("model", "what took attention's place", "layers", "training"),
        *("test-clean, WER %", "control", "points", "held-out, WER %", "control", "points"),
    )
    why = "control: the same training with attention left in, and of what had no training the model it began with; "
    why += "empty where there is none; only rows of one training compare, and these stand together; "
    why += "held-out: speakers of dev-clean that were not trained on"
    verdict = Verdict(OURS, why) if rows else missing([BEST, CONTROL])
    grid = Grid(columns, rows, ours=frozenset(range(4, 10)))
    return Item("conversions", "Ours", "Converted models beside their controls", verdict, grid)


def tried(found: list[Record]) -> Item:
    """What each setting of a mixer leaves of attention in every layer alone, by the sweeps."""
    swept = [r for r in found if r["kind"] == "sweep" and "relative" in r["figures"]]
    rows: list[list[Cell]] = []

    def key(record: Record) -> tuple[str, str, str, int]:
        config = record["config"]
        epochs, seconds = record["figures"]["epochs"], config["train"].get("epoch_seconds")
        heard = f"{epochs * seconds:,.0f} s" if seconds else f"{epochs:g} epochs"
        mixer = mixer_said(config["mixer"], config["mixer_config"]) + reach(config)
        return record["model"], mixer, heard if epochs else "none", config["train"].get("held_out_limit", 0)

    for (model, mixer, heard, on), some in sorted(grouped(swept, key).items()):
        layers = list({r["figures"]["layer"]: r for r in some}.values())  # of each the latest
        rows.append([model, mixer, heard, f"{on}" if on else "all"])
        rows[-1] += [
            over_layers(layers, "relative", 100),
            *(over_layers(layers, n) for n in ("kl", "mflop_per_second")),
        ]
    columns = (
        *("model", "mixer", "trained", "utterances", "left unexplained, %", "KL of the posteriors"),
        "MFLOP a second of audio",
    )
    said = "each layer alone beside its attention, the mean over the layers: the share of what attention puts out that "
    said += "the mixer leaves unexplained, what that does to the posteriors, and what a layer costs; held-out speakers"
    verdict = Verdict(OURS, said) if rows else missing([SWEEP])
    grid = Grid(columns, rows, ours=frozenset({4, 5, 6}))
    return Item("settings", "Ours", "What each setting of a mixer does", verdict, grid)


def reach(config: dict[str, Any]) -> str:
    """How far a pyramid looks beyond a frame's own block, where its settings say so."""
    settings = settings_of(config["mixer"], config["mixer_config"])
    return f", {settings['block'] * (1 + sum(settings['steps']))} frames" if "steps" in settings else ""


def over_layers(layers: list[Record], name: str, times: float = 1.0) -> Figure | None:
    """The mean over layers, and the least and the most."""
    ranked = sorted((r for r in layers if r["figures"].get(name) is not None), key=lambda r: r["figures"][name])
    values = [times * r["figures"][name] for r in ranked]
    if not values:
        return None
    made = Figure(fmean(values), (ranked[0]["id"],), digits=4 if values[-1] < 1 else 1)
    if values[0] == values[-1]:
        return made
    ends = (ranked[0]["id"], ranked[-1]["id"])
    return replace(made, ids=ends, low=values[0], high=values[-1], spread="over the layers")


def tested(found: list[Record]) -> Item:
    """WER of whole models on speech that nobody trained on; conversions have a table of their own."""
    evaluated = [r for r in found if is_evaluation(r) and as_it_is(r) and not r.get("config")]
    rows: list[list[Cell]] = []

    def key(record: Record) -> tuple[str, int | None, str]:
        return full_name(record), (record.get("network") or {}).get("replaced"), split_of(record) or record["data"]

    for (model, _, data), some in grouped(evaluated, key).items():
        network = some[-1].get("network") or {}
        mixers = ", ".join(network.get("mixers", [])) or "attention"
        layers = f"{network['replaced']} of {network['layers']}" if network.get("layers") else ""
        rows.append([model, mixers, layers, data, figure(some, "wer"), figure(some, "cer")])
    command = "lpa evaluate --model models/whisper-base-ctc --data LibriSpeech/test-clean --record"
    verdict = (
        Verdict(OURS, "greedy CTC, no language model; test-clean is its public half") if rows else missing([command])
    )
    columns = ("model", "mixers", "layers replaced", "data", "WER %", "CER %")
    return Item(
        "models",
        "Ours",
        "What the models hear",
        verdict,
        Grid(columns, rows, ours=frozenset({4, 5})),
    )


def by_duration(found: list[Record]) -> Item:
    """WER of joined utterances by their length, a chart for each model that was converted."""
    charts: list[Chart] = []
    notes: list[str] = []
    for base, lines in durations(found).items():
        level = {line.name: min(f.value for _, f in line.points if isinstance(f, Figure)) for line in lines}
        ceiling = 2.5 * min(level.values())
        for line in [line for line in lines if level[line.name] > ceiling]:
            values = [f.value for _, f in line.points if isinstance(f, Figure)]
            notes.append(f"Above the chart: {base}, {line.name}, {min(values):.1f} to {max(values):.1f} %.")
        shown = [line for line in lines if level[line.name] <= ceiling]
        place = "chart-duration" + (f"-{len(charts)}" if charts else "")
        charts.append(Chart(place, f"{base}: WER against duration", *DURATION_AXES, shown, log_x=True))
    command = EVALUATE.replace("runs/paper/step-08/model", "models/whisper-base-ctc") + " --join 60"
    verdict = Verdict(OURS, "neighbouring utterances of one speaker joined") if charts else missing([command])
    return Item("duration", "Ours", "WER against duration", verdict, charts=charts, notes=notes)


def durations(found: list[Record]) -> dict[str, list[Line]]:
    """By the model that was converted: a curve for every conversion, and for each length that it cut recordings to.

    What was short enough to be heard whole is part of all of a model's curves.
    """
    joined = [r for r in found if is_evaluation(r) and "seconds" in r["figures"] and r.get("tau") is None]
    # of a conversion and of its control
    lengths = {r.key[1:]: r.training for r in results(found) if r.hours and not r.minutes}
    made: dict[str, list[Line]] = {}
    for base, of_one in grouped(joined, base_name).items():
        made[base] = []
        changed = [r for r in of_one if r.get("config") and series(r["config"])]
        depths = {layers_of(r) for r in changed}
        trainings = {name: {training_key(r)[3] for r in rows} for name, rows in grouped(changed, named).items()}

        def label(record: Record, depths: set = depths, trainings: dict = trainings) -> str | None:
            name, config = named(record), record.get("config")
            if name is None or not config:
                return name
            name += f", {layers_of(record)} layers" if len(depths) > 1 else ""
            if len(trainings[named(record)]) > 1:
                name += f", {config['settle_epochs']:g} epochs at {config['lr']:g}"
            length = lengths.get(training_key(record)[1:])
            return f"{name}, {length}" if length else name

        for model, some in grouped(of_one, label).items():
            cuts = {r["chunk_seconds"] for r in some if r.get("chunk_seconds")}
            whole = any(not r.get("chunk_seconds") and r["figures"]["seconds"] > max(cuts, default=0) for r in some)
            for cut in [*([None] if whole else []), *sorted(cuts)]:
                most = cut or math.inf  # what is shorter was heard whole
                heard = [r for r in some if r.get("chunk_seconds") == cut or not r.get("chunk_seconds")]
                heard = [r for r in heard if r.get("chunk_seconds") or r["figures"]["seconds"] <= most]
                by_length = sorted(grouped(heard, lambda r: r["figures"]["seconds"]).items())
                points = [(s, f) for s, rows in by_length if (f := figure(rows, "wer")) is not None]
                made[base].append(Line(f"{model}, in chunks of {cut:g} s" if cut else model, points, ours=True))
    return made


def named(record: Record) -> str | None:
    return series(record["config"]) if record.get("config") else UNCHANGED


def by_temperature(found: list[Record]) -> Item:
    """WER with softer and harder gates."""
    asked = [r for r in found if is_evaluation(r) and r.get("tau") is not None]
    temperatures = sorted({str(r["tau"]) for r in asked}, reverse=True)  # hard, then the softest first
    temperatures = temperatures[1:] + temperatures[:1] if "hard" in temperatures else temperatures
    rows: list[list[Cell]] = []
    for (model, data), some in grouped(asked, lambda r: (full_name(r), split_of(r) or r["data"])).items():
        at = grouped(some, lambda r: str(r["tau"]))
        rows.append([model, data, *(figure(at.get(tau, []), "wer") for tau in temperatures)])
    command = EVALUATE.replace(" --record", " --tau 0.5 --tau 0.1 --tau 0.01 --tau hard --record")
    why = (
        "WER % by τ, the temperature of the gates; the paper finds the same transcripts at τ = 0.01 and with hard gates"
    )
    verdict = Verdict(OURS, why) if rows else missing([command])
    names = (f"τ = {tau}" if tau != "hard" else "hard gates" for tau in temperatures)
    grid = Grid(("model", "data", *names), rows, ours=frozenset(range(2, 2 + len(temperatures))))
    return Item("temperature", "Ours", "From soft gates to hard ones", verdict, grid)


def by_latency(found: list[Record]) -> Item:
    """WER of a model that may look less far ahead."""
    asked = [r for r in found if is_evaluation(r) and r.get("latency") is not None]
    rows: list[list[Cell]] = [
        [model, split_of(some[-1]) or some[-1]["data"], f"{seconds:g}", figure(some, "wer")]
        for (model, seconds), some in sorted(grouped(asked, lambda r: (full_name(r), r["latency"])).items())
    ]
    command = "lpa evaluate --model default --data LibriSpeech/test-clean --latency 1 --latency 4 --record"
    verdict = Verdict(OURS, "mixers cut off ahead, not trained again") if rows else missing([command])
    grid = Grid(("model", "data", "s ahead", "WER %"), rows, ours=frozenset({3}))
    return Item("latency", "Ours", "Looking less far ahead", verdict, grid)


def by_training(found: list[Record]) -> Item:
    """WER on test-clean against the minutes a conversion trained for, by the clock; none at all where that is known."""
    tested = [r for r in found if is_evaluation(r) and as_it_is(r) and r.get("config") and "test" in r["data"]]
    timed = [r for r in tested if r["config"]["minutes"]]
    trained = {repr(r["config"]): r["machine"] for r in found if r["kind"] == "convert" and r.get("config")}
    # not where it was measured; a training that left no record of itself is no row
    timed = [{**r, "machine": trained[repr(r["config"])]} for r in timed if repr(r["config"]) in trained]
    labels = dict.fromkeys(training_line(r) for r in timed)
    minutes = sorted({r["config"]["minutes"] for r in timed})
    rows: list[list[Cell]] = []
    for model, label, machine in labels:
        alike = [r for r in timed if training_line(r) == (model, label, machine)]
        free = [r for r in tested if base_name(r) == model and "not trained" in (series(r["config"]) or "")]
        free = [r for r in free if r["config"]["positions"] == alike[0]["config"]["positions"]]
        free = [r for r in free if mixers_of(r["config"]) == mixers_of(alike[0]["config"])]
        cells = [figure((r for r in alike if r["config"]["minutes"] == m), "wer") for m in minutes]
        rows.append([model, label, machine, figure(free, "wer"), *cells])
    columns = ("model", "what took attention's place", "machine", "not at all", *(f"{m:g} min" for m in minutes))
    command = f"{BEST} --set minutes=1"
    verdict = (
        Verdict(OURS, "training by the clock, nothing beside it; test-clean, WER %") if rows else missing([command])
    )
    grid = Grid(columns, rows, ours=frozenset(range(3, len(columns))))
    lines = [
        Line(
            f"{model}: {label}", [(60 * m, f) for m, f in zip(minutes, cells, strict=True) if f is not None], ours=True
        )
        for model, label, _, _, *cells in rows
    ]
    axes = ("seconds of training, log", "WER %")
    chart = Chart("chart-training", "WER against training time", *axes, lines, log_x=True)
    return Item("training", "Ours", "How little training will do", verdict, grid, [chart])


def training_line(record: Record) -> tuple[str, str, str]:
    label = series({**record["config"], "minutes": 0}) or ""  # one row for all lengths of training
    return base_name(record), label, record["machine"]


def planned(found: list[Record]) -> Item:
    """What the planner said a choice of mixers would cost, and what it came to."""
    finals = [r for r in found if r["kind"] == "convert" and r["what"] == "final" and r.get("predicted")]
    rows: list[list[Cell]] = []
    for record in finals:
        came = (record.get("outcome") or {}).get("wer_points")
        said = record["predicted"].get("wer_points")
        mixers = ", ".join(record["network"]["mixers"])
        rows.append([base_name(record), mixers, str(record["figures"]["layers"])])
        rows[-1] += ["trained" if trained(record["config"]) else "as they are"]
        rows[-1] += [None if v is None else Figure(v, (record["id"],)) for v in (said, came)]
    command = "lpa plan models/wav2vec2-12 " + DATA + " --budget 2 --out runs/plan"
    why = "predicted: what each layer loses alone, added up; on the held-out speakers"
    verdict = Verdict(OURS, why) if rows else missing([command, "lpa convert … --plan runs/plan/choice.json --record"])
    columns = ("model", "mixers", "layers", "mixers are", "predicted, points", "came to")
    return Item("plan", "Ours", "The planner, judged", verdict, Grid(columns, rows, ours=frozenset({4, 5})))
