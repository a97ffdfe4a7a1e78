"""Rivals that show what mixing is worth: none (a bias), convolution with fixed or predicted taps, SummaryMixing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LpaError
from .base import Mixed, Mixer, MixerConfig, Projections, blank_padding, copy_linear, projections, split_heads
from .blocks import valid_frames
from .frames import BLOCK, Ladder, pool_band, pool_frames


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

    def mix(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
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
        side = one_side(config.taps)
        self.reach = (side, side)
        self.kernel = nn.Parameter(v.weight.new_full((v.out_features, config.taps), 1 / config.taps))

    @classmethod
    def from_attention(cls, attention, config):
        source = projections(attention)
        return cls(copy_linear(source.v), copy_linear(source.out), config)

    def mix(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
        v = blank_padding(self.v(x), mask).transpose(1, 2)  # (B, D, T)
        v = F.conv1d(v, self.kernel.unsqueeze(1), padding=self.kernel.shape[1] // 2, groups=v.shape[1])
        return Mixed(blank_padding(self.out(v.transpose(1, 2)), mask))

    def mflop_per_frame(self) -> float:
        dim, taps = self.kernel.shape
        return (4 * dim * dim + 2 * dim * taps) / 1e6


def one_side(taps: int) -> int:
    """Frames either side of the middle tap."""
    if taps < 1 or taps % 2 == 0:
        raise LpaError(f"{taps} taps have no middle one; choose an odd number")
    return taps // 2


@dataclass(frozen=True)
class DynConvConfig(MixerConfig):
    heads: int = 8
    taps: int = 31  # odd: as many frames before as after


class DynConv(Mixer):
    """Dynamic convolution (Wu et al. 2019): each head's taps are a softmax predicted from the frame in their middle."""

    Config = DynConvConfig

    def __init__(self, source: Projections, config: DynConvConfig):
        super().__init__()
        split_heads(source.dim, config.heads)
        self.heads = config.heads
        self.side = side = one_side(config.taps)
        self.reach = (side, side)
        self.value, self.out = copy_linear(source.v), copy_linear(source.out)
        self.taps = nn.Linear(source.dim, config.heads * config.taps).to(source.out.weight)
        nn.init.zeros_(self.taps.weight)
        with torch.no_grad():  # starts as a triangle: near frames count more, as they do in the layers it replaces
            t = torch.arange(-side, side + 1).abs()
            self.taps.bias.copy_((1 - t / (side + 1)).log().repeat(config.heads))
        self.frames = Ladder([(j, j + 1) for j in range(-side, side + 1)], side).to(source.out.weight.device)

    @classmethod
    def from_attention(cls, attention, config):
        return cls(projections(attention), config)

    def mix(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None, plain: bool = False) -> Mixed:
        x = blank_padding(x, mask)
        v = blank_padding(self.value(x), mask).unflatten(-1, (self.heads, -1))  # (B, T, H, E)
        weight = self.taps(x).float().unflatten(-1, (self.heads, -1)).softmax(-1)  # (B, T, H, taps)
        lo, hi = self.frames.edges(x)
        y = pool_frames(v, lo, hi, weight) if plain else pool_band(v, [(self.frames, lo, hi, weight)], self.side)
        return Mixed(blank_padding(self.out(y.flatten(2)), mask))

    def definition(self, x: Tensor, mask: Tensor | None = None) -> Mixed:
        return self.mix(x, mask, plain=True)

    def mflop_per_frame(self) -> float:
        dim, taps = self.out.in_features, self.taps.out_features // self.heads
        band = 2 * (BLOCK + 2 * self.side) * (dim + self.heads * taps)
        return (4 * dim * dim + 2 * dim * self.heads * taps + band) / 1e6


@dataclass(frozen=True)
class SummaryConfig(MixerConfig):
    pass


class Summary(Mixer):
    """SummaryMixing (Parcollet et al. 2023): y_t = c(f(x_t), s̄), s̄ the mean of s(x_t) over the recording.

    f and s are a linear layer and a GELU each, started from W_V; the combiner is linear, started from W_O for both.
    """

    Config = SummaryConfig

    def __init__(self, source: Projections):
        super().__init__()
        self.local, self.summary, self.out = copy_linear(source.v), copy_linear(source.v), copy_linear(source.out)
        self.out_summary = copy_linear(source.out, bias=False)  # the combiner's other half: applied once, not per frame

    @classmethod
    def from_attention(cls, attention, config):
        return cls(projections(attention))

    def mix(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
        own = valid_frames(x, mask).sum(1).clamp(min=1)[:, None, None]
        summary = blank_padding(F.gelu(self.summary(x)), mask).sum(1, keepdim=True, dtype=torch.float32) / own
        y = self.out(F.gelu(self.local(x))) + self.out_summary(summary.to(x.dtype))
        return Mixed(blank_padding(y, mask))

    def definition(self, x: Tensor, mask: Tensor | None = None) -> Mixed:
        """One recording at a time, the combiner as one product with [f(x_t), s̄]."""
        y = torch.zeros_like(x)
        for row, own in enumerate(valid_frames(x, mask)):
            frames = x[row, own]
            if len(frames):
                mean = F.gelu(self.summary(frames)).mean(0).expand(len(frames), -1)
                both = torch.cat([F.gelu(self.local(frames)), mean], -1)
                y[row, own] = F.linear(both, torch.cat([self.out.weight, self.out_summary.weight], 1), self.out.bias)
        return Mixed(y)

    def mflop_per_frame(self) -> float:
        return 6 * self.out.in_features**2 / 1e6
