"""Tables and figures on what is heard that the paper does not have: our models, what was converted, what was tried."""

from __future__ import annotations

from .items import OURS, Cell, Chart, Figure, Grid, Item, Line, Verdict
from .measured import (
    EPOCHS,
    Record,
    as_it_is,
    base_name,
    figure,
    full_name,
    grouped,
    mixers_of,
    results,
    series,
    split_of,
)
from .quality import DATA, EVALUATE, is_evaluation, missing, signed

BEST = f"lpa convert models/wav2vec2-12 {DATA} --out runs/best --recipe best --record"
CONTROL = "lpa control runs/best --out runs/best-control --record"
DURATION_AXES = ("seconds of joined speech, log", "WER %")


def converted(found: list[Record], newest: bool = False) -> Item:
    """Every finished conversion beside its control; or of each the newest that has one, on both sets where there is."""
    rows: list[list[Cell]] = []
    every = results(found)
    if newest:
        compared = [r for r in every if r.tested_control is not None or r.held_control is not None] or every
        ranked = sorted(compared, key=lambda r: (r.tested is not None, r.date))
        every = list({(r.model, r.layers, r.name): r for r in ranked}.values())
        every.sort(key=lambda r: (r.model, r.layers, r.name))
    for r in every:
        layers = f"{r.layers} of {r.of}" if r.of else str(r.layers)
        rows.append([r.model, r.name, layers, r.tested, r.tested_control, gap(r.tested, r.tested_control)])
        rows[-1] += [r.held, r.held_control, gap(r.held, r.held_control)]
    columns = (
        *("model", "what took attention's place", "layers"),
        *("test-clean, WER %", "control", "points", "held-out, WER %", "control", "points"),
    )
    why = "beside the same training with attention left in; held-out: speakers of dev-clean that were not trained on"
    verdict = Verdict(OURS, why) if rows else missing([BEST, CONTROL])
    grid = Grid(columns, rows, ours=frozenset(range(3, 9)))
    return Item("conversions", "Ours", "Converted models beside their controls", verdict, grid)


def gap(ours: Figure | None, control: Figure | None) -> str | None:
    return None if ours is None or control is None else signed(ours.value - control.value)


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
    joined = [r for r in found if is_evaluation(r) and "seconds" in r["figures"] and r.get("tau") is None]
    charts: list[Chart] = []
    notes: list[str] = []
    for base, of_one in grouped(joined, base_name).items():
        lines = [line for model, some in grouped(of_one, full_name).items() for line in durations(model, some)]
        level = {line.name: min(f.value for _, f in line.points if isinstance(f, Figure)) for line in lines}
        ceiling = 2.5 * min(level.values())
        for line in [line for line in lines if level[line.name] > ceiling]:
            values = [f.value for _, f in line.points if isinstance(f, Figure)]
            notes.append(f"Above the chart: {line.name}, {min(values):.1f} to {max(values):.1f} %.")
        shown = [line for line in lines if level[line.name] <= ceiling]
        charts.append(
            Chart(
                "chart-duration" + (f"-{len(charts)}" if charts else ""),
                f"{base}: WER against duration",
                *DURATION_AXES,
                shown,
                log_x=True,
            )
        )
    command = EVALUATE.replace("runs/paper/step-08/model", "models/whisper-base-ctc") + " --join 60"
    verdict = Verdict(OURS, "neighbouring utterances of one speaker joined") if charts else missing([command])
    return Item("duration", "Ours", "WER against duration", verdict, charts=charts, notes=notes)


def durations(model: str, joined: list[Record]) -> list[Line]:
    """A model's curve for each length it was cut to; what was short enough to be heard whole is part of every one."""
    lines = []
    for cut in sorted({r["chunk_seconds"] for r in joined if r.get("chunk_seconds")}) or [None]:
        alike = grouped((r for r in joined if r.get("chunk_seconds") in (None, cut)), lambda r: r["figures"]["seconds"])
        made = {s: figure(rows, "wer") for s, rows in sorted(alike.items())}
        name = f"{model}, in chunks of {cut:g} s" if cut else model
        lines.append(Line(name, [(s, f) for s, f in made.items() if f is not None], ours=True))
    return lines


def by_temperature(found: list[Record]) -> Item:
    """WER with softer and harder gates."""
    asked = [r for r in found if is_evaluation(r) and r.get("tau") is not None]
    rows: list[list[Cell]] = [
        [model, split_of(some[-1]) or some[-1]["data"], tau, figure(some, "wer")]
        for (model, tau), some in grouped(asked, lambda r: (full_name(r), str(r["tau"]))).items()
    ]
    command = EVALUATE.replace(" --record", " --tau 0.5 --tau 0.1 --tau 0.01 --tau hard --record")
    why = "the paper finds the same transcripts at τ = 0.01 and with hard gates"
    verdict = Verdict(OURS, why) if rows else missing([command])
    grid = Grid(("model", "data", "τ", "WER %"), rows, ours=frozenset({3}))
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
    timed = [{**r, "machine": trained.get(repr(r["config"]), "")} for r in timed]  # not where it was measured
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
    columns = ("model", "what took attention's place", "trained on", "not at all", *(f"{m:g} min" for m in minutes))
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
        trained = "trained" if any(record["config"][name] for name in EPOCHS) else "as they are"
        came = (record.get("outcome") or {}).get("wer_points")
        said = record["predicted"].get("wer_points")
        mixers = ", ".join(record["network"]["mixers"])
        rows.append([base_name(record), mixers, str(record["figures"]["layers"]), trained])
        rows[-1] += [None if v is None else signed(v) for v in (said, came)]
    command = "lpa plan models/wav2vec2-12 " + DATA + " --budget 2 --out runs/plan"
    why = "predicted: what each layer loses alone, added up; on the held-out speakers"
    verdict = Verdict(OURS, why) if rows else missing([command, "lpa convert … --plan runs/plan/choice.json --record"])
    columns = ("model", "mixers", "layers", "mixers are", "predicted, points", "came to")
    return Item("plan", "Ours", "The planner, judged", verdict, Grid(columns, rows, ours=frozenset({5})))


def cleaned(found: list[Record]) -> Item:
    """What the enhancement models do for speech in noise, by every measure there is."""
    rows: list[list[Cell]] = []
    asked = [r for r in found if r["kind"] == "evaluate" and "si_snri" in r["figures"] and r.get("noise")]
    for (model, noise), some in grouped(asked, lambda r: (r["model"].removesuffix("/model"), r["noise"])).items():
        mixers = ", ".join((some[-1].get("network") or {}).get("mixers", [])) or "attention"
        heard = [figure(some, name) for name in ("si_snri", "pesq", "pesq_noisy", "stoi", "stoi_noisy")]
        rows.append([model, mixers, noise, *heard])
    command = "lpa evaluate --model runs/sepformer/model --data LibriSpeech/test-clean --noise babble --record"
    verdict = Verdict(OURS, "noise at 5 dB, speakers nobody trained on") if rows else missing([command])
    columns = ("model", "mixers", "noise", "SI-SNRi, dB", "PESQ", "of the noisy", "STOI", "of the noisy")
    return Item("cleaned", "Ours", "Noise taken out of speech", verdict, Grid(columns, rows, ours=frozenset({3, 4, 6})))
