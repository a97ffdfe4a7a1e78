"""Speech enhancement: the paper's Table 2, its half of Table 4, and what became of our SepFormer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from . import paper
from .conversions import KEPT
from .items import DIFFERENT, OURS, REPRODUCED, Cell, Chart, Figure, Grid, Item, Line, Verdict, gap, missing, signed
from .measured import Record, base_name, figure, grouped

CONVERT = (
    "lpa convert models/sepformer --data LibriSpeech/dev-clean --out runs/sepformer "
    "--recipe recipes/sepformer-convert.toml --mixer lpa --record"
)
EVALUATE = "lpa evaluate --model runs/sepformer/model --data LibriSpeech/test-clean --noise babble --record"
INTRA_DB, ALL_DB = 0.3, 1.0  # below the control, as aimed at with the layers within chunks replaced, and with all
WITHIN = "layers within chunks"


class Series(NamedTuple):
    """A series of enhancement models: what takes attention's place, and the converted model it went on from."""

    mixers: str
    base: str = ""  # empty: it began with attention everywhere


Curves = dict[Series, dict[int, Figure]]  # SI-SNRi by replaced layers


def enhanced(found: Iterable[Record]) -> Curves:
    """SI-SNRi in Gaussian noise. The model that was converted starts every curve."""
    rows = [r for r in found if r["kind"] == "evaluate" and "si_snri" in r["figures"]]
    rows = [r for r in rows if r.get("noise", "gaussian") == "gaussian"]
    made = {}
    for base, of_one in grouped(rows, lambda r: base_name(r) if r.get("config") else "").items():
        start = [r for r in of_one if not replaced_layers(r) or r["model"] == (r.get("config") or {}).get("model")]
        went_on = "" if 0 in map(replaced_layers, start) else base
        for mixers, some in grouped((r for r in of_one if r not in start), mixers_of).items():
            by_layers = sorted(grouped([*some, *start], replaced_layers).items())
            line = {layers: f for layers, rows in by_layers if (f := figure(rows, "si_snri")) is not None}
            made[Series(mixers, went_on)] = line
    return made


def within_chunks(lines: Curves) -> dict[str, dict[int, Figure]]:
    """Of the models that began with attention everywhere, by mixer."""
    return {series.mixers: line for series, line in lines.items() if not series.base}


def replaced_layers(record: Record) -> int | None:
    return record["figures"].get("layers", (record.get("network") or {}).get("replaced"))


def mixers_of(record: Record) -> str:
    """The mixers of a model that enhances, or the control."""
    if (record.get("config") or {}).get("keep_attention"):
        return KEPT
    return " and ".join((record.get("network") or {}).get("mixers", [])) or "attention"


def table_2(found: list[Record]) -> Item:
    lines = enhanced(found)
    intra = within_chunks(lines)
    names = sorted(intra, key=lambda n: (n != "lpa", n == KEPT, n))
    lpa = intra.get("lpa", {})
    rows: list[list[Cell]] = []
    for n in sorted({*paper.SEPFORMER, *(n for line in intra.values() for n in line)}):
        theirs = paper.SEPFORMER.get(n)
        change = signed(theirs - paper.SEPFORMER[0]) if theirs is not None and n else None
        own = gap(lpa.get(n), lpa.get(0)) if n else None
        rows.append([n, theirs, change, lpa.get(n), own, *(intra[name].get(n) for name in names if name != "lpa")])
    others = [f"ours, {name}" for name in names if name != "lpa"]
    columns = ("layers replaced", "paper, lpa, dB", "Δ", "ours, lpa, dB", "Δ", *others)
    axes = ("layers within chunks replaced", "SI-SNRi, dB")
    mine = [Line(f"ours, {name}", list(intra[name].items()), ours=True) for name in names]
    theirs_lines = [
        Line("paper, lpa", list(paper.SEPFORMER.items())),
        Line("paper, attention trained on for as long (control)", [(16, paper.SEPFORMER_CONTROL)]),
    ]
    charts = [
        Chart("chart-sepformer", "Ours: speech enhancement", *axes, mine, zero=False),
        Chart("chart-sepformer-paper", "The paper's: speech enhancement", *axes, theirs_lines, zero=False),
    ]
    notes = [
        "The control is the same model, trained on for as long with attention left in. The paper's reaches 11.34 dB: "
        "it had not heard this noise before. The paper has 16 layers within chunks of sound and keeps the 16 across "
        "them. Our SepFormer, of 3.3 M parameters, has 8 of each. What becomes of it with all 16 replaced is under "
        "“Enhancement models”.",
        "Mind the axes: ours spans less than 1 dB, the paper's more than 5.",
    ]
    verdict, *also = judge(lines)
    grid = Grid(columns, rows, ours=frozenset(range(3, len(columns))))
    title = "SepFormer: all attention within chunks replaced"
    return Item("table-2", "Table 2", title, verdict, grid, charts, notes, also)


def judge(lines: Curves) -> list[Verdict]:
    """Ours beside the same training with attention: the layers within chunks, then all of them."""
    intra = within_chunks(lines)
    lpa, control = intra.get("lpa", {}), intra.get(KEPT, {})
    if 0 not in lpa or len(lpa) < 2:
        return [missing([CONVERT])]
    last = max(lpa)
    beside, whose = (control[last], "its control") if last in control else (lpa[0], "the start")
    lost = {n: beside.value - line[last].value for n, line in intra.items() if last in line and n != KEPT}
    best = min(lost, key=lambda n: lost[n])
    theirs = paper.SEPFORMER_CONTROL - paper.SEPFORMER[16]
    said = f"with all {last} replaced LPA ends {lost['lpa']:.2f} dB below {whose} ({theirs:.2f} in the paper)"
    if best != "lpa":
        said += f", {best} {lost[best]:.2f}"
    reached = [n for n in sorted(lost, key=lambda n: lost[n]) if lost[n] <= INTRA_DB]
    said += f"; within {INTRA_DB} dB, as aimed at: {', '.join(reached) or 'none'}"
    if lost["lpa"] > theirs:
        return [Verdict(DIFFERENT, said, "ours collapses", WITHIN), *judge_all(lines)]
    return [Verdict(REPRODUCED, f"no collapse: {said}", of=WITHIN), *judge_all(lines)]


def judge_all(lines: Curves) -> list[Verdict]:
    """What it costs to replace the layers across chunks as well, which the paper keeps."""
    ends = []
    for series, line in lines.items():
        layers = max(line)
        control = lines.get(Series(KEPT, series.base), {}).get(layers)
        if series.base and series.mixers != KEPT and control is not None:
            ends.append((control.value - line[layers].value, layers, series.mixers))
    if not ends:
        return []
    lost, layers, mixers = min(ends)
    aim = f"{'within' if lost <= ALL_DB else 'not within'} the {ALL_DB:g} dB aimed at"
    said = (
        f"all {layers} replaced by {mixers} end {lost:.2f} dB below their control, {aim}; the paper keeps these layers"
    )
    return [Verdict(OURS, said, of="layers across chunks too")]


def judge_summary(lpa: dict[int, Figure], summary: dict[int, Figure]) -> list[Verdict]:
    """The half of Table 4 that is cleaned: the paper has SummaryMixing ahead at every depth."""
    leads = {n: lpa[n].value - summary[n].value for n in sorted(set(lpa) & set(summary) - {0})}
    if not leads:
        return []
    half, ahead = "speech enhancement", sum(lead < 0 for lead in leads.values())
    said = f"SummaryMixing is ahead at {ahead} of {len(leads)} depths (paper: at every one, by 0.70 to 1.11 dB)"
    if max(leads.values()) > 0:
        said += f", LPA at the others by up to {max(leads.values()):.2f} dB"
    if ahead == len(leads):
        return [Verdict(REPRODUCED, said, of=half)]
    moved = max(abs(line[n].value - line[0].value) for line in (lpa, summary) for n in line if n < max(line) - 1)
    why = "the paper's model had not heard this noise and gains 3 dB by hearing it, of which SummaryMixing takes more; "
    why += f"ours was trained on it, and before its last two layers go neither moves it by more than {moved:.1f} dB"
    return [Verdict(DIFFERENT, said, why, half)]


def enhancement(found: list[Record]) -> Item:
    """What became of the enhancement model as more of its attention went, each beside its control."""
    lines = enhanced(found)
    rated = [r for r in found if r["kind"] == "evaluate" and "si_snri" in r["figures"] and r.get("noise") == "white"]
    by_model = grouped(rated, lambda r: r["model"])
    model_of = {record["id"]: record["model"] for record in found}
    rows: list[list[Cell]] = []

    def row(name: str, where: str, heard: Figure, control: Figure | None = None) -> None:
        clean = by_model.get(model_of[heard.ids[0]], [])
        rows.append([name, where, heard, control, gap(heard, control), figure(clean, "pesq"), figure(clean, "stoi")])

    start = next((line[0] for line in within_chunks(lines).values() if 0 in line), None)
    if start:
        row("attention, as it was", "none", start)

    def place(series: Series) -> tuple[str, bool, float]:
        """Those that went on from another after it, the control before what it controls, then the best first."""
        return series.base, series.mixers != KEPT, -lines[series][max(lines[series])].value

    for series in sorted(lines, key=place):
        line = lines[series]
        layers, first = max(line), min(line)
        where = f"all {layers}" if series.base else f"the {layers} within chunks"
        if series.mixers == KEPT:
            kept = "attention across chunks" if series.base else "attention"
            row(f"{kept}, trained on (control)", f"the {first} within chunks" if series.base else "none", line[layers])
        else:
            row(series.mixers, where, line[layers], lines.get(Series(KEPT, series.base), {}).get(layers))
    columns = ("what took attention's place", "layers replaced", "SI-SNRi, dB", "control", "dB", "PESQ", "STOI")
    plain = [r for r in found if r["kind"] == "evaluate" and "si_snri" in r["figures"] and not r.get("noise")]
    said = f"{utterances(plain)}test-clean in Gaussian noise at 5 dB; PESQ (1 to 4.6) and STOI (0 to 1) on "
    said += f"{utterances(rated)}it in white noise; of all three, more is better"
    verdict = Verdict(OURS, said) if rows else missing([CONVERT])
    grid = Grid(columns, rows, ours=frozenset(range(2, 7)))
    notes = ["Rows of one control were trained for as long as each other, and only these compare."] if rows else []
    return Item("enhancement", "Ours", "Enhancement models", verdict, grid, notes=notes)


def utterances(found: Iterable[Record]) -> str:
    """`100 utterances of `, where all records say the same."""
    counts = {r["figures"].get("utterances") for r in found}
    return f"{counts.pop()} utterances of " if len(counts) == 1 and None not in counts else ""


def cleaned(found: list[Record]) -> Item:
    """What the enhancement models do for speech in noise, by every measure there is."""
    asked = [r for r in found if r["kind"] == "evaluate" and "si_snri" in r["figures"] and r.get("noise")]
    rows: list[list[Cell]] = []
    for (model, noise), some in grouped(asked, lambda r: (r["model"].removesuffix("/model"), r["noise"])).items():
        heard = [figure(some, name) for name in ("si_snri", "pesq", "pesq_noisy", "stoi", "stoi_noisy")]
        rows.append([model, mixers_of(some[-1]), noise, *heard])
    verdict = Verdict(OURS, "noise at 5 dB, speakers nobody trained on") if rows else missing([EVALUATE])
    columns = ("model", "mixers", "noise", "SI-SNRi, dB", "PESQ", "of the noisy", "STOI", "of the noisy")
    grid = Grid(columns, rows, ours=frozenset(range(3, 8)))
    return Item("cleaned", "Ours", "Noise taken out of speech", verdict, grid)
