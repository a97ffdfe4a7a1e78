"""Learnable Pulse Accumulation: a head lays learned windows (pulses) over time, averages in each, hands them back.

With gates g, pulse weights w (softmax over a head's pulses), amplitudes a, coverage m and output gate o, for each head:

    v̄_p = Σ_t g_p,t W_V x_t / Σ_t g_p,t
    y_t  = W_O [ m_t o_t Σ_p w_p,t g_p,t a_p v̄_p / Σ_p w_p,t g_p,t ] + b_O ,      m_t = 1 − exp(−Σ_p g_p,t)

A pulse anchored to the frame has an average of its own at every frame, and a gate of one. `definition` computes just
this; `forward` moves both projections into pulse space, exactly, where they cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LpaError
from ..windows import rungs
from .base import (
    Mixed,
    Mixer,
    MixerConfig,
    Projections,
    blank_padding,
    copy_linear,
    frames_ahead,
    projections,
    split_heads,
)
from .blocks import valid_frames
from .frames import BLOCK, Anchored, Ladder, pool_band, pool_frames
from .pulses import Aperiodic, Periodic, Positional, segment_sums

EPS = 1e-6
WEIGHTS = ("frame", "utterance", "static")


@dataclass(frozen=True)
class LPAConfig(MixerConfig):
    heads: int = 4
    aperiodic: int = 4  # pulses of each family, per head
    periodic: int = 4
    positional: int = 4
    anchored: int = 0
    ladder: int = 0
    reach: int = 64  # frames either side that anchored pulses and the ladder can look at
    right: int | None = None  # fewer frames ahead than that
    kernel: int = 5  # taps of the causal convolution the aperiodic gates see through
    bases: int = 16  # sines and cosines of the positional gates
    weights: str = "frame"  # what the pulse weights depend on: frame, utterance or static
    amplitudes: bool = True
    output_gate: bool = True
    modulation: bool = True  # a tilt along each aperiodic window
    coordination: bool = True  # gates of the LPA layer before
    skip: bool = True  # output of the layer four below
    selective_init: bool = True  # start from the attention's W_V, W_O and part of W_Q
    tau: float = 0.5  # temperature; training changes the layer's own
    hard: bool = False  # gates at the limit of tau → 0

    def __post_init__(self):
        counts = (self.aperiodic, self.periodic, self.positional, self.anchored, self.ladder)
        if min(counts) < 0 or sum(counts) < 1:
            raise LpaError(f"an lpa layer needs pulses: counts {counts} must be ≥ 0 and not all 0")
        if self.weights not in WEIGHTS:
            raise LpaError(f"no pulse weights {self.weights!r}; have {', '.join(WEIGHTS)}")
        if self.tau <= 0 or self.reach < 1 or self.kernel < 1 or self.bases < 1:
            raise LpaError("tau, reach, kernel and bases of an lpa layer must be positive")


class LPA(Mixer):
    Config = LPAConfig

    def __init__(self, source: Projections, config: LPAConfig):
        super().__init__()
        c, dim = config, source.dim
        self.config, self.heads, self.width = c, c.heads, split_heads(dim, c.heads)
        self.tau, self.hard, self.pooling = c.tau, c.hard, "dense"
        self.in_recording = c.aperiodic + c.periodic + c.positional  # pulses a head, anchored to the recording
        self.in_frame = c.anchored + c.ladder
        recording = c.heads * self.in_recording
        pulses = self.in_recording + self.in_frame
        self.value = copy_linear(source.v) if c.selective_init else nn.Linear(dim, dim)
        self.out = copy_linear(source.out) if c.selective_init else nn.Linear(dim, dim)
        self.aperiodic = (
            Aperiodic(dim, c.heads * c.aperiodic, c.kernel, recording if c.coordination else 0) if c.aperiodic else None
        )
        self.periodic = Periodic(dim, c.heads * c.periodic) if c.periodic else None
        self.positional = Positional(c.heads * c.positional, c.bases) if c.positional else None
        self.anchored = Anchored(dim, c.heads, c.anchored, c.reach) if c.anchored else None
        self.ladder = Ladder(rungs(c.ladder, c.reach), c.reach) if c.ladder else None
        self.weight_bias = nn.Parameter(torch.zeros(c.heads * pulses))
        self.weight = nn.Parameter(torch.zeros(c.heads * pulses, dim)) if c.weights != "static" else None
        self.amplitude = nn.Parameter(torch.ones(c.heads, pulses)) if c.amplitudes else None
        self.gate = nn.Linear(dim, c.heads) if c.output_gate else None
        self.tilt = nn.Parameter(torch.zeros(c.heads * c.aperiodic)) if c.modulation and c.aperiodic else None
        self.skip = nn.Parameter(torch.zeros(())) if c.skip else None
        with torch.no_grad():
            if self.gate is not None:
                self.gate.weight.zero_()
                self.gate.bias.fill_(4.0)  # open: σ(4) = 0.98
            if self.aperiodic is not None and c.selective_init:
                self.aperiodic.mlp[0].get_parameter("weight").copy_(source.q.weight[: dim // 2])
        bounded = not self.in_recording and c.weights != "utterance"
        self.reach = (c.reach, c.reach) if bounded else None
        if c.right is not None:
            self.look_ahead(c.right)

    @classmethod
    def from_attention(cls, attention, config):
        source = projections(attention)
        return cls(source, config).to(source.out.weight)

    def look_ahead(self, frames: int) -> None:
        if self.reach is None:
            raise LpaError("this lpa layer hears the whole recording; what it sees ahead cannot be limited")
        self.reach = (self.config.reach, frames_ahead(frames, self.config.reach))
        for family in (self.anchored, self.ladder):
            if family is not None:
                family.look_ahead(frames)

    def mix(
        self, x: Tensor, mask: Tensor | None = None, gates: Tensor | None = None, skip: Tensor | None = None
    ) -> Mixed:
        return self._compute(x, mask, gates, skip, plain=False)

    def definition(self, x: Tensor, mask=None, gates=None, skip=None) -> Mixed:
        """The layer as its equations say it, projections over all frames; what the folded form is tested against."""
        return self._compute(x, mask, gates, skip, plain=True)

    def _compute(self, x: Tensor, mask: Tensor | None, gates: Tensor | None, skip: Tensor | None, plain: bool) -> Mixed:
        x = blank_padding(x, mask)
        valid = valid_frames(x, mask)
        tau = None if self.hard else self.tau
        weight = self._pulse_weights(x, valid)  # (B, T, H, P)
        split = [self.in_recording, self.in_frame]
        w_recording, w_frame = weight.split(split, -1)
        a_recording, a_frame = (None, None) if self.amplitude is None else self.amplitude.float().split(split, -1)
        cover = torch.full_like(weight[..., 0], self.in_frame)  # (B, T, H); a pulse anchored to the frame has gate one
        total = w_frame.sum(-1) if self.in_frame else torch.zeros_like(cover)
        broadcast = passed = None
        if self.in_recording:
            gate, tilted = self._recording_gates(x, mask, gates, tau)  # (B, T, H, P) each
            shared = w_recording * gate
            total = total + shared.sum(-1)
            cover = cover + gate.sum(-1)
            broadcast = w_recording * tilted if a_recording is None else w_recording * tilted * a_recording
            passed = (gate.sum(1) / valid.sum(1).clamp(min=1)[:, None, None]).flatten(1)  # (B, N)
        scale = -torch.expm1(-cover) / total.clamp(min=EPS)  # (B, T, H)
        if self.gate is not None:
            scale = scale * self.gate(x).float().sigmoid()
        y: Tensor | None = None
        if broadcast is not None:
            spread = (broadcast * scale.unsqueeze(-1)).to(x.dtype)
            y = (
                self._recording_plain(x, gate, spread)
                if plain
                else self._recording_folded(x, valid, gate, spread, gates)
            )
        if self.in_frame:
            w_frame = w_frame * scale.unsqueeze(-1)
            frames = self._frame_pulses(x, mask, w_frame if a_frame is None else w_frame * a_frame, plain)
            frames = frames.flatten(2)
            y = self.out(frames) if y is None else y + F.linear(frames, self.out.weight)
        assert y is not None
        if self.skip is not None and skip is not None:
            y = y + self.skip * skip
        return Mixed(blank_padding(y, mask), passed)

    def _pulse_weights(self, x: Tensor, valid: Tensor) -> Tensor:
        """Softmax over a head's pulses: (B, T, H, P) in float32."""
        if self.weight is None:
            logits = self.weight_bias.expand(*x.shape[:2], -1)
        elif self.config.weights == "utterance":
            mean = x.sum(1, dtype=torch.float32) / valid.sum(1, keepdim=True).clamp(min=1)
            logits = F.linear(mean.to(x.dtype), self.weight, self.weight_bias).unsqueeze(1).expand(-1, x.shape[1], -1)
        else:
            logits = F.linear(x, self.weight, self.weight_bias)
        return logits.float().unflatten(-1, (self.heads, -1)).softmax(-1)

    def _recording_gates(
        self, x: Tensor, mask: Tensor | None, passed: Tensor | None, tau: float | None
    ) -> tuple[Tensor, Tensor]:
        """Gates of the pulses anchored to the recording, and the same with each window's tilt: (B, T, H, P)."""
        valid = valid_frames(x, mask)
        gates, tilted = [], []
        if self.aperiodic is not None:
            gate, place = self.aperiodic.gates(x, valid, passed, tau)
            gates.append(gate)
            tilted.append(gate if self.tilt is None else gate * (1 + self.tilt.float() * place))
        if self.periodic is not None:
            gates.append(self.periodic.gates(x, valid, tau))
        if self.positional is not None:
            lengths = None if mask is None else valid.sum(1)
            gates.append(self.positional.gates(x.shape[1], lengths, tau, x.device).expand(len(x), -1, -1))

        def join(family: list[Tensor]) -> Tensor:
            joined = torch.cat([gate.unflatten(-1, (self.heads, -1)) for gate in family], -1)
            return joined if mask is None else joined * mask[:, :, None, None]

        gate = join(gates)
        return gate, gate if self.tilt is None else join(tilted + gates[1:])

    def _recording_plain(self, x: Tensor, gate: Tensor, spread: Tensor) -> Tensor:
        v = self.value(x).unflatten(-1, (self.heads, -1))  # (B, T, H, E)
        mean = torch.einsum("bthp,bthe->bhpe", gate.to(x.dtype), v)
        mean = mean / gate.sum(1).clamp(min=EPS).unsqueeze(-1).to(x.dtype)
        return self.out(torch.einsum("bthp,bhpe->bthe", spread, mean).flatten(2))

    def _recording_folded(
        self, x: Tensor, valid: Tensor, gate: Tensor, spread: Tensor, passed: Tensor | None
    ) -> Tensor:
        if self.pooling == "prefix":
            mean = self._prefix_means(x, valid, gate, passed)  # (B, N, D)
        else:
            share = gate / gate.sum(1, keepdim=True).clamp(min=EPS)
            mean = share.flatten(2).to(x.dtype).transpose(1, 2) @ x  # (B, N, D)
        mean = mean.unflatten(1, (self.heads, -1))  # (B, H, P, D)
        value = self.value.weight.unflatten(0, (self.heads, -1))  # (H, E, D)
        out = self.out.weight.T.unflatten(0, (self.heads, -1))  # (H, E, D)
        pulses = mean @ value.transpose(1, 2) + self.value.bias.unflatten(0, (self.heads, 1, -1))  # (B, H, P, E)
        return torch.baddbmm(self.out.bias, spread.flatten(2), (pulses @ out).flatten(1, 2))  # (B, T, N) @ (B, N, D)

    def _prefix_means(self, x: Tensor, valid: Tensor, gate: Tensor, passed: Tensor | None) -> Tensor:
        """Pulse means of hard gates: two prefix-sum reads for every run of frames; positional gates by their masks."""
        if not self.hard:
            raise LpaError("prefix-sum pooling needs hard gates; set hard=True")
        sums, counts = [], []
        own = valid.sum(1)  # recordings are padded at the end, so a sample's frames are the first `own`
        for family, extra in ((self.aperiodic, (passed,)), (self.periodic, ())):
            if family is not None:
                runs = family.segments(x, valid, *extra)
                runs = runs._replace(end=torch.minimum(runs.end, own[:, None, None]))
                s, n = segment_sums(x, runs)
                sums.append(s.unflatten(1, (self.heads, -1)))
                counts.append(n.unflatten(1, (self.heads, -1)))
        if self.positional is not None:
            masks = gate[..., -self.config.positional :].flatten(2)  # (B, T, N)
            sums.append((masks.to(x.dtype).transpose(1, 2) @ x).unflatten(1, (self.heads, -1)))
            counts.append(masks.sum(1).unflatten(1, (self.heads, -1)))
        counted = torch.cat([n.to(x.dtype) for n in counts], 2).clamp(min=EPS)
        return (torch.cat(sums, 2) / counted.unsqueeze(-1)).flatten(1, 2)

    def _frame_pulses(self, x: Tensor, mask: Tensor | None, weight: Tensor, plain: bool) -> Tensor:
        """Σ_p weight · window mean of the values: (B, T, H, E)."""
        v = blank_padding(self.value(x), mask).unflatten(-1, (self.heads, -1))
        windows = []
        weights = weight.split([self.config.anchored, self.config.ladder], -1)
        for family, w in zip((self.anchored, self.ladder), weights, strict=True):
            if family is not None:
                lo, hi = family.edges(x)
                windows.append((family, lo, hi, w / family.sizes(x, mask, lo, hi)))
        if plain:
            return torch.stack([pool_frames(v, lo, hi, w) for _, lo, hi, w in windows]).sum(0)
        return pool_band(v, windows, self.config.reach)

    def mflop_per_frame(self) -> float:
        c, dim = self.config, self.value.in_features
        pulses = c.heads * (self.in_recording + self.in_frame)
        flop: float = 2 * dim * (pulses if self.weight is not None else 0) + 2 * dim * c.heads * (self.gate is not None)
        flop += (
            4 * dim * c.heads * self.in_recording
        )  # pooling and broadcasting; the folded projections cost nothing a frame
        if c.aperiodic:
            flop += 2 * dim * c.kernel + dim * dim + dim * dim / 2 + dim * c.heads * c.aperiodic
        flop += 4 * c.bases * c.heads * c.positional
        if self.in_frame:
            flop += 4 * dim * dim + 4 * dim * c.heads * c.anchored
            flop += 2 * (BLOCK + 2 * c.reach) * (dim + c.heads * (c.ladder + 1))
        return flop / 1e6
