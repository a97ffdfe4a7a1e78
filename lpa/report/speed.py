"""The paper's tables and figures on what whole models cost (3, 5, 9, 10; Figures 3, 4) with ours beside them."""

from __future__ import annotations

from typing import NamedTuple

from . import paper
from .items import DIFFERENT, IMPOSSIBLE, OURS, REPRODUCED, Cell, Chart, Figure, Grid, Item, Line, Verdict, missing
from .measured import Record, figure, grouped, split_of

FRAMES_A_SECOND = 50
PULSES = 12
ALIKE = 0.25  # gains that differ by no more than this share are called the same
MODEL = "lpa bench model --record"
TRANSCRIBE = "lpa bench transcribe tests/data/librivox/austen-0880.flac --record"
PEERS = "lpa bench peers --data LibriSpeech/test-clean --model models/default --record"
SECONDS = "seconds of audio, log"


class Variant(NamedTuple):
    """A whole model as it was timed: what mixes in it, whose shape it has, what runs it and on which machine."""

    mixer: str
    model: str
    runtime: str
    machine: str


Times = dict[Variant, dict[float, Figure]]  # by seconds of audio


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


def variant_of(record: Record) -> Variant:
    _, model, runtime = (part.strip() for part in f"{record['what']},,".split(",", 2))
    runtime = runtime.strip(", ").removesuffix("wall clock").strip(", ")
    return Variant(record["model"], model, runtime, record["machine"])


def paper_shape(found: list[Record], name: str = "median_ms") -> dict[str, dict[float, Figure]]:
    """A figure of the model that the paper timed, by mixer: all its layers replaced, in fp32, where most was measured.

    Attention comes first, then lpa.
    """
    timed = whole_models(found, name)
    rows = {v: line for v, line in timed.items() if v.model == "wav2vec2-base" and "fp32" in v.runtime}
    places = grouped([{"variant": v} for v in rows], lambda r: (r["variant"].runtime, r["variant"].machine))

    def points(some: list[Record]) -> int:
        return sum(len(rows[r["variant"]]) for r in some)

    fullest = max(places.values(), key=points, default=[])
    mixers = {r["variant"].mixer: rows[r["variant"]] for r in fullest}
    return {n: mixers[n] for n in sorted(mixers, key=lambda n: (n != "attention", n != "lpa", n))}


def over_attention(found: list[Record]) -> dict[str, dict[float, Figure]]:
    """How many times as fast as with attention that model is, by what took its place."""
    return {n: line for n, line in paper_shape(found, "speedup").items() if n != "attention"}


def paper_machine(found: list[Record]) -> str:
    ids = [f.ids[0] for line in paper_shape(found).values() for f in line.values()]
    return next((f"{r['machine']}, {variant_of(r).runtime}" for r in found if ids and r["id"] == ids[0]), "")


def table_3(found: list[Record]) -> Item:
    """The paper's five configurations, and ours of the two that run here."""
    ours = paper_shape(found)
    attention, lpa = ours.get("attention", {}), ours.get("lpa", {})
    rows: list[list[Cell]] = []
    for s in sorted({*paper.SPEED, *attention, *lpa}):
        base, half, eight, twelve, mlx = paper.SPEED.get(int(s), (None,) * len(paper.SPEED_COLUMNS))
        gain = f"{paper.SPEEDUP_MLX[int(s)]:.2f}" if s in paper.SPEEDUP_MLX else None
        rows.append([f"{s:g}", base, attention.get(s), half, eight, twelve, lpa.get(s), mlx, gain])
    columns = (
        *("seconds", "paper, attention, fp32", "ours, attention, fp32", "paper, attention, fp16"),
        *("paper, 8/12 LPA, fp32", "paper, 12/12 LPA, fp32", "ours, 12/12 LPA, fp32"),
        *("paper, 8/12 LPA, MLX fp16", "paper, MLX fp16 over attention, fp16"),
    )
    grid = Grid(columns, rows, digits=0, ours=frozenset({2, 6}))
    title = "Time of whole models, ms"
    return Item("table-3", "Table 3", title, judge_speed(found), grid, notes=how_timed(found))


def how_timed(found: list[Record]) -> list[str]:
    """Where both were timed, and what of the paper's was not timed here, with the command that would."""
    lpa = paper_shape(found).get("lpa")
    if not lpa:
        return []
    place = f"The paper's on the GPU of an Apple M4 Pro, batch 1; ours on {paper_machine(found)}, in turn in one run."
    parts = [
        "8 of 12 layers (`lpa bench model RUN/model --record` would, of a conversion of 8, for “Whole models”)",
        "what is in fp16 or MLX (it takes an Apple GPU)",
    ]
    if lengths := [f"{s}" for s in paper.SPEED if s not in lpa]:
        command = f"lpa bench model --mixer lpa --seconds {','.join(lengths)} --record"
        parts.insert(0, f"{' and '.join(lengths)} s (`{command}` would)")
    return [place, f"Not measured here: {'; '.join(parts)}."]


def judge_speed(found: list[Record]) -> Verdict:
    """The gain of 12/12 in PyTorch over attention, both in fp32, at the lengths that the paper and we have measured."""
    gains = paper_shape(found, "speedup").get("lpa", {})
    both = [s for s in sorted(gains) if int(s) in paper.SPEEDUP_FP32]
    if not both:
        return missing([MODEL])
    pairs = {s: (gains[s].value, paper.SPEEDUP_FP32[int(s)]) for s in both}
    said = ", ".join(f"{ours:.2f} at {s:g} s (paper: {theirs:.2f})" for s, (ours, theirs) in pairs.items())
    said = f"with all 12 layers replaced, times as fast as attention, all in fp32: {said}"
    if len(both) > 1:
        grows = "grows with the recording in both" if gains[both[-1]].value > gains[both[0]].value else "does not grow"
        said += f"; the gain {grows}"
    if all(abs(ours / theirs - 1) <= ALIKE for ours, theirs in pairs.values()):
        return Verdict(REPRODUCED, said)
    return Verdict(DIFFERENT, said, why_speed(found, max(both)))


def why_speed(found: list[Record], long: float) -> str:
    """What limits the gain here: attention's share of the model's time, where the parts were timed."""
    attention, mixing = (paper_shape(found, name).get("attention", {}) for name in ("median_ms", "mixers_ms"))
    reasons = [f"ours ran on {paper_machine(found)}, the paper's on the GPU of an Apple M4 Pro"]
    if long in attention and long in mixing:
        share = mixing[long].value / attention[long].value
        reasons.append(
            f"of the model's time at {long:g} s attention takes {100 * share:.0f} % here, so that nothing in its place "
            f"could make it more than {1 / (1 - share):.1f} times as fast"
        )
    return "; ".join(reasons)


def table_9(found: list[Record]) -> Item:
    """What the paper's Table 9 has beside the times of Table 3: how many times as fast, over which attention."""
    gains = over_attention(found)
    names = list(gains)
    rows: list[list[Cell]] = []
    for s in sorted({*paper.SPEED, *(s for line in gains.values() for s in line)}):
        first, *others = [gains[n].get(s) for n in names] or [None]
        theirs = [table.get(int(s)) for table in (paper.SPEEDUP_MLX, paper.SPEEDUP_TORCH, paper.SPEEDUP_FP32)]
        rows.append([f"{s:g}", *theirs, first, *others])
    columns = (
        *("seconds", "paper, 8/12 LPA, MLX fp16 over fp16", "paper, 12/12 LPA, fp32 over fp16"),
        *("paper, 12/12 LPA, fp32 over fp32", *(f"ours, 12/12 {n}, fp32 over fp32" for n in names or ["lpa"])),
    )
    notes = [
        "Over attention in fp16 or in fp32. The paper tells the first alone; what it comes to over fp32 follows from "
        "its times, which are in Table 3."
    ]
    grid = Grid(columns, rows, ours=frozenset(range(4, len(columns))))
    notes += [*how_timed(found), "More models, runtimes and machines: “Whole models” above."] if names else []
    title = "Times as fast as attention, all configurations"
    return Item("table-9", "Table 9", title, judge_speed(found), grid, notes=notes)


def table_5(found: list[Record]) -> Item:
    rows: list[list[Cell]] = [
        [str(s), row[0], row[1], row[2], row[4], paper.SPEEDUP_MLX[s]] for s, row in paper.SPEED.items()
    ]
    columns = ("seconds", "attention, fp32", "attention, fp16", "8/12, PyTorch", "8/12, MLX", "times as fast")
    title = "The MLX path on an Apple GPU, ms"
    notes = ["All of the paper's. What ours take on other machines, in PyTorch and ONNX Runtime, is in Tables 3 and 9."]
    why = "it needs the GPU of an Apple M4 Pro, and no machine that measured for us has one"
    return Item("table-5", "Table 5", title, Verdict(IMPOSSIBLE, why=why), Grid(columns, rows), notes=notes)


def figure_3(found: list[Record]) -> Item:
    ours, gains = paper_shape(found), over_attention(found)
    times = [
        Line(f"paper, {name}", [(s, row[i]) for s, row in paper.SPEED.items()])
        for i, name in enumerate(paper.SPEED_COLUMNS)
    ]
    shown = [n for n in ("attention", "lpa", "ladder") if n in ours]
    times += [Line(f"ours, {n}, fp32", list(ours[n].items()), True) for n in shown]
    ratios = [
        Line("paper, 12/12 LPA, fp32 over fp32", list(paper.SPEEDUP_FP32.items())),
        Line("paper, 8/12 LPA, MLX fp16 over fp16", list(paper.SPEEDUP_MLX.items())),
        *(Line(f"ours, 12/12 {n}, fp32 over fp32", list(line.items()), True) for n, line in gains.items()),
    ]
    charts = [
        by_log("chart-speed", "wav2vec2-base: time against duration", "ms, log", times),
        Chart("chart-gain", "wav2vec2-base: gain against duration", SECONDS, "times", ratios, log_x=True),
        *built_in(found, "speed", "median_ms", "time", "ms, log"),
    ]
    if heard := from_start(found, "wall_s"):
        charts.append(by_log("chart-speed-start", "From start to text: time", "s, log", heard))
    return Item("figure-3", "Figure 3", "Speed against duration", judge_speed(found), charts=charts)


def by_log(id: str, title: str, unit: str, lines: list[Line]) -> Chart:
    """Something against the seconds of audio, both by powers of ten."""
    return Chart(id, title, SECONDS, unit, lines, log_x=True, log_y=True)


def built_in(found: list[Record], name: str, what: str, title: str, unit: str) -> list[Chart]:
    """The built-in model beside its twin with attention, for each runtime that was measured at several lengths."""
    lines = [
        Line(
            f"{'the model' if v.mixer == 'default' else v.mixer}, {v.runtime}", list(line.items()), v.mixer == "default"
        )
        for v, line in whole_models(found, what).items()
        if v.model == "default" and v.mixer in ("default", "attention") and len(line) > 1
    ]
    title = f"The built-in model: {title} against duration"
    return [by_log(f"chart-{name}-default", title, unit, lines)] if lines else []


def from_start(found: list[Record], name: str) -> list[Line]:
    """A figure of `lpa transcribe` against the length of the recording, a curve for each backend."""
    heard = {key: some for key, some in started(found).items() if key[0].startswith("transcribe")}
    lines = []
    for (what, model, machine), some in heard.items():
        points = {s: figure(at, name) for s, at in grouped(some, lambda r: r["figures"]["seconds"]).items()}
        said = f"{what.replace(', ', ' with ')}, {model}" + f", {machine}" * (len({m for *_, m in heard}) > 1)
        lines.append(Line(said, [(s, f) for s, f in sorted(points.items()) if f is not None], True))
    return lines


def scores_bytes(seconds: float) -> float:
    """One head's scores in float32."""
    return 4 * (FRAMES_A_SECOND * seconds) ** 2


def gates_bytes(seconds: float, pulses: int = PULSES) -> float:
    return 4 * FRAMES_A_SECOND * seconds * pulses


def table_10(found: list[Record]) -> Item:
    rows: list[list[Cell]] = []
    for s, (scores, gates, ratio) in paper.MEMORY.items():
        rows.append([str(s), f"{s * FRAMES_A_SECOND:,}", f"{scores:g}", f"{scores_bytes(s) / 2**20:.2f}"])
        rows[-1] += [f"{gates}", f"{gates_bytes(s) / 2**10:.1f}", f"{ratio}×"]
        rows[-1] += [f"{scores_bytes(s) / gates_bytes(s):.0f}×"]
    columns = (
        *("seconds", "frames", "scores, paper, MB", "computed", "gates, paper, KB", "computed"),
        *("ratio, paper", "computed"),
    )
    said = (
        "by arithmetic: four bytes for each of n² scores and of n · 12 gates, so that the ratio is n / 12. It counts "
    )
    said += "one head of twelve"
    grid = Grid(columns, rows, digits=0, ours=frozenset({3, 5, 7}))
    title = "Memory of scores and of gates in one layer"
    notes = ["MB of 1,048,576 bytes and KB of 1,024, as the paper has them. What whole models take is in Figure 4."]
    return Item("table-10", "Table 10", title, Verdict(REPRODUCED, said), grid, notes=notes)


def judge_memory(found: list[Record]) -> Verdict:
    """At the longest recording measured: whether a whole model takes less for its gates than for its attention."""
    peaks = paper_shape(found, "peak_mb")
    both = sorted(set(peaks.get("lpa", {})) & set(peaks.get("attention", {})))
    if not both:
        return missing([MODEL])
    s = both[-1]
    lpa, attention = peaks["lpa"][s].value, peaks["attention"][s].value
    said = (
        f"at {s:g} s all of wav2vec2-base takes {lpa:,.0f} MB at its peak with lpa and {attention:,.0f} with attention"
    )
    if lpa < attention:
        return Verdict(REPRODUCED, said)
    return Verdict(DIFFERENT, said, "fused attention stores no scores, so there is nothing for gates to save")


def figure_4(found: list[Record]) -> Item:
    seconds = (10, 30, 60, 120, 300, 600)
    peaks = paper_shape(found, "peak_mb")
    mb = 2**20
    counted = [
        Line("one head's scores, computed", [(s, scores_bytes(s) / mb) for s in seconds], True),
        Line("12 gates, computed", [(s, gates_bytes(s) / mb) for s in seconds], True),
        Line("paper, scores", [(s, scores) for s, (scores, _, _) in paper.MEMORY.items()]),
        Line("paper, gates", [(s, gates / 1024) for s, (_, gates, _) in paper.MEMORY.items()]),
    ]
    whole = [Line(f"ours, {n}", list(line.items()), True) for n, line in peaks.items()]
    charts = [
        by_log("chart-memory", "Scores and gates of one layer, by arithmetic", "MB, log", counted),
        by_log("chart-memory-whole", "wav2vec2-base: memory at its peak", "MB, log", whole),
        *built_in(found, "memory", "peak_mb", "memory", "MB, log"),
    ]
    if heard := from_start(found, "peak_mb"):
        charts.append(by_log("chart-memory-start", "From start to text: memory", "MB, log", heard))
    return Item("figure-4", "Figure 4", "Memory against duration", judge_memory(found), charts=charts)


def start_to_text(found: list[Record]) -> Item:
    """The command people type, start of the process included."""
    rows: list[list[Cell]] = []
    for (what, model, machine), some in started(found).items():
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


def started(found: list[Record]) -> dict[tuple[str, str, str], list[Record]]:
    heard = [r for r in found if r["kind"] == "bench" and r["what"].partition(",")[0] in ("transcribe", "enhance")]
    return grouped(heard, lambda r: (r["what"], r["model"], r["machine"]))


def twins(found: list[Record]) -> Item:
    """Whole models, times as fast as the same model with attention on the same runtime and machine."""
    gains = {v: line for v, line in whole_models(found, "speedup").items() if v.mixer != "attention"}
    seconds = sorted({s for line in gains.values() for s in line})
    rows: list[list[Cell]] = []
    for v, line in sorted(gains.items(), key=lambda pair: (pair[0].model, *pair[0])):
        mixer = "its own mixers" if v.mixer == v.model else v.mixer
        rows.append([v.model, mixer, v.runtime, v.machine, *(line.get(s) for s in seconds)])
    columns = ("model", "what took attention's place", "runtime", "machine", *(f"{s:g} s" for s in seconds))
    verdict = Verdict(OURS, "all layers replaced; both in turn in one run") if rows else missing([MODEL])
    grid = Grid(columns, rows, ours=frozenset(range(4, len(columns))))
    return Item("whole-models", "Ours", "Whole models, times as fast as with attention", verdict, grid)


def peers(found: list[Record]) -> Item:
    """Other recognisers and ours on the same files."""
    benched = [r for r in found if r["kind"] == "bench" and r["what"] == "peers"]
    heard = grouped(benched, lambda r: (r["data"], r["figures"].get("utterances"), r["machine"], r["model"]))
    rows: list[list[Cell]] = []
    for (data, utterances, machine, model), some in heard.items():
        factor, memory = figure(some, "real_time_factor", 3), figure(some, "peak_mb", 0)
        count = "" if utterances is None else f"{utterances:,}"
        rows.append([model, split_of(some[-1]) or data, count, figure(some, "wer"), factor, memory, machine])
    columns = ("recogniser", "data", "utterances", "WER %", "real-time factor", "peak MB", "machine")
    verdict = Verdict(OURS, "the same files in turn, each in a process of its own") if rows else missing([PEERS])
    grid = Grid(columns, rows, ours=frozenset({3, 4, 5}))
    return Item("peers", "Ours", "Beside other recognisers", verdict, grid)
