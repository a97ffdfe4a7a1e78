"""The mixers, by name. Add one here and the tests, the CLI and the tables take it up."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import choose
from .attention import Attention, Pyramid, Window
from .base import Mixed, Mixer, MixerConfig, Projections, projections
from .lpa import LPA
from .plain import Conv, DynConv, NoMixer, Summary

NO_RECORDING = {"aperiodic": 0, "periodic": 0, "positional": 0}

# name -> (class, the settings that make the name what it is)
MIXERS: dict[str, tuple[type[Mixer], dict[str, Any]]] = {
    "anchored": (LPA, {**NO_RECORDING, "anchored": 12}),
    "conv": (Conv, {}),
    "dynconv": (DynConv, {}),
    "ladder": (LPA, {**NO_RECORDING, "heads": 8, "ladder": 16}),
    "lpa": (LPA, {}),
    "none": (NoMixer, {}),
    "pyramid": (Pyramid, {}),
    "summary": (Summary, {}),
    "window": (Window, {}),
}


def resolve(name: str, config: dict[str, Any] | MixerConfig | None = None) -> tuple[type[Mixer], MixerConfig]:
    """The class and full config behind a mixer's name and the fields that differ from its defaults."""
    cls, preset = choose(name, MIXERS, "mixer")
    if isinstance(config, MixerConfig):
        return cls, config
    return cls, cls.Config.from_dict({**preset, **(config or {})})


def build(name: str, attention: nn.Module, config: dict[str, Any] | MixerConfig | None = None) -> Mixer:
    """A mixer built from the attention it will replace, on the attention's device and in its precision."""
    cls, resolved = resolve(name, config)
    return cls.from_attention(attention, resolved)


__all__ = [
    "LPA",
    "MIXERS",
    "Attention",
    "Mixed",
    "Mixer",
    "MixerConfig",
    "Projections",
    "build",
    "projections",
    "resolve",
]
