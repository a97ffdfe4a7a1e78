"""Site, Swap, Plan: the one description of a converted model, as JSON, from which every runtime rebuilds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import LpaError

VERSION = 1


@dataclass(frozen=True)
class Site:
    """One place in a model where attention sits, or sat."""

    index: int  # layer number, counted from the input
    path: str  # where the module hangs, e.g. "wav2vec2.encoder.layers.3.attention"
    dim: int
    heads: int


@dataclass(frozen=True)
class Swap:
    """One site whose attention is replaced: by which mixer, built with which config."""

    index: int
    mixer: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A model as data: its family, the family's own configuration, and the swaps done to it."""

    family: str
    base: dict[str, Any]  # the family's configuration, enough to rebuild the unconverted network
    swaps: tuple[Swap, ...] = ()
    weights: str = "float32"  # how weights.safetensors stores them: float32, float16 or int8

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan.json") -> Plan:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise LpaError(f"{source} is not JSON ({error}); the model folder is damaged") from None
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise LpaError(f"{source} is not a version {VERSION} plan; convert the model again with this release")
        known = {"family", "base", "swaps", "weights"}
        if set(data) != known:
            odd = sorted(set(data) ^ known)
            raise LpaError(f"{source}: missing or unknown field {', '.join(odd)}")
        try:
            swaps = tuple(Swap(**entry) for entry in data["swaps"])
        except TypeError:
            raise LpaError(f"{source}: a swap is damaged; each has index, mixer and config") from None
        return cls(data["family"], data["base"], swaps, data["weights"])

    @classmethod
    def read(cls, folder: Path) -> Plan:
        path = Path(folder) / "plan.json"
        if not path.is_file():
            raise LpaError(f"{folder} has no plan.json; it is not an lpa model folder")
        return cls.from_json(path.read_text(), str(path))
