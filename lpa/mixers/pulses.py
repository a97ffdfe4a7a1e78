"""The gate families anchored to the recording: aperiodic, periodic, positional. Soft while training, hard at inference.

A family says how strongly each of its N = heads · count pulses covers each frame: gates (B, T, N) in float32. What is
one number a pulse (centre, width, period, phase) is kept in float64, and positions are whole numbers counted from the
pulse's own centre: at frame 180,000 float32 places nothing better than a sixtieth of a frame, and bf16 cannot count.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import exactly
from .blocks import remember

NEVER = -1e9  # below any score; finite, so that a row of nothing but padding stays finite


def causal_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Depthwise, over the frames so far: x (B, T, D), kernel (D, taps), the last tap the frame's own → (B, T, D)."""
    image = x.transpose(1, 2).unsqueeze(2)  # one row of pixels, channels last: no copy
    image = F.conv2d(image, kernel[:, None, None].to(x.dtype), padding=(0, kernel.shape[1] - 1), groups=x.shape[2])
    return image.squeeze(2).transpose(1, 2)[:, : x.shape[1]]


class Segments(NamedTuple):
    """Hard gates as runs of frames: pulse n covers [start, end) of each of its runs; empty runs have end ≤ start."""

    start: Tensor  # (B, N, S) int64
    end: Tensor  # (B, N, S)


class Aperiodic(nn.Module):
    """A window at the place the pulse's query finds: centre by attention over time, half-width from what is there."""

    def __init__(self, dim: int, pulses: int, kernel: int, context: int):
        super().__init__()
        inner = dim // 2
        self.kernel = nn.Parameter(torch.zeros(dim, kernel))
        self.mlp = nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, inner))
        self.query = nn.Parameter(torch.randn(pulses, inner) * inner**-0.5)
        self.width = nn.Parameter(torch.zeros(pulses, inner))
        self.width_bias = nn.Parameter(inverse_softplus(torch.logspace(math.log2(4), math.log2(64), pulses, 2.0)))
        self.context = nn.Linear(context, inner, bias=False) if context else None
        with torch.no_grad():
            self.kernel[:, -1] = 1  # starts as the frame itself
            if self.context is not None:
                self.context.weight.zero_()

    def describe(self, x: Tensor, passed: Tensor | None) -> Tensor:
        """h (B, T, D/2): causal depthwise convolution, MLP, and what the layer before passed on."""
        h = self.mlp(causal_convolution(x, self.kernel))
        if self.context is not None and passed is not None:
            missing = self.context.in_features - passed.shape[1]  # layers may differ in their number of pulses
            passed = F.pad(passed, (0, missing)) if missing > 0 else passed[:, : self.context.in_features]
            h = h + self.context(passed.to(h.dtype)).unsqueeze(1)
        return h

    def locate(self, h: Tensor, valid: Tensor, tau: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor frame (int64), distance of the centre from it, half-width (float64), each (B, N). tau None: hard."""
        with exactly(h):
            scores = h.float() @ self.query.float().T
        scores = scores.masked_fill(~valid.unsqueeze(-1), NEVER)  # (B, T, N)
        anchor = scores.argmax(1)
        if tau is None:
            found = h.gather(1, anchor.unsqueeze(-1).expand(-1, -1, h.shape[2]))
            shift = torch.zeros_like(anchor, dtype=torch.float64)
        else:
            share = (scores / tau).softmax(1)
            offset = torch.arange(h.shape[1], device=h.device)[:, None] - anchor.unsqueeze(1)  # (B, T, N), exact
            exact = share.double()
            shift = (exact * offset).sum(1) / exact.sum(1)
            found = share.transpose(1, 2).to(h.dtype) @ h  # (B, N, D/2)
        width = (found.double() * self.width.double()).sum(-1) + self.width_bias.double()
        return anchor, shift, F.softplus(width)

    def gates(self, x: Tensor, valid: Tensor, passed: Tensor | None, tau: float | None) -> tuple[Tensor, Tensor]:
        """Gates (B, T, N), and where in its window each frame lies: −1 at the start, 1 at the end."""
        anchor, shift, half = self.locate(self.describe(x, passed), valid, tau)
        t = torch.arange(x.shape[1], device=x.device)[:, None]
        away = (t - anchor.unsqueeze(1)).float() - shift.float().unsqueeze(1)  # (B, T, N)
        half = half.float().unsqueeze(1)
        place = (away / half).clamp(-1, 1)
        if tau is None:
            return (away.abs() <= half).float(), place
        return torch.sigmoid((away + half) / tau) * torch.sigmoid((half - away) / tau), place

    def segments(self, x: Tensor, valid: Tensor, passed: Tensor | None) -> Segments:
        anchor, _, half = self.locate(self.describe(x, passed), valid, None)
        half = half.floor().long()
        return Segments((anchor - half).unsqueeze(-1), (anchor + half + 1).unsqueeze(-1))


class Periodic(nn.Module):
    """A window that repeats: period, phase and duty cycle from the recording's mean frame."""

    def __init__(self, dim: int, pulses: int):
        super().__init__()
        self.shape = nn.Linear(dim, 3 * pulses)
        periods = torch.logspace(math.log2(10), math.log2(512), pulses, 2.0)
        phases = torch.arange(pulses) * 2.399963  # the golden angle: neighbours never start alike
        with torch.no_grad():
            self.shape.weight.mul_(0.1)
            self.shape.bias.copy_(torch.cat([inverse_softplus(periods.log2() - 2), phases, torch.zeros(pulses)]))

    def predict(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Period in frames, phase in cycles, duty cycle: each (B, N) in float64, since an error in a period adds up."""
        mean = x.sum(1, dtype=torch.float32).double() / valid.sum(1, keepdim=True).clamp(min=1)
        raw = F.linear(mean, self.shape.weight.double(), self.shape.bias.double())
        period, phase, duty = raw.chunk(3, -1)
        return 2 ** (F.softplus(period) + 2), phase / (2 * math.pi), duty.sigmoid()

    def gates(self, x: Tensor, valid: Tensor, tau: float | None) -> Tensor:
        period, phase, duty = self.predict(x, valid)
        t = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None]
        cycles = t / period.unsqueeze(1) - phase.unsqueeze(1)  # (B, T, N)
        cycles = cycles - cycles.round()  # in [−½, ½]: the cosine of this is the cosine of all of it
        if tau is None:
            return (cycles.abs() <= duty.unsqueeze(1) / 2).float()
        level = torch.cos(math.pi * duty).float().unsqueeze(1)
        return torch.sigmoid((torch.cos(2 * math.pi * cycles.float()) - level) / tau)

    def segments(self, x: Tensor, valid: Tensor) -> Segments:
        """The on-regions, analytically: run k is centred k periods after the phase and a duty cycle wide."""
        period, phase, duty = self.predict(x, valid)
        last = int((x.shape[1] / period - phase).max().ceil()) + 1
        first = int((-phase).min().floor()) - 1
        k = torch.arange(first, last + 1, device=x.device)
        centre = (phase.unsqueeze(-1) + k) * period.unsqueeze(-1)  # (B, N, S)
        half = (duty * period / 2).unsqueeze(-1)
        return Segments((centre - half).ceil().long(), (centre + half).floor().long() + 1)


class Positional(nn.Module):
    """A window at a fixed place of the recording, whatever is said there: a sum of sines and cosines of t / (n − 1)."""

    def __init__(self, pulses: int, bases: int):
        super().__init__()
        self.waves = nn.Linear(2 * bases, pulses)
        nn.init.normal_(self.waves.weight, std=(2 * bases) ** -0.5 * 2)
        nn.init.zeros_(self.waves.bias)
        self.bases: dict = {}
        self.hard_masks: dict = {}

    def level(self, frames: int, lengths: Tensor | None, device: torch.device) -> Tensor:
        """(B, T, N) before the threshold; lengths (B,) are the samples' own. None: all are as long, and B is 1."""
        if lengths is None:
            whole = torch.tensor([frames], device=device)
            waves = remember(self.bases, (frames, device), lambda: self.basis(frames, whole))
        else:
            waves = self.basis(frames, lengths)
        with exactly(waves):
            return F.linear(waves, self.waves.weight.float(), self.waves.bias.float())

    def basis(self, frames: int, lengths: Tensor) -> Tensor:
        """(B, T, 2K): sines and cosines of t / (n − 1), n the sample's own length, never the padded one."""
        t = torch.arange(frames, device=lengths.device) / (lengths - 1).clamp(min=1).unsqueeze(1)  # (B, T)
        k = torch.arange(1, self.waves.in_features // 2 + 1, device=lengths.device)
        angle = 2 * math.pi * t.unsqueeze(-1) * k
        return torch.cat([angle.sin(), angle.cos()], -1)

    def gates(self, frames: int, lengths: Tensor | None, tau: float | None, device: torch.device) -> Tensor:
        if tau is not None:
            return torch.sigmoid(self.level(frames, lengths, device) / tau)
        own = [frames] if lengths is None else lengths.tolist()
        return torch.cat([self.hard_mask(frames, length, device) for length in own])

    def hard_mask(self, frames: int, length: int, device: torch.device) -> Tensor:
        """(1, T, N), made once for a length and kept as long as the weights stay as they are."""
        weight, bias = self.waves.weight, self.waves.bias
        key = (frames, length, device, weight._version, bias._version, weight.data_ptr())
        own = torch.tensor([length], device=device)
        return remember(self.hard_masks, key, lambda: (self.level(frames, own, device) >= 0).float())


def segment_sums(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Sum of x (B, T, D) over each pulse's runs, two reads of a prefix sum each: (B, N, D); and its frames (B, N)."""
    frames = x.shape[1]
    start, end = segments.start.clamp(0, frames), segments.end.clamp(0, frames)
    end = torch.maximum(start, end)
    total = F.pad(x.double().cumsum(1), (0, 0, 1, 0))  # (B, T + 1, D)
    batch, pulses, runs = start.shape

    def read(at: Tensor) -> Tensor:
        index = at.reshape(batch, -1, 1).expand(-1, -1, x.shape[2])
        return total.gather(1, index).view(batch, pulses, runs, -1).sum(2)

    return (read(end) - read(start)).to(x.dtype), (end - start).sum(-1)


def inverse_softplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))
