"""The paper's tables and figures on cost (3, 5, 9, 10, 11; Figures 1, 3, 4) with ours beside them; the layer table."""

from __future__ import annotations

import math
from collections.abc import Callable

from . import paper
from .items import DIFFERENT, IMPOSSIBLE, OURS, REPRODUCED, Cell, Chart, Figure, Grid, Item, Line, Verdict
from .measured import Record, figure, grouped, split_of
from .quality import missing

FRAMES_A_SECOND = 50
PULSES = 12
WHOLE = "whole layer"
LAYER = "lpa bench layer --rounds 25 --record"
MODEL = "lpa bench model --record"
ROOFLINE = "lpa bench roofline --record"
TRANSCRIBE = "lpa bench transcribe tests/data/librivox/austen-0880.flac --record"
PEERS = "lpa bench peers --data LibriSpeech/test-clean --model models/default --record"
APPLE = "it needs an Apple M4 Pro; ours are times of another machine, in another column"
NAMES = {"lpa-hard": "lpa, hard gates", "lpa-plain": "lpa, not folded", "window": "window ±64"}

Times = dict[str, dict[float, Figure]]  # variant -> seconds of audio -> figure


def whole_models(found: list[Record], name: str = "median_ms") -> Times:
    """A figure of whole models by seconds of audio, for each variant: of bench records that name seconds."""
    benched = (r for r in found if r["kind"] == "bench" and r["what"].startswith("model"))
    rows = [r for r in benched if "seconds" in r["figures"] and name in r["figures"]]
    made: Times = {}
    for variant, some in grouped(rows, variant_of).items():
        by_length = sorted(grouped(some, lambda r: r["figures"]["seconds"]).items())
        made[variant] = {
            s: f for s, rows in by_length if (f := figure(rows, name, 2 if name == "speedup" else 1)) is not None
        }
    return made


def variant_of(record: Record) -> str:
    return f"{record['model']}, {record['what'].partition(', ')[2]}".removesuffix(", ").removesuffix(", wall clock")


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
            f"chart-gates-{n}", name, "seconds", "gate", [Line("gate", [(t / 50, gate(t)) for t in range(201)], True)]
        )
        for n, (name, gate) in enumerate(gates.items(), 1)
    ]
    verdict = Verdict(REPRODUCED, "drawn from the formulas; `lpa show FILE --model MODEL` draws them on a recording")
    return Item("figure-1", "Figure 1", "Pulses in attention's place", verdict, charts=charts)


def table_9(found: list[Record]) -> Item:
    ours = whole_models(found)
    seconds = sorted({*paper.SPEED, *(s for line in ours.values() for s in line)})
    names = sorted(ours)
    empty = (None,) * len(paper.SPEED_COLUMNS)
    rows: list[list[Cell]] = [
        [f"{s:g}", *paper.SPEED.get(int(s), empty), *(ours[n].get(s) for n in names)] for s in seconds
    ]
    columns = ("seconds", *(f"paper, {c}" for c in paper.SPEED_COLUMNS), *(f"ours, {n}" for n in names))
    notes = ["The paper's on an Apple M4 Pro, batch 1; ours on the machine their records name, interleaved in one run."]
    grid = Grid(columns, rows, digits=0, ours=frozenset(range(6, len(columns))))
    title = "Time of whole models, ms, all configurations"
    return Item("table-9", "Table 9", title, judge_speed(found), grid, notes=notes)


def judge_speed(found: list[Record]) -> Verdict:
    gains = {n: line for n, line in whole_models(found, "speedup").items() if n.startswith("lpa")}
    line = next((line for line in gains.values() if len(line) > 1), None)
    if line is None:
        return missing([MODEL])
    short, long = min(line), max(line)
    said = f"{line[short].value:.2f} times as fast as attention at {short:g} s, {line[long].value:.2f} at {long:g} s"
    if line[long].value > max(1, line[short].value):
        return Verdict(REPRODUCED, f"the gain grows with the recording: {said}")
    return Verdict(DIFFERENT, f"{said}, because this machine and its attention kernel are others")


def table_3(found: list[Record]) -> Item:
    gains = whole_models(found, "speedup")
    names = sorted(n for n in gains if not n.startswith("attention"))
    seconds = sorted({*paper.SPEED, *(s for n in names for s in gains[n])})
    rows: list[list[Cell]] = []
    for s in seconds:
        theirs = [paper.SPEEDUP_TORCH.get(int(s)), paper.SPEEDUP_MLX.get(int(s))]
        rows.append([f"{s:g}", *theirs, *(gains[n].get(s) for n in names)])
    columns = ("seconds", "paper, 12/12 in PyTorch", "paper, 8/12 in MLX", *(f"ours, {n}" for n in names))
    title = "Times as fast as attention"
    grid = Grid(columns, rows, ours=frozenset(range(3, len(columns))))
    return Item("table-3", "Table 3", title, judge_speed(found), grid)


def table_5(found: list[Record]) -> Item:
    rows: list[list[Cell]] = [
        [str(s), row[0], row[1], row[2], row[4], paper.SPEEDUP_MLX[s]] for s, row in paper.SPEED.items()
    ]
    columns = ("seconds", "attention, fp32", "attention, fp16", "8/12, PyTorch", "8/12, MLX", "times as fast")
    title = "The MLX path on an Apple GPU, ms"
    notes = ["All of the paper's. Our times of whole models are in Tables 3 and 9."]
    return Item("table-5", "Table 5", title, Verdict(IMPOSSIBLE, APPLE), Grid(columns, rows), notes=notes)


def figure_3(found: list[Record]) -> Item:
    ours, gains = whole_models(found), whole_models(found, "speedup")
    theirs = [
        Line(f"paper, {name}", [(s, row[i]) for s, row in paper.SPEED.items()])
        for i, name in enumerate(paper.SPEED_COLUMNS)
        if i in (1, 3, 4)
    ]
    times = [Line(f"ours, {n}", list(line.items()), True) for n, line in sorted(ours.items())]
    ratios = [
        Line("paper, 12/12 in PyTorch", list(paper.SPEEDUP_TORCH.items())),
        Line("paper, 8/12 in MLX", list(paper.SPEEDUP_MLX.items())),
        *(Line(f"ours, {n}", list(line.items()), True) for n, line in sorted(gains.items())),
    ]
    charts = [
        Chart(
            "chart-speed", "Time against duration", "seconds of audio, log", "ms, log", [*theirs, *times], True, True
        ),
        Chart("chart-gain", "Times as fast as attention", "seconds of audio, log", "times", ratios, log_x=True),
    ]
    return Item("figure-3", "Figure 3", "Speed against duration", judge_speed(found), charts=charts)


def scores_mb(seconds: float) -> float:
    """One head's scores in float32, in the paper's MB of 1,048,576 bytes."""
    return 4 * (FRAMES_A_SECOND * seconds) ** 2 / 2**20


def gates_mb(seconds: float, pulses: int = PULSES) -> float:
    return 4 * FRAMES_A_SECOND * seconds * pulses / 1024 / 1000  # the paper's KB of 1,024 bytes, as thousandths


MEMORY_VERDICT = Verdict(
    REPRODUCED,
    "by arithmetic: four bytes for each of n² scores and of n · 12 gates. It counts one head of twelve, and fused "
    "attention writes none of its scores down",
)


def table_10(found: list[Record]) -> Item:
    rows: list[list[Cell]] = [
        [str(s), s * FRAMES_A_SECOND, a, f"{scores_mb(s):.2f}", b, f"{gates_mb(s):.3f}", f"{a / b:,.0f}×"]
        for s, (a, b) in paper.MEMORY.items()
    ]
    rows = [[*row[:2], f"{row[2]:g}", row[3], f"{row[4]:.3f}", *row[5:]] for row in rows]
    columns = ("seconds", "frames", "scores, paper MB", "computed", "gates, paper MB", "computed", "ratio")
    grid = Grid(columns, rows, digits=0, ours=frozenset({3, 5}))
    return Item("table-10", "Table 10", "Memory of scores and of gates in one layer", MEMORY_VERDICT, grid)


def figure_4(found: list[Record]) -> Item:
    seconds = (10, 30, 60, 120, 300, 600)
    peaks = whole_models(found, "peak_mb")
    lines = [
        Line("one head's scores, computed", [(s, scores_mb(s)) for s in seconds]),
        Line("12 gates, computed", [(s, gates_mb(s)) for s in seconds]),
        *(Line(f"whole model, measured: {n}", list(line.items()), True) for n, line in sorted(peaks.items())),
    ]
    chart = Chart("chart-memory", "Memory against duration", "seconds of audio, log", "MB, log", lines, True, True)
    notes = [] if peaks else [f"What whole models take is not measured yet: run `{MODEL}`."]
    return Item("figure-4", "Figure 4", "Memory against duration", MEMORY_VERDICT, charts=[chart], notes=notes)


def table_11(found: list[Record]) -> Item:
    columns = ("attention", "LPA, 12 pulses", "LPA, 36 pulses")
    benched = [r for r in found if r["kind"] == "bench" and r["what"].startswith("roofline") and "us" in r["figures"]]
    parts = grouped(benched, lambda r: (r["model"], r.get("part")))
    ours = {key: f for key, some in parts.items() if (f := figure(some, "us", 0)) is not None}
    clocked = {model: figure(some, "measured_us", 0) for (model, part), some in parts.items() if part == WHOLE}
    names = sorted({model for model, _ in ours})
    rows: list[list[Cell]] = [
        [part, *theirs, *(ours.get((model, part)) for model in names)] for part, *theirs in paper.ROOFLINE
    ]
    if clocked:
        rows.append(["whole layer, by the clock", None, None, None, *(clocked.get(model) for model in names)])
    labels = [name for name, *_ in paper.ROOFLINE]
    lines = [
        Line(f"paper, {column}", [(i, row[j]) for i, row in enumerate(paper.ROOFLINE)])
        for j, column in enumerate(columns, 1)
    ]
    for model in names:
        bars = [(i, ours[model, label]) for i, label in enumerate(labels) if (model, label) in ours]
        lines.append(Line(f"ours, {model}", bars, True))
    chart = Chart("chart-roofline", "Roofline: where a layer's time goes", "", "µs a layer", lines, bars=labels)
    names_of = ("part", *(f"paper, {c}" for c in columns), *(f"ours, {n}" for n in names))
    return Item(
        "table-11",
        "Table 11",
        "Roofline of one layer at 6,000 frames, µs",
        judge_roofline(ours),
        Grid(names_of, rows, digits=0, ours=frozenset(range(4, 4 + len(names)))),
        [chart],
        ["The paper computes these for an Apple M4 Pro; ours follow from the bandwidth and arithmetic of our machine."],
    )


def judge_roofline(ours: dict[tuple[str, str], Figure]) -> Verdict:
    few, many = (ours.get((f"lpa, {pulses} pulses", WHOLE)) for pulses in (12, 36))
    if few is None or many is None:
        return missing([ROOFLINE])
    more = 100 * (many.value / few.value - 1)
    said = f"three times the pulses make a layer {more:.1f} % dearer (paper: 0.6 %)"
    if more < 5:
        return Verdict(REPRODUCED, said)
    return Verdict(DIFFERENT, f"{said}: our projections are folded away, so pulses are most of what is left")


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
                where = f"{what.partition(', ')[2]}; {machine}"
                rows.append([NAMES.get(mixer, mixer), f"{frames:,}", time, gain, cost, where])
    columns = ("mixer", "frames", "ms", "times as fast", "MFLOP a frame", "setting")
    verdict = Verdict(OURS, "projections included, all in turn in one run") if rows else missing([LAYER])
    grid = Grid(columns, rows, ours=frozenset({2, 3, 4}))
    return Item("layers", "Ours", "One layer of every mixer against PyTorch's fused attention", verdict, grid)


def start_to_text(found: list[Record]) -> Item:
    """The command people type, start of the process included."""
    heard = [r for r in found if r["kind"] == "bench" and r["what"].partition(",")[0] in ("transcribe", "enhance")]
    rows: list[list[Cell]] = []
    for (what, model, machine), some in grouped(heard, lambda r: (r["what"], r["model"], r["machine"])).items():
        for seconds, at in sorted(grouped(some, lambda r: r["figures"]["seconds"]).items()):
            figures = [
                figure(at, name, digits) for name, digits in (("wall_s", 2), ("ms_per_second", 1), ("peak_mb", 0))
            ]
            verb, _, backend = what.partition(", ")
            rows.append([f"lpa {verb}", model, backend, f"{seconds:,.0f}", *figures, machine])
    columns = ("command", "model", "backend", "seconds of audio", "s", "ms per second of audio", "peak MB", "machine")
    verdict = Verdict(OURS, "each in a process of its own") if rows else missing([TRANSCRIBE])
    return Item(
        "start-to-text",
        "Ours",
        "From the start of a process to its text, or to the clean file",
        verdict,
        Grid(columns, rows, ours=frozenset({4, 5, 6})),
    )


def peers(found: list[Record]) -> Item:
    """Other recognisers and ours on the same files."""
    heard = grouped(
        (r for r in found if r["kind"] == "bench" and r["what"] == "peers"), lambda r: (r["model"], r["data"])
    )
    rows: list[list[Cell]] = []
    for (model, data), some in heard.items():
        factor, memory = figure(some, "real_time_factor", 3), figure(some, "peak_mb", 0)
        rows.append([model, split_of(some[-1]) or data, figure(some, "wer"), factor, memory])
    columns = ("recogniser", "data", "WER %", "real-time factor", "peak MB")
    verdict = Verdict(OURS, "the same files in turn, each in a process of its own") if rows else missing([PEERS])
    grid = Grid(columns, rows, ours=frozenset({2, 3, 4}))
    return Item("peers", "Ours", "Beside other recognisers", verdict, grid)
