"""The simplest mixers: none (a bias), and a depthwise convolution. Rivals that show what mixing is worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Mixed, Mixer, MixerConfig, blank_padding, copy_linear, projections


@dataclass(frozen=True)
class NoneConfig(MixerConfig):
    pass


class NoMixer(Mixer):
    """No mixing at all: one learned vector for every frame."""

    Config = NoneConfig
    reach = (0, 0)

    def __init__(self, dim: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    @classmethod
    def from_attention(cls, attention, config):
        source = projections(attention)
        return cls(source.dim).to(source.out.weight)

    def forward(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
        return Mixed(blank_padding(self.bias.expand_as(x), mask))

    def mflop_per_frame(self) -> float:
        return 0.0


@dataclass(frozen=True)
class ConvConfig(MixerConfig):
    taps: int = 31  # odd: as many frames before as after


class Conv(Mixer):
    """Values from the attention's W_V, a depthwise convolution over time, the attention's W_O."""

    Config = ConvConfig

    def __init__(self, v: nn.Linear, out: nn.Linear, config: ConvConfig):
        super().__init__()
        self.v, self.out = v, out
        side = config.taps // 2
        self.reach = (side, side)
        self.kernel = nn.Parameter(v.weight.new_full((v.out_features, config.taps), 1 / config.taps))

    @classmethod
    def from_attention(cls, attention, config):
        source = projections(attention)
        return cls(copy_linear(source.v), copy_linear(source.out), config)

    def forward(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
        v = blank_padding(self.v(x), mask).transpose(1, 2)  # (B, D, T)
        v = F.conv1d(v, self.kernel.unsqueeze(1), padding=self.reach[0], groups=v.shape[1])
        return Mixed(blank_padding(self.out(v.transpose(1, 2)), mask))

    def mflop_per_frame(self) -> float:
        dim, taps = self.kernel.shape
        return (4 * dim * dim + 2 * dim * taps) / 1e6
