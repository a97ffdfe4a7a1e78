"""Records of conversions and their controls, drawn together: what each is called, its curve, what came of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from ..convert.config import settings_of
from ..convert.order import arrange
from ..errors import LpaError
from ..recipe import TrainConfig
from .items import Figure
from .measured import Record, as_it_is, base_name, figure, grouped, split_of

CONTROL, KEPT = "control", "attention kept (control)"
EPOCHS = ("warm_epochs", "settle_epochs", "align_epochs", "final_epochs")
# what differs between a conversion and its control, or does not decide how either was trained
UNMATCHED = (
    *("keep_attention", "order", "layers", "budget", "plan", "sweep", "sweep_settings", "allocate", "max_minutes"),
    *("seed", "model", "front_gb", "positions", "mixer", "mixer_config"),
)
FREE = {f.name for f in fields(TrainConfig) if f.metadata["free"]}  # how a training ran, not what came of it
SIDE, WINDOWS = 64, 32  # frames either side that `window` looks at, and windows of a `pyramid`, where nothing is said
ORDERS = {
    "sweep": "easiest layers first",
    "kl": "by KL, easiest layers first",
    "depth": "first layers first",
    "reverse": "last layers first",
}


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
        parts = [KEPT]
    elif not trained(config):
        return f"{parts[0]}, not trained" + ("" if config["positions"] else ", no positions")
    if distilled(config):
        parts.append("distilled")
    elif row == 0:
        parts.append("replaced naively")
    elif config["progressive"]:
        parts.append("paper's recipe")
    if config["progressive"] and row != 0 and not config["keep_attention"]:
        parts.append(order_of(config))
    if config["final_tau"]:
        parts.append("gates hardened at the end")
    if not config["positions"]:
        parts.append("no positions")
    if config["minutes"]:
        parts.append(f"{config['minutes']:g} min")
    return ", ".join(parts)


def order_of(config: dict[str, Any]) -> str:
    """In which order layers were replaced, in words."""
    order = config["order"]
    return ORDERS.get(order) or ("layers at random" if order.startswith("random") else f"layers {order}")


def mixers_of(config: dict[str, Any]) -> str:
    """`pyramid of 64 windows`, `window ±16`, `lpa`; where layers differ, `pyramid and window` or who chose."""
    if config["plan"]:
        return "the planner's choice"
    if "," in config["mixer"]:
        return " and ".join(sorted({name.strip() for name in config["mixer"].split(",")}))
    return mixer_said(config["mixer"], config["mixer_config"])


def mixer_said(name: str, settings: dict[str, Any]) -> str:
    settings = settings_of(name, settings)
    if name == "window":
        name += f" ±{settings.pop('side', SIDE)}"
    elif {"block", "pieces", "steps"} <= set(settings):
        sides = len(settings.pop("pieces")) + len(settings.pop("steps"))
        name += f" of {settings.pop('block') + 2 * sides} windows"
    elif name == "pyramid" and not settings:
        name += f" of {WINDOWS} windows"
    return " ".join([name, *(f"{k}={v}" for k, v in sorted(settings.items()))])


def distilled(config: dict[str, Any]) -> bool:
    return bool(config["kl_weight"] or config["hidden_weight"])


def lengths(config: dict[str, Any]) -> tuple[float, ...]:
    """What decides for how long a conversion trained."""
    return (*(config[name] for name in EPOCHS), config["minutes"], config["batch_seconds"])


def steps_a_layer(found: Iterable[Record]) -> dict[tuple[float, ...], float]:
    """For each length of a training layer by layer, the steps that a layer had, by finished conversions."""
    finals = [r for r in found if r["kind"] == "convert" and r["what"] == "final" and r.get("config")]
    finals = [r for r in finals if r["config"]["progressive"] and r["figures"].get("training_steps")]
    steps = grouped(finals, lambda r: lengths(r["config"]))
    return {
        k: fmean(r["figures"]["training_steps"] / r["figures"]["layers"] for r in rows) for k, rows in steps.items()
    }


def curve_name(record: Record, steps: dict[tuple[float, ...], float]) -> str | None:
    """A series, and where its layers were replaced one by one the training that each had."""
    config = record["config"]
    name, length = series(config), lengths(config)
    if name is None or not config["progressive"] or config["minutes"]:
        return name
    if length in steps:
        return f"{name}, {steps[length]:.0f} steps of {config['batch_seconds']:g} s a layer"
    epochs = config["settle_epochs"]
    return f"{name}, {epochs:g} epoch{'' if epochs == 1 else 's'} a layer"


def hours_a_layer(found: Iterable[Record]) -> dict[str, float]:
    """For each curve made layer by layer, the hours of speech that a layer trained on."""
    found = list(found)
    steps = steps_a_layer(found)
    rows = [r for r in found if r["kind"] == "convert" and r.get("config") and lengths(r["config"]) in steps]
    made = {curve_name(r, steps): steps[lengths(r["config"])] * r["config"]["batch_seconds"] / 3600 for r in rows}
    return {name: hours for name, hours in made.items() if name is not None}


def curves(found: Iterable[Record]) -> dict[str, dict[int, Figure]]:
    """WER by replaced layers, for each series of conversions and controls."""
    found = list(found)
    rows = [r for r in found if r["kind"] in ("convert", "control") and r["what"].startswith("step")]
    return by_depth([r for r in rows if r.get("config")], steps_a_layer(found))


def tested_curves(found: Iterable[Record]) -> dict[str, dict[int, Figure]]:
    """The same on test-clean: of the models that conversions kept on their way, step by step."""
    found = list(found)
    rows = [r for r in found if r["kind"] == "evaluate" and r.get("config") and as_it_is(r)]
    rows = [r for r in rows if split_of(r) == "test-clean" and "/step-" in r["model"]]
    return by_depth(rows, steps_a_layer(found))


def by_depth(rows: list[Record], steps: dict[tuple[float, ...], float]) -> dict[str, dict[int, Figure]]:
    made: dict[str, dict[int, Figure]] = {}
    for name, several in grouped(rows, lambda r: curve_name(r, steps)).items():
        some = one_training(several)
        points: dict[int, Figure | None] = {}
        for layers, alike in sorted(grouped(some, step_of).items()):
            # before the first step the model is the same for every seed
            once = alike if layers else [max(alike, key=lambda r: r["date"])]
            points[layers] = figure(once, "wer")
        made[name] = {layers: f for layers, f in points.items() if f is not None}
    return made


def one_training(rows: list[Record]) -> list[Record]:
    """Of what has one name but several trainings: that of the most depths, then the most seeds, the latest."""

    def worth(alike: list[Record]) -> tuple[int, int, str]:
        return len(set(map(step_of, alike))), len({r["seed"] for r in alike}), max(r["date"] for r in alike)

    return max(grouped(rows, lambda r: training_key(r)[3]).values(), key=worth)


def step_of(record: Record) -> int | None:
    """Layers replaced, or trained in their place, when a step was over."""
    folder = Path(record["model"]).parent.name
    if record["kind"] == "evaluate" and folder.startswith("step-") and record["config"]["progressive"]:
        return int(folder.removeprefix("step-"))
    return record["figures"]["layers"] if "layers" in record["figures"] else layers_of(record)


Key = tuple[str, str, int, str]


@dataclass(frozen=True)
class Result:
    """What a finished conversion came to, on test-clean and on held-out speakers, each beside its control."""

    model: str
    name: str
    mixer: str  # what took attention's place, whatever its size
    layers: int
    of: int | None
    training: str  # how long; of what had none the control is the model it began with
    minutes: float  # that it trained for by the clock; 0 where that did not decide
    hours: float  # of speech that it trained on, some of it more than once
    date: str  # of the last record
    key: Key  # what else was trained so has it, too
    tested: Figure | None
    tested_control: Figure | None
    held: Figure | None
    held_control: Figure | None

    def budget(self) -> float:
        """The hours to two digits: trainings of one length differ by a step or two."""
        return float(f"{self.hours:.2g}")


def results(found: Iterable[Record]) -> list[Result]:
    """Every finished conversion that has a figure, seeds drawn together."""
    found = list(found)
    whole = [r for r in found if r.get("config") and "wer" in r["figures"]]
    heard = [r for r in whole if r["kind"] == "evaluate" and split_of(r) == "test-clean" and as_it_is(r)]
    tested = grouped((r for r in heard if "/step-" not in r["model"]), training_key)
    finals = [r for r in whole if r["kind"] in ("convert", "control") and r["what"] == "final"]
    held = grouped(finals, training_key)
    swept = sweeps(found)
    made = []
    for key in {**tested, **held}:
        own = [*held.get(key, []), *tested.get(key, [])]
        first, config = own[0], own[0]["config"]
        name = series(config)
        if name is None or config["keep_attention"]:
            continue
        pairs = []
        for rows in (tested, held):
            if trained(config):
                beside = controls_of(first, rows.get((CONTROL, *key[1:]), []), swept)
            else:
                beside = untouched(first, found, rows is tested)
            both = (rows.get(key, []), beside)
            pairs.append(tuple(figure(some if rows is tested else on_all(some), "wer") for some in both))
        result = Result(
            model=base_name(first),
            name=name,
            mixer=mixers_of(config) if config["plan"] or "," in config["mixer"] else config["mixer"],
            layers=layers_of(first),
            of=(first.get("network") or {}).get("layers"),
            training=training(own),
            minutes=config["minutes"],
            hours=max(r["figures"].get("training_steps", 0) for r in own) * config["batch_seconds"] / 3600,
            date=max(r["date"] for r in own),
            key=key,
            tested=pairs[0][0],
            tested_control=pairs[0][1],
            held=pairs[1][0],
            held_control=pairs[1][1],
        )
        made.append(result)
    return sorted(made, key=lambda r: (r.model, r.layers, r.name, r.date))


def on_all(found: Iterable[Record]) -> list[Record]:
    """Those of what was measured on all held-out utterances: a part of them compares with no other figure."""
    return [r for r in found if not (r.get("config") or {}).get("train", {}).get("held_out_limit")]


def trained(config: dict[str, Any]) -> bool:
    """Whether a conversion trained at all, or left the mixers as they were made."""
    return any(config[name] for name in EPOCHS)


def training(rows: list[Record]) -> str:
    """How long a conversion trained, its seeds together: `674–676 steps of 100 s`."""
    config = rows[0]["config"]
    clock = f"{config['minutes']:g} min" if config["minutes"] else ""
    steps = sorted({r["figures"]["training_steps"] for r in rows if r["figures"].get("training_steps")})
    if not steps:
        return clock if trained(config) else "none"
    count = f"{steps[0]:,}–{steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"
    return f"{clock}{': ' if clock else ''}{count} steps of {config['batch_seconds']:g} s"


def untouched(record: Record, found: list[Record], tested: bool) -> list[Record]:
    """The latest record of the model that a conversion began with: where nothing was trained, that is its control."""
    if tested:
        rows = [r for r in found if r["kind"] == "evaluate" and as_it_is(r) and not r.get("config")]
        rows = [r for r in rows if split_of(r) == "test-clean" and base_name(r) == base_name(record)]
        rows = [r for r in rows if (r.get("network") or {}).get("replaced") == 0]
    else:
        rows = [r for r in found if r["kind"] == "convert" and r["what"] == "step 0" and r.get("config")]
        rows = [r for r in rows if training_key(r)[1::2] == training_key(record)[1::2] and "wer" in r["figures"]]
    return [{**max(rows, key=lambda r: r["date"]), "seed": None}] if rows else []


def sweeps(found: list[Record]) -> dict[str, dict[int, dict[str, Any]]]:
    """The latest sweep of each model and mixer: the figures of its layers."""
    made: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for r in sorted((r for r in found if r["kind"] == "sweep" and "layer" in r["figures"]), key=lambda r: r["date"]):
        made[f"{Path(r['model']).name}, {(r.get('config') or {}).get('mixer')}"][r["figures"]["layer"]] = r["figures"]
    return made


def controls_of(record: Record, controls: list[Record], swept: dict[str, dict[int, dict[str, Any]]]) -> list[Record]:
    """Of controls trained alike those that trained the same layers; where there are none, as many others."""
    config, of = record["config"], (record.get("network") or {}).get("layers") or 0
    try:
        order = arrange(config["order"], of, swept.get(f"{base_name(record)}, {config['mixer']}"))
    except LpaError:  # no sweep is recorded for it
        return controls
    same = [r for r in controls if set(map(int, r["config"]["order"].split(","))) == set(order[: layers_of(record)])]
    return same or controls


def training_key(record: Record) -> Key:
    """What a conversion and its control share, but for the first: the model, the number of layers, the training."""
    config = record["config"]
    shared = {k: v for k, v in config.items() if k not in UNMATCHED}
    shared["train"] = {k: v for k, v in config["train"].items() if k not in FREE}
    order = config["order"] if config["progressive"] else ""
    own = (order, config["plan"], config["positions"], config["mixer"], sorted(config["mixer_config"].items()))
    return (
        CONTROL if config["keep_attention"] else repr(own),
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
