"""What was measured: the records of results/, checked and numbered, drawn together into figures. Knows no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import records
from ..convert.config import ConvertConfig
from ..errors import LpaError
from .items import Figure

Record = dict[str, Any]
DEFAULTS = ConvertConfig(model="any", held_out=("any",)).to_dict()
EPOCHS = ("warm_epochs", "settle_epochs", "align_epochs", "final_epochs")
SPREADS = {  # figures that come with their spread: where it is, and what
    "median_ms": ("low_ms", "high_ms", "quartiles"),
    "real_time_factor": ("low_factor", "high_factor", "quartiles"),
    "wer": ("wer_low", "wer_high", "95 %"),
}
SPLITS = ("dev-clean", "dev-other", "test-clean", "test-other")
# what differs between a conversion and its control, or does not decide how either was trained
UNMATCHED = (
    *("keep_attention", "order", "layers", "budget", "plan", "sweep", "sweep_settings", "allocate", "max_minutes"),
    *("seed", "model", "front_gb", "positions", "mixer", "mixer_config"),
)


def load(folder: Path | str) -> list[Record]:
    """Every record of FOLDER/*.jsonl with an `id`, file and line: bench-12. One that lacks what it takes is refused."""
    folder = Path(folder)
    if not folder.is_dir():
        raise LpaError(f"{folder} is not there; run this in a clone of the repository, or name --results")
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, record in enumerate(records.read(path), 1):
            if not isinstance(record["figures"], dict):
                raise LpaError(f"{path}:{number}: figures must be numbers by name; remove the line")
            found.append({**record, **whole_config(record), "id": f"{path.stem}-{number}"})
    return found


def whole_config(record: Record) -> dict[str, Any]:
    """The config of a conversion or its control, with the defaults of what was no setting yet when it was written."""
    config = record.get("config")
    return {"config": {**DEFAULTS, **config}} if record["kind"] in ("convert", "control", "evaluate") and config else {}


def figure(found: Iterable[Record], name: str, digits: int = 2) -> Figure | None:
    """One figure from records of one thing: of each seed the latest; of several seeds their mean and range."""
    latest: dict[Any, Record] = {}
    for record in sorted(found, key=lambda r: r["date"]):
        if isinstance(record["figures"].get(name), int | float):
            latest[record.get("seed")] = record
    if not latest:
        return None
    values = [r["figures"][name] for r in latest.values()]
    ids = tuple(r["id"] for r in latest.values())
    if len(values) > 1:
        return Figure(fmean(values), ids, min(values), max(values), f"{len(values)} seeds", digits)
    (record,) = latest.values()
    made = Figure(values[0], ids, digits=digits)
    if record.get("interval") and next(iter(record["figures"])) == name:
        low, high = record["interval"]
        return replace(made, low=low, high=high, spread="95 %")
    first, last, spread = SPREADS.get(name, ("", "", ""))
    low, high = (record["figures"].get(end) for end in (first, last))
    return made if low is None or high is None else replace(made, low=low, high=high, spread=spread)


def grouped(found: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Records by key, those without one left out, in the order they come."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in found:
        if (name := key(record)) is not None:
            groups[name].append(record)
    return dict(groups)


# --- what a record is of


def of_paper_model(record: Record) -> bool:
    """Whether a record is of a 12-layer wav2vec2, the shape of model the paper converts."""
    network = record.get("network") or {}
    return network.get("layers", 12) == 12 and "wav2vec2" in f"{network.get('family', '')} {record['model']}"


def split_of(record: Record) -> str | None:
    """The part of LibriSpeech that the data's path names."""
    return next((split for split in SPLITS if split in record.get("data", "")), None)


def base_name(record: Record) -> str:
    """The name of the model that was converted, or of the model itself: its folder's, or its run's."""
    source = (record.get("config") or {}).get("model") or record["model"]
    return source.removesuffix("/model") if source.endswith("/model") else Path(source).name or source


def full_name(record: Record) -> str:
    """A model in words: what it was made of and how, or where it is."""
    name = series(record["config"]) if record.get("config") else None
    return f"{base_name(record)}, {name}" if name else record["model"].removesuffix("/model")


def ablation_row(config: dict[str, Any]) -> int | None:
    """Which row of the cumulative ablation a conversion is: as many techniques as are on, if all before it are on."""
    if (
        config.get("minutes")
        or config["mixer"] != "lpa"
        or config["keep_attention"]
        or config["kl_weight"]
        or config["hidden_weight"]
    ):
        return None
    if not config["progressive"] or not config["settle_epochs"] or config["final_tau"]:
        return None
    if config["order"] not in ("sweep", "depth"):
        return None
    mixer = config["mixer_config"]
    on = (
        mixer.get("selective_init", True) and config["norms"] > 0,
        config["align_epochs"] > 0,
        config["ffn"] > 0,
        config["tau"][0] != config["tau"][1],
        mixer.get("periodic", 4) > 0 and mixer.get("positional", 4) > 0,
        mixer.get("skip", True) and mixer.get("heads", 4) > 1,
        config["order"] == "sweep",
    )
    count = sum(on)
    return count if all(on[:count]) else None


def series(config: dict[str, Any]) -> str | None:
    """What a conversion's curve is called; None for the rows of the ablation that have a table of their own."""
    row = ablation_row(config)
    if row is not None and row not in (0, 6, 7):
        return None
    parts = ["lpa" if row == 0 else mixers_of(config)]
    if config["keep_attention"]:
        parts = ["attention kept (control)"]
    elif not any(config[name] for name in EPOCHS):
        return f"{parts[0]}, not trained"
    if distilled(config):
        parts.append("distilled")
    if row == 0:
        parts.append("naive")
    elif config["progressive"] and not config["keep_attention"]:
        parts.append(f"{config['order']} order")
    if config["final_tau"]:
        parts.append("hardened")
    if not config["positions"]:
        parts.append("no positions")
    if config["minutes"]:
        parts.append(f"{config['minutes']:g} min")
    elif config["progressive"]:
        epochs = config["settle_epochs"]
        parts.append(f"{epochs:g} epoch{'' if epochs == 1 else 's'} a layer")
    return ", ".join(parts)


def mixers_of(config: dict[str, Any]) -> str:
    """`pyramid`, `pyramid of 64 windows`, `window side=16`; where layers differ, `pyramid and window` or who chose."""
    if config["plan"]:
        return "the planner's choice"
    if "," in config["mixer"]:
        return " and ".join(sorted({name.strip() for name in config["mixer"].split(",")}))
    settings = dict(config["mixer_config"])
    name = config["mixer"]
    if {"block", "pieces", "steps"} <= set(settings):
        sides = len(settings.pop("pieces")) + len(settings.pop("steps"))
        name += f" of {settings.pop('block') + 2 * sides} windows"
    return " ".join([name, *(f"{k}={v}" for k, v in sorted(settings.items()))])


def distilled(config: dict[str, Any]) -> bool:
    return bool(config["kl_weight"] or config["hidden_weight"])


def curves(found: Iterable[Record]) -> dict[str, dict[int, Figure]]:
    """WER by replaced layers, for each series of conversions and controls."""
    steps = [
        r for r in found if r["kind"] in ("convert", "control") and r["what"].startswith("step") and r.get("config")
    ]
    made: dict[str, dict[int, Figure]] = {}
    for name, rows in grouped(steps, lambda r: series(r["config"])).items():
        by_layers = grouped(rows, lambda r: r["figures"].get("layers"))
        points = {layers: figure(some, "wer") for layers, some in sorted(by_layers.items())}
        made[name] = {layers: f for layers, f in points.items() if f is not None}
    return made


def tested_curves(found: Iterable[Record]) -> dict[str, dict[int, Figure]]:
    """The same on test-clean: of the models that conversions kept on their way, step by step."""
    steps = [
        r
        for r in found
        if r["kind"] == "evaluate" and r.get("config") and as_it_is(r) and split_of(r) == "test-clean"
        if "/step-" in r["model"] and "wer" in r["figures"]
    ]
    made: dict[str, dict[int, Figure]] = {}
    for name, rows in grouped(steps, lambda r: series(r["config"])).items():
        points = {n: figure(some, "wer") for n, some in sorted(grouped(rows, layers_of).items())}
        made[name] = {n: f for n, f in points.items() if f is not None}
    return made


@dataclass(frozen=True)
class Result:
    """What a finished conversion came to, on test-clean and on held-out speakers, each beside its control."""

    model: str
    name: str
    layers: int
    of: int | None
    training: str  # how long
    date: str  # of the last record
    tested: Figure | None
    tested_control: Figure | None
    held: Figure | None
    held_control: Figure | None


def results(found: Iterable[Record]) -> list[Result]:
    """Every finished conversion that has a figure, seeds drawn together."""
    whole = [r for r in found if r.get("config") and "wer" in r["figures"]]
    tested = [r for r in whole if r["kind"] == "evaluate" and split_of(r) == "test-clean" and as_it_is(r)]
    tested = [r for r in tested if "/step-" not in r["model"]]
    held = [r for r in whole if r["kind"] in ("convert", "control") and r["what"] == "final"]
    made = []
    keys = dict.fromkeys(training_key(r) for r in [*tested, *held] if not r["config"]["keep_attention"])
    for key in keys:
        kinds = []
        for rows in (tested, held):
            alike = [r for r in rows if training_key(r)[1:] == key[1:]]
            kinds.append(figure((r for r in alike if training_key(r)[0] == key[0]), "wer"))
            kinds.append(figure((r for r in alike if r["config"]["keep_attention"]), "wer"))
        record = next(r for r in [*held, *tested] if training_key(r) == key)
        name = series(record["config"])
        if name is not None:
            of = (record.get("network") or {}).get("layers")
            date = max(r["date"] for r in [*held, *tested] if training_key(r) == key)
            made.append(Result(base_name(record), name, layers_of(record), of, training(record), date, *kinds))
    return sorted(made, key=lambda r: (r.model, r.layers, r.name))


def training(record: Record) -> str:
    """How long a conversion trained: `676 steps of 100 s`."""
    steps = record["figures"].get("training_steps")
    return f"{steps:,} steps of {record['config']['batch_seconds']:g} s" if steps else "none" if steps == 0 else ""


def training_key(record: Record) -> tuple[str, str, int, str]:
    """What a conversion and its control share, but for the first: the model, the number of layers, the training."""
    config = record["config"]
    shared = {k: v for k, v in config.items() if k not in UNMATCHED}
    order = config["order"] if config["progressive"] else ""
    own = (order, config["plan"], config["positions"], config["mixer"], sorted(config["mixer_config"].items()))
    return (
        "control" if config["keep_attention"] else repr(own),
        base_name(record),
        layers_of(record),
        repr(sorted(shared.items())),
    )


def layers_of(record: Record) -> int:
    """Layers that a conversion replaced, or that its control trained in their place."""
    if "layers" in record["figures"]:
        return record["figures"]["layers"]
    config = record["config"]
    return len(config["order"].split(",")) if config["keep_attention"] else record["network"]["replaced"]


def as_it_is(record: Record) -> bool:
    """Utterances one by one, gates as they were trained, as far ahead as it looks."""
    return "seconds" not in record["figures"] and record.get("tau") is None and record.get("latency") is None


def enhanced(found: Iterable[Record]) -> dict[str, dict[int, Figure]]:
    """SI-SNRi by replaced layers, for each mixer, in Gaussian noise. The model that was converted starts its curves."""
    rows = [r for r in found if r["kind"] == "evaluate" and "si_snri" in r["figures"]]
    rows = [r for r in rows if r.get("noise", "gaussian") == "gaussian"]
    made = {}
    for base, of_one in grouped(rows, started_from).items():
        start = [r for r in of_one if not replaced_layers(r) or r["model"] == (r.get("config") or {}).get("model")]
        begun = "" if 0 in map(replaced_layers, start) else f", from {base}"
        for name, some in grouped((r for r in of_one if r not in start), enhancement_series).items():
            by_layers = sorted(grouped([*some, *start], replaced_layers).items())
            made[name + begun] = {k: f for k, rows in by_layers if (f := figure(rows, "si_snri")) is not None}
    return made


def started_from(record: Record) -> str:
    return base_name(record) if record.get("config") else ""


def replaced_layers(record: Record) -> int | None:
    return record["figures"].get("layers", (record.get("network") or {}).get("replaced"))


def enhancement_series(record: Record) -> str:
    """The mixers of a model that enhances, or the control."""
    if (record.get("config") or {}).get("keep_attention"):
        return "attention kept (control)"
    return " and ".join((record.get("network") or {}).get("mixers", []))
