"""The mixers, by name. Add one here and the tests, the CLI and the tables take it up."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import choose
from .base import Mixed, Mixer, MixerConfig, Projections, projections
from .plain import Conv, NoMixer

# name -> (class, the settings that make the name what it is)
MIXERS: dict[str, tuple[type[Mixer], dict[str, Any]]] = {
    "conv": (Conv, {}),
    "none": (NoMixer, {}),
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


__all__ = ["MIXERS", "Mixed", "Mixer", "MixerConfig", "Projections", "build", "projections", "resolve"]
