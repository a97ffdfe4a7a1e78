"""ConvertConfig and SweepConfig: what decides a conversion and a sweep; the recipes paper, best and none. No torch."""

# ruff: noqa: RUF009 (`option` gives a dataclass field, not a shared default)

from __future__ import annotations

import copy
import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LpaError, choose
from ..journal import whole_file
from ..recipe import Pair, TrainConfig, from_plain, option, put

DECIDED = (  # settings of the training loop that are the conversion's own
    *("model", "family", "model_config", "sources", "held_out", "teacher", "out", "paths", "seed", "steps", "lr"),
    *("lr_scale", "warmup", "batch_seconds", "ctc_weight", "kl_weight", "hidden_weight", "temperature"),
    *("eval_every", "minutes", "max_minutes"),
)
# what a plan decides, so that it cannot be asked for beside one
PLANNED = ("layers", "order", "mixer", "mixer_config", "kind", "allocate", "sweep")
NO_STEPS = {"warm_epochs": 0.0, "settle_epochs": 0.0, "align_epochs": 0.0, "final_epochs": 0.0}
FINE = {
    "block": 128,
    "pieces": [1] * 8 + [2] * 8 + [4] * 8 + [8] * 9,
    "steps": [1],
}  # a pyramid of 196 windows, 256 frames either side: closer to attention than 257 keys of a window, at less cost

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},  # Algorithm 1, and every constant of its section Experiments: the defaults below
    "best": {
        "mixer": "pyramid",
        "mixer_config": {"pyramid": FINE},
        "order": "kl",
        "progressive": False,
        **NO_STEPS,
        "settle_epochs": 4.0,
        "lr": 2e-4,
        "batch_seconds": 100.0,  # many small steps: at as much speech, better than a quarter of them
        "train": {"time_masks": 4.0, "time_mask_seconds": 0.3},
        "ffn": 0.3,
        "rest": 0.3,
        "ctc_weight": 0.5,
        "kl_weight": 1.0,
        "hidden_weight": 5.0,
    },
    "none": {
        "mixer": "pyramid",
        "mixer_config": {"pyramid": FINE},
        "order": "depth",
        "progressive": False,
        **NO_STEPS,
    },
}


def settings_of(mixer: str, mixer_config: dict[str, Any], alone: bool = True) -> dict[str, Any]:
    """What a mixer_config says of a mixer: the table of its name; where it is alone, the rest as well."""
    tables = {name: table for name, table in mixer_config.items() if isinstance(table, dict)}
    rest = {k: v for k, v in mixer_config.items() if k not in tables} if alone else {}
    return {**tables.get(mixer, {}), **rest}


@dataclass(frozen=True)
class Run:
    """What sweeps and conversions share."""

    model: str = option("", "model folder, Hugging Face folder or hub id")
    sources: tuple[str, ...] = option((), "where speech comes from")
    shares: tuple[float, ...] = option((), "each source's share of the seconds heard; empty: all of it once an epoch")
    held_out: tuple[str, ...] = option(
        (), "speakers that are measured on and never trained on; empty: where anything is trained, a tenth of them"
    )
    mixer: str = option("lpa", "what takes attention's place; in a conversion also one a layer, A,B,C")
    mixer_config: dict[str, Any] = option(
        {}, "its settings that differ from the defaults; or a table for each of several, window = {side = 16}"
    )
    kind: str = option("", "only attention of this kind: of a SepFormer, intra or inter; empty: all")
    seed: int = option(0, "decides weights, order of batches and augmentation")
    lr: float = option(5e-4, "peak learning rate")
    warmup: float = option(0.1, "share of a stage's steps over which lr rises")
    batch_seconds: float = option(400.0, "seconds of audio in a batch, padding included, over all processes")
    front_gb: float = option(
        0.0,
        "GB to keep the frozen front end's output in, computed once; with train.cache set on disk, too. 0: none kept",
    )
    train: dict[str, Any] = option({}, "further settings of the training loop, as in a training recipe")
    max_minutes: float = option(0.0, "stop after this long; the same command goes on. 0: no limit", free=True)

    def __post_init__(self) -> None:
        if not self.model:
            raise LpaError("name the model to convert")
        if self.shares and (len(self.shares) != len(self.sources) or min(self.shares) <= 0):
            raise LpaError(f"{len(self.sources)} sources need as many shares above 0, not {list(self.shares)}")
        for key in self.train:
            if key in DECIDED:
                raise LpaError(f"train.{key}: the conversion decides this; leave it out")
        training = self.training(1)
        changed = training.speed != (1, 1) or training.noise or training.room or training.gain_db != (0, 0)
        if self.front_gb and changed:
            raise LpaError(
                "front_gb keeps what the front end makes of plain audio; leave out speed, noise, room and gain_db"
            )

    def training(self, steps: int, **changes: Any) -> TrainConfig:
        """The training loop's settings for so many steps."""
        shared = {
            "model": self.model,
            "sources": [{"path": path} for path in self.sources],
            "held_out": list(self.held_out),
            "batch_seconds": self.batch_seconds,
            "seed": self.seed,
            "steps": steps,
            "lr": self.lr,
            "warmup": self.warmup,
            "eval_every": 0,
            "log_every": 20,
        }
        return TrainConfig.from_dict({**shared, **self.train, **changes}, "train")

    def settings(self, mixer: str) -> dict[str, Any]:
        """What mixer_config says of a mixer: the table of its name; where there is but one mixer, the rest as well."""
        return settings_of(mixer, self.mixer_config, alone="," not in self.mixer)

    def facts(self) -> dict[str, Any]:
        """What a record says of the run that it comes from."""
        return {"model": self.model, "data": ", ".join(self.sources), "seed": self.seed, "config": self.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def fixed(self) -> dict[str, Any]:
        """What decides the result: all but the settings that may differ when a run goes on."""
        data = self.to_dict()
        free = {f.name for f in dataclasses.fields(TrainConfig) if f.metadata["free"]}
        data["train"] = {k: v for k, v in data["train"].items() if k not in free}
        data["held_out"] = sorted(data["held_out"])  # a set: it may be written in another order
        return {f.name: data[f.name] for f in dataclasses.fields(self) if not f.metadata["free"]}


@dataclass(frozen=True)
class SweepConfig(Run):
    """Everything that decides a sweep."""

    lr: float = option(1e-3, "peak learning rate")
    epochs: float = option(-1.0, "epochs of MSE; -1: 2, or none for mixers that start as attention (window, pyramid)")
    l1: float = option(0.01, "elastic net on amplitudes: weight of |a|, averaged over the layer's pulses")
    l2: float = option(0.001, "elastic net on amplitudes: weight of a², averaged over the layer's pulses")
    theta: float = option(0.1, "a pulse survives if |a| exceeds this")
    floor: int = option(4, "pulses of each type and head that survive in any case")
    provision: int = option(12, "pulses of each type and head to start from; 0: as mixer_config has them")
    amplitude_travel: float = option(
        2.0,
        "how far an amplitude can move in the sweep: sets its rate. 0: lr's, at which a short sweep brings none to 0",
    )
    together: int = option(0, "layers trained side by side in one pass, each on its own loss; 0: all")


@dataclass(frozen=True)
class ConvertConfig(Run):
    """Everything that decides a conversion. Defaults are the recipe `paper`."""

    # which layers, and when
    order: str = option("sweep", "sweep, kl, depth, reverse, random:SEED, or layers such as 0,3,1")
    layers: int = option(0, "layers to replace; 0: all of the order")
    budget: float = option(
        0.0, "stop once the held-out WER (SI-SNRi) is worse than this; all at once: all or none. 0: no limit"
    )
    plan: str = option("", "choice.json of `lpa plan`: which mixer goes into which layer")
    sweep: str = option("", "folder of a finished sweep to take order and allocation from; empty: sweep first")
    sweep_settings: dict[str, Any] = option({}, "settings of that first sweep")
    allocate: bool = option(False, "as many pulses a layer as the sweep left it")
    progressive: bool = option(True, "one layer a step; else all at once")
    keep_attention: bool = option(False, "the control: replace nothing, train attention where the mixer would be")
    positions: bool = option(True, "keep the position embedding of Whisper; false: the last step takes it away")
    # how long
    warm_epochs: float = option(2.0, "layer MSE against the attention, the new mixer alone")
    settle_epochs: float = option(8.0, "the new layer, its norms and FFN")
    align_epochs: float = option(5.0, "all replaced layers and their norms, undone if WER rises")
    final_epochs: float = option(8.0, "joint tuning at the end")
    minutes: float = option(0.0, "training in all, by the clock, shared out over the stages by epochs; 0: epochs count")
    fade: float = option(0.5, "share of a stage over which positions fade out, where mixers have no scores of places")
    # at which rate
    norms: float = option(1.0, "multiple of lr: layer norms of replaced layers")
    ffn: float = option(0.1, "multiple of lr: feed-forward of replaced layers")
    rest: float = option(0.0, "multiple of lr: everything else but the front end")
    align_rate: float = option(0.5, "of all rates, in alignment")
    final_rate: float = option(0.2, "of all rates, in the final tuning")
    tau: Pair = option((3.0, 0.5), "temperature of the pulses at a stage's start and end")
    final_tau: float = option(0.0, "temperature at the end of the final tuning, towards hard gates; 0: as it is")
    keep_best: bool = option(False, "undo the final tuning, too, if WER rises")
    # towards what
    ctc_weight: float = option(1.0, "weight of CTC against the transcript")
    kl_weight: float = option(0.0, "weight of KL against the original model's posteriors")
    hidden_weight: float = option(0.0, "weight of the relative error against the original model's hidden states")
    temperature: float = option(1.0, "of both posteriors in the KL")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.tau) <= 0 or self.final_tau < 0:
            raise LpaError(f"tau must be two positive temperatures, not {list(self.tau)}; nor is final_tau below 0")
        if not 0 <= self.fade <= 1 or self.minutes < 0:
            raise LpaError(f"fade is a share of a stage and minutes are 0 or more, not {self.fade} and {self.minutes}")
        if self.layers < 0:
            raise LpaError(f"layers must be 0 (all) or more, not {self.layers}")
        if not self.budget >= 0:  # so that nan fails
            raise LpaError(f"budget must be 0 (no limit) or more, not {self.budget:g}")
        if self.budget and not self.sources:
            raise LpaError("a WER budget needs data to measure on; add --data")
        if self.trains and not (self.ctc_weight or self.kl_weight or self.hidden_weight):
            raise LpaError("every loss has weight 0; set ctc_weight, kl_weight or hidden_weight")

    @property
    def trains(self) -> bool:
        return any(getattr(self, name) for name in NO_STEPS)

    def mixers(self, layers: int) -> list[str]:
        """The mixer of each of a model's layers."""
        names = [name.strip() for name in self.mixer.split(",")]
        if len(names) not in (1, layers):
            raise LpaError(f"mixer names {len(names)} mixers for {layers} layers; give one, or one for each layer")
        return names * (layers // len(names))

    def sweeping(self) -> SweepConfig:
        """The sweep that gives this conversion its order."""
        if "," in self.mixer:
            raise LpaError("several mixers have no one sweep; name an order that needs none, such as --order depth")
        names = {f.name for f in dataclasses.fields(Run)} - {"lr"}
        data = {k: v for k, v in self.to_dict().items() if k in names}
        return build(SweepConfig, {**data, **self.sweep_settings}, "sweep_settings")


def build(cls: Any, data: dict[str, Any], source: str = "recipe") -> Any:
    """A config from plain data; unknown keys and wrong types are errors that name the key."""
    return from_plain(cls, data, source)


def read(recipe: str, overrides: Iterable[str] = (), **given: Any) -> ConvertConfig:
    """A conversion from a recipe's name or TOML file (which may say `recipe = NAME` to start from one).

    On top of it go what is `given`, then `key=value` overrides.
    """
    known, overrides = {key: value for key, value in given.items() if value is not None}, tuple(overrides)
    if "budget" in known and not known["budget"] > 0:
        raise LpaError(f"--budget must be above 0, not {known['budget']:g}; for no limit leave it out")
    config = override(ConvertConfig, {**start_from(recipe), **known}, overrides, recipe)
    typed = {key: f"--{key}" for key in known} | {key_of(text): f"--set {text}" for text in overrides}
    if config.plan and (twice := [words for key, words in typed.items() if key in PLANNED]):
        raise LpaError(f"a plan says which mixer goes where, and in which order; leave out {', '.join(twice)}")
    if "," in config.mixer:
        return config
    return dataclasses.replace(config, mixer_config=config.settings(config.mixer))  # no other mixer's


def key_of(override: str) -> str:
    """The key that a `key=value` or `key.more=value` sets."""
    return override.partition("=")[0].partition(".")[0].strip()


def override(cls: Any, data: dict[str, Any], overrides: Iterable[str], source: str = "recipe") -> Any:
    """A config from plain data, with `key=value` overrides on top."""
    for text in overrides:
        put(data, text)
    return build(cls, data, source)


def start_from(recipe: str) -> dict[str, Any]:
    if not recipe.endswith(".toml"):
        return copy.deepcopy(choose(recipe, RECIPES, "recipe"))
    path = Path(recipe)
    if not path.is_file():
        raise LpaError(f"no recipe {path}; give the path of a TOML file, or one of {', '.join(RECIPES)}")
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise LpaError(f"{path} is not TOML: {error}") from None
    return {**copy.deepcopy(choose(data.pop("recipe", "paper"), RECIPES, "recipe")), **data}


def settle(config: Run, folder: Path) -> None:
    """Save the config in the run folder; where one is there already, it must be the same run."""
    path = folder / "config.json"
    if path.is_file():
        theirs, mine = build(type(config), read_json(path), str(path)).fixed(), config.fixed()
        differ = [f"{k} ({theirs[k]!r} there, {mine[k]!r} now)" for k in mine if theirs[k] != mine[k]]
        if differ:
            raise LpaError(
                f"{folder} holds a run that differs in {', '.join(differ)}; choose another --out or undo the change"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, config.to_dict())


def write_json(path: Path, data: Any) -> None:
    """A JSON file that is there whole or not at all."""
    with whole_file(path) as file:
        file.write((json.dumps(data, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise LpaError(f"{path} is not there") from None
    except OSError as error:
        raise LpaError(f"{path} cannot be read ({error.strerror}); name a JSON file") from None
    except ValueError as error:  # nor text
        raise LpaError(f"{path} is not JSON ({error}); remove it") from None


def record_once(folder: Path, what: str, write: Callable[[], Any]) -> None:
    """Write a record of a run unless its folder says that it has been; killed in between, rather twice than never."""
    path = folder / "recorded.json"
    done = read_json(path) if path.is_file() else []
    if what not in done:
        write()
        write_json(path, [*done, what])


def derive(seed: int, *path: int) -> int:
    """A seed of its own for every place in a run."""
    return int(np.random.SeedSequence((seed, *path)).generate_state(1)[0] >> 1)
