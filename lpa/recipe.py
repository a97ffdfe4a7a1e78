"""TrainConfig: what a training run is. Read from TOML, overridden by key=value, saved as JSON in the run folder."""

# ruff: noqa: RUF009 (`option` gives a dataclass field, not a shared default)

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import string
import tomllib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import LpaError, choose

Pair = tuple[float, float]


def option(default: Any, help: str, *, free: bool = False) -> Any:
    """A field with its help text. `free`: it may differ when a run goes on, because it does not change the result."""
    metadata = {"help": help, "free": free}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Source:
    """One place that training speech comes from."""

    path: str = option("", "folder or manifest; may hold {names} of `paths`")
    share: float = option(1.0, "its share of the seconds heard, relative to the others'")
    rescan: bool = option(False, "a folder of packed shards, empty or absent at first; look for more at every epoch")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run. Each field is a TOML key and a `--set key=value`."""

    # what is trained
    model: str = option("", "model folder or hub id to start from; empty: fresh weights of `family`")
    family: str = option("", "family of a model with fresh weights")
    model_config: dict[str, Any] = option(
        {}, "configuration of a model with fresh weights, the family's own keys; of `model`, what is to be different"
    )
    lr_scale: dict[str, float] = option({}, "parameter-name pattern -> multiple of lr, first match wins; 0 freezes")
    # what it hears
    sources: tuple[Source, ...] = option((), "where speech comes from: path, share, rescan")
    held_out: tuple[str, ...] = option((), "speakers kept out of training, for tuning")
    held_out_limit: int = option(0, "measure on so many of their utterances, spread evenly; 0: all")
    paths: dict[str, str] = option(
        {}, "values of {names} in paths; LPA_NAME in the environment wins over the recipe", free=True
    )
    batch_seconds: float = option(600.0, "seconds of audio in a batch, padding included, over all processes")
    epoch_seconds: float = option(0.0, "seconds of audio in an epoch; 0: the first source once, the others by share")
    max_seconds: float = option(30.0, "utterances longer than this are listed and left out; none is slowed past it")
    pad_seconds: float = option(0.5, "a batch's length is rounded up to a multiple of this")
    # how it is trained
    out: str = option("", "run folder: checkpoint, records, and the model in the end", free=True)
    seed: int = option(0, "decides weights, order and augmentation")
    steps: int = option(1000, "optimiser steps")
    minutes: float = option(
        0.0, "train for this long by the clock, with the schedule of `steps` stretched to it; 0: off"
    )
    optimizer: str = option("adamw", "adamw, or muon for the matrices of the layers and adamw for the rest")
    lr: float = option(2e-4, "peak learning rate")
    warmup: float = option(0.1, "share of the steps over which lr rises")
    schedule: str = option("cosine", "how lr falls afterwards: cosine, linear or constant")
    lr_floor: float = option(0.01, "share of lr that is left at the end")
    weight_decay: float = option(0.01, "AdamW's, on matrices only")
    betas: Pair = option((0.9, 0.98), "AdamW's")
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping")
    ema: float = option(0.0, "decay of the averaged weights that are evaluated and saved; 0: off")
    precision: str = option("auto", "auto (bf16 on CUDA, else fp32), bf16 or fp32")
    # what is done to the audio
    speed: Pair = option((1.0, 1.0), "range of playback speeds")
    gain_db: Pair = option((0.0, 0.0), "range of gains")
    noise: float = option(0.0, "probability that coloured noise is added")
    noise_snr_db: Pair = option((10.0, 40.0), "range of its signal-to-noise ratio")
    room: float = option(0.0, "probability that it sounds as in a room: an uneven response and a short tail")
    crop_seconds: float = option(4.0, "enhancement: speech is cut into pieces this long; what is shorter is left out")
    noise_kinds: tuple[str, ...] = option(
        ("white",),
        "enhancement: what is mixed into every piece, in turn: white, coloured, babble; one may be named twice",
    )
    time_masks: float = option(0.0, "SpecAugment: masks in 10 s of audio")
    time_mask_seconds: float = option(0.5, "SpecAugment: longest mask")
    feature_masks: int = option(0, "SpecAugment: masks over channels")
    feature_mask_share: float = option(0.2, "SpecAugment: widest of them, as a share of the channels")
    # what it is told
    ctc_weight: float = option(1.0, "weight of the CTC loss against the transcript")
    consistency_weight: float = option(
        0.0, "weight of the KL between what is said of two augmentations of an utterance; a batch is then heard twice"
    )
    teacher: str = option("", "model folder or hub id of a frozen teacher")
    snr_weight: float = option(1.0, "enhancement: weight of negative SI-SNR, in dB, against the clean audio")
    kl_weight: float = option(0.0, "weight of KL(teacher | student) on CTC posteriors")
    hidden_weight: float = option(0.0, "weight of the relative error of hidden states against the teacher's")
    reading_weight: float = option(0.0, "weight of the relative error of what the head reads, of whatever width")
    temperature: float = option(1.0, "of both posteriors in the KL")
    # housekeeping
    device: str = option("auto", "auto or cpu", free=True)
    compile: bool = option(False, "torch.compile the layers: slow to start, then quicker on a GPU", free=True)
    audio_on_device: str = option(
        "auto", "keep all audio on the training device: auto (if it fits), yes or no", free=True
    )
    cache: str = option("", "folder where decoded audio is kept for the next start; empty: none", free=True)
    log_every: int = option(20, "steps between records", free=True)
    eval_every: int = option(500, "steps between evaluations on the held-out speakers; 0: only at the end", free=True)
    checkpoint_minutes: float = option(2.0, "time between checkpoints, which are made where a record is", free=True)
    max_minutes: float = option(
        0.0, "stop with a checkpoint after this long; the same command goes on. 0: no limit", free=True
    )

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.family):
            raise LpaError(
                "a recipe needs `model` (weights to start from) or `family` and `model_config`, one of the two"
            )
        for name, choices in CHOICES.items():
            choose(getattr(self, name), dict.fromkeys(choices), name)
        for kind in self.noise_kinds:
            choose(kind, dict.fromkeys(NOISE_KINDS), "noise kind")
        if not self.noise_kinds:
            raise LpaError(f"noise_kinds is empty; name some of {', '.join(NOISE_KINDS)}")
        for name in ("steps", "log_every"):
            if getattr(self, name) < 1:
                raise LpaError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("batch_seconds", "lr", "temperature", "max_seconds", "pad_seconds", "crop_seconds"):
            if getattr(self, name) <= 0:
                raise LpaError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("speed", "noise_snr_db", "gain_db"):
            low, high = getattr(self, name)
            if low > high or (name == "speed" and low <= 0):
                raise LpaError(f"{name} must be a range [low, high], not [{low}, {high}]")
        for name in ("warmup", "ema", "noise", "room", "feature_mask_share", "lr_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise LpaError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.sources and (self.sources[0].rescan or min(s.share for s in self.sources) <= 0):
            raise LpaError(
                "sources need shares above 0, and the first, whose length an epoch has, cannot be a `rescan` one"
            )
        told = self.kl_weight or self.hidden_weight or self.reading_weight
        if told and not self.teacher:
            raise LpaError("kl_weight, hidden_weight and reading_weight need a `teacher`; name its model folder")
        if not (self.ctc_weight or told):
            raise LpaError("every loss has weight 0; set ctc_weight, kl_weight, hidden_weight or reading_weight")

    def resolve(self, path: str) -> str:
        """A path with its {names} filled in from `paths`."""
        for _, name, _, _ in string.Formatter().parse(path):
            if name is not None and name not in self.paths:
                raise LpaError(f"{path}: nothing says where {name!r} is; add --set paths.{name}=DIR")
        return path.format(**self.paths)

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "recipe") -> TrainConfig:
        return from_plain(cls, data, source)


NOISE_KINDS = ("white", "coloured", "babble")
CHOICES = {
    "optimizer": ("adamw", "muon"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": ("auto", "bf16", "fp32"),
    "device": ("auto", "cpu"),
    "audio_on_device": ("auto", "yes", "no"),
}


def read(path: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The recipe in a TOML file, with `key=value` overrides on top."""
    path = Path(path)
    if not path.is_file():
        raise LpaError(f"no recipe {path}; give the path of a TOML file")
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise LpaError(f"{path} is not TOML: {error}") from None
    paths = data.get("paths", {})
    paths.update({name: os.environ[f"LPA_{name.upper()}"] for name in paths if f"LPA_{name.upper()}" in os.environ})
    for override in overrides:
        put(data, override)
    return TrainConfig.from_dict(data, str(path))


def settle(config: TrainConfig, folder: Path) -> None:
    """Save the resolved config in the run folder; where one is there already it must be the same."""
    path = folder / "config.json"
    mine = config.to_dict()
    if path.is_file():
        theirs = json.loads(path.read_text())
        fixed = [f.name for f in dataclasses.fields(config) if not f.metadata["free"]]
        differ = [f"{n} ({theirs.get(n)!r} there, {mine[n]!r} now)" for n in fixed if theirs.get(n) != mine[n]]
        if differ:
            raise LpaError(
                f"{folder} holds a run that differs in {', '.join(differ)}; choose another --out or undo the change"
            )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(mine, indent=1) + "\n")
    temporary.replace(path)


def put(data: dict[str, Any], text: str) -> None:
    """Put one `key=value` or `table.key=value` into the TOML data."""
    key, value = parse(text)
    *tables, name = (part.strip() for part in key.split(".", 1))
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise LpaError(f"--set {text}: {table} is no table")
    data[name] = value


def parse(text: str) -> tuple[str, Any]:
    """`key=value` of a --set, the value as TOML has it; what is no TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise LpaError(f"--set {text}: write key=value")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def from_plain(cls: Any, data: dict[str, Any], source: str) -> Any:
    """A frozen dataclass from plain data: unknown keys and wrong types are errors that name the key."""
    kinds = typing.get_type_hints(cls)
    if not isinstance(data, dict):
        raise LpaError(f"{source} must be a table, not {data!r}")
    for key in data:
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=3) or sorted(kinds)
            raise LpaError(f"{source} has no key {key!r}; have {', '.join(near)}")
    return cls(**{key: _coerce(value, kinds[key], f"{source}: {key}") for key, value in data.items()})


def _coerce(value: Any, kind: Any, where: str) -> Any:
    """The value as the field's type, or an error that says what was expected."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return from_plain(kind, value, where)
    if kind is Any:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, bool, str) and type(value) is kind:
        return value
    if origin is dict and isinstance(value, dict):
        return {k: _coerce(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        if arguments[-1] is Ellipsis:
            return tuple(_coerce(v, arguments[0], where) for v in value)
        if len(value) == len(arguments):
            return tuple(_coerce(v, k, where) for v, k in zip(value, arguments, strict=True))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Pair: "two numbers"}
    wanted = names.get(kind) or ("a list" if origin is tuple else "a table")
    raise LpaError(f"{where} must be {wanted}, not {value!r}")
