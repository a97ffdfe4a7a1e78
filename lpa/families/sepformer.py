"""SepFormer (C. Subakan et al., 2021) for one speaker: noisy audio in, clean audio out. Speechbrain's parameter names.

Audio becomes frames (kernel 16, step 8); frames become chunks of K = 250 that overlap by half. A dual-path block mixes
frames within every chunk (intra), then the chunks with one another (inter). A mask on the frames comes of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LpaError
from ..mixers.base import exactly
from ..plan import Site
from ..tokens import Tokens
from .base import Flow, MixerSite, Output, SpeechModel, attendable, check_audio, own_frames, padding_mask

KINDS = ("intra", "inter")
AT_ONCE = 1 << 13  # frames that a path mixes together where no gradient is wanted: what caches hold
AT_ONCE_ON_GPU = 1 << 18  # it wants more to do


@dataclass(frozen=True)
class Config:
    """The published enhancement models are all of this but the sample rate."""

    width: int = 256
    heads: int = 8
    ffn: int = 1024
    blocks: int = 2  # dual-path blocks
    intra_layers: int = 8
    inter_layers: int = 8
    kernel: int = 16  # samples; half of it is the step
    chunk: int = 250  # frames; half of it is the step
    norm: str = "ln"  # around a path: ln over the whole recording, cln over the channels of each frame
    norm_before: bool = True  # in a layer: before attention and feed-forward, or after
    intra_positions: bool = True
    inter_positions: bool = True
    dropout: float = 0.0
    sample_rate: int = 16000

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in asdict(self).items() if isinstance(v, int) and not isinstance(v, bool)}
        if small := [k for k, v in sizes.items() if v < 1]:
            raise LpaError(f"sepformer: {', '.join(small)} must be 1 or more")
        if self.norm not in ("ln", "cln"):
            raise LpaError(f"sepformer: no norm {self.norm!r}; have ln, cln")
        if odd := [k for k in ("width", "kernel", "chunk") if sizes[k] % 2]:
            raise LpaError(f"sepformer: {', '.join(odd)} must be even")
        if self.width % self.heads:
            raise LpaError(f"sepformer: {self.heads} heads do not divide a width of {self.width}; choose heads that do")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise LpaError(f"sepformer has no setting {', '.join(unknown)}; have {', '.join(known)}")
        return cls(**data)


# --- layers


class Attention(nn.Module):
    """Self-attention with torch's parameter layout, one matrix for W_Q, W_K and W_V, and our names for its parts."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.num_heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    @property
    def q_proj(self) -> nn.Linear:
        return self._part(0)

    @property
    def k_proj(self) -> nn.Linear:
        return self._part(1)

    @property
    def v_proj(self) -> nn.Linear:
        return self._part(2)

    def _part(self, index: int) -> nn.Linear:
        """A linear layer on this third of the weights themselves, no copy: what mixers are built from."""
        dim = self.out_proj.in_features
        part = nn.Linear(dim, dim, device="meta")
        part.weight = nn.Parameter(self.in_proj_weight.detach().chunk(3)[index])
        part.bias = nn.Parameter(self.in_proj_bias.detach().chunk(3)[index])
        return part

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        """x (B, T, D), mask (B, T) True where a frame is the sample's own."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (a.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for a in qkv.chunk(3, -1))  # (B, H, T, E)
        seen = None if mask is None else attendable(mask)[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(y.transpose(1, 2).flatten(2)), None


class SelfAttention(nn.Module):
    """Holds the site: `att` is the attention, or the mixer that took its place."""

    def __init__(self, config: Config):
        super().__init__()
        self.att = Attention(config.width, config.heads, config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.att(x, mask=mask)[0]


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm_before = config.norm_before
        self.self_att = SelfAttention(config)
        self.pos_ffn = named(
            ffn=nn.Sequential(
                nn.Linear(config.width, config.ffn),
                nn.ReLU(inplace=True),
                nn.Dropout(config.dropout),
                nn.Linear(config.ffn, config.width),
            )
        )
        self.norm1 = named(norm=nn.LayerNorm(config.width, eps=1e-6))
        self.norm2 = named(norm=nn.LayerNorm(config.width, eps=1e-6))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.norm_before:
            x = x + self.dropout(self.self_att(self.norm1(x), mask))
            return x + self.dropout(self.pos_ffn(self.norm2(x)))
        x = self.norm1(x + self.dropout(self.self_att(x, mask)))
        return self.norm2(x + self.dropout(self.pos_ffn(x)))


class Layers(nn.Module):
    def __init__(self, config: Config, count: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(count))
        self.norm = named(norm=nn.LayerNorm(config.width, eps=1e-6))


class Stack(nn.Module):
    """One path of a dual-path block: a stack of layers over frames, or over chunks."""

    def __init__(self, config: Config, count: int, positions: bool, flow: Flow):
        super().__init__()
        self.positions, self.flow = positions, flow
        self.mdl = Layers(config, count)

    def forward(self, x: Tensor, mask: Tensor | None, at_once: int | None = None) -> Tensor:
        """x (B, T, D), mask (B, T) → (B, T, D). Mixers pass on what they do within a path, not from one to the next.

        at_once: frames of all sequences together beyond which they are heard some at a time; None: all, always.
        """
        if at_once is not None and len(x) > (count := sequences(at_once, x.shape[1])):
            y = torch.empty_like(x)
            for i in range(0, len(x), count):
                y[i : i + count] = self(x[i : i + count], None if mask is None else mask[i : i + count])
            return y
        if self.positions:
            x = x + position_table(x.shape[1], x.shape[2], x.device).to(x.dtype)
        self.flow.begin(mask)
        for layer in self.mdl.layers:
            x = layer(x, mask)
        self.flow.end()
        return self.mdl.norm(x)


class Norm(nn.Module):
    """Over everything of a recording (ln), or over the channels of every frame (cln, which needs no future)."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        self.whole = kind == "ln"
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, T, ..., C), mask (B, T): what is not the sample's own is not counted."""
        if not self.whole:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-8)
        if mask is None:
            return F.layer_norm(x, x.shape[1:], eps=1e-8) * self.weight + self.bias
        axes = tuple(range(1, x.dim()))
        own = mask.view(*mask.shape, *[1] * (x.dim() - 2))
        count = (own.sum(axes, keepdim=True) * x[0, 0].numel()).clamp(min=1)
        mean = torch.where(own, x, 0).sum(axes, keepdim=True) / count
        variance = torch.where(own, x - mean, 0).square().sum(axes, keepdim=True) / count
        return (x - mean) * torch.rsqrt(variance + 1e-8) * self.weight + self.bias


class Block(nn.Module):
    """Within the chunks, then across them, each with a norm and a way around."""

    def __init__(self, config: Config, flow: Flow):
        super().__init__()
        self.intra_mdl = Stack(config, config.intra_layers, config.intra_positions, flow)
        self.inter_mdl = Stack(config, config.inter_layers, config.inter_positions, flow)
        self.intra_norm = Norm(config.width, config.norm)
        self.inter_norm = Norm(config.width, config.norm)

    def forward(self, x: Tensor, mask: Tensor | None, at_once: int | None = None) -> tuple[Tensor, Tensor]:
        """x (B, S, K, D), mask (B, S) True where a chunk is the sample's own → after the first path, after both."""
        size = x.shape[:2]
        within = self.intra_mdl(x.flatten(0, 1), None, at_once).unflatten(0, size)
        x = x + self.intra_norm(within, mask)
        rows = x.transpose(1, 2)  # (B, K, S, D)
        per_row = None if mask is None else mask.repeat_interleave(x.shape[2], 0)  # (B·K, S)
        across = self.inter_mdl(rows.flatten(0, 1), per_row, at_once).view(rows.shape).transpose(1, 2)
        return x, x + self.inter_norm(across, mask)

    def overwrite(self, x: Tensor, mask: Tensor | None, at_once: int) -> None:
        """What `forward` gives after both, in the place of x: a long recording is in memory once.

        Only with norms of each frame's own: then no sequence of a path has anything to do with another.
        """
        for number, recording in enumerate(x):  # (S, K, D)
            for part in recording.split(sequences(at_once, recording.shape[1])):
                part += self.intra_norm(self.intra_mdl(part, None), None)
            rows = recording.transpose(0, 1)  # (K, S, D)
            for part in rows.split(sequences(at_once, rows.shape[1])):
                own = None if mask is None else mask[number].expand(len(part), -1)
                part += self.inter_norm(self.inter_mdl(part.contiguous(), own), None)


class MaskNet(nn.Module):
    """Frames to a mask on them, through chunks."""

    def __init__(self, config: Config, flow: Flow):
        super().__init__()
        width = config.width
        self.chunk = config.chunk
        self.norm = Norm(width, config.norm)
        self.conv1d = nn.Conv1d(width, width, 1, bias=False)
        self.dual_mdl = nn.ModuleList(Block(config, flow) for _ in range(config.blocks))
        self.conv2d = nn.Conv2d(width, width, 1)
        self.end_conv1x1 = nn.Conv1d(width, width, 1, bias=False)
        self.prelu = nn.PReLU()
        self.output = nn.Sequential(nn.Conv1d(width, width, 1), nn.Tanh())
        self.output_gate = nn.Sequential(nn.Conv1d(width, width, 1), nn.Sigmoid())

    def forward(
        self,
        frames: Tensor,
        lengths: Tensor | None,
        after: list[Tensor] | None = None,
        at_once: int | None = None,
    ) -> Tensor:
        """frames (B, L, D), lengths (B,) the frames that are each sample's own, or None: all → mask (B, L, D).

        `after` is given what every path made of the frames (B, L, D). `at_once`: as in a path; where no gradient is
        wanted, for what was computed is overwritten.
        """
        count = frames.shape[1]
        own = None if lengths is None else own_frames(lengths, count)
        x = pointwise(self.norm(frames, own), self.conv1d)
        if own is not None:
            x = x.masked_fill(~own.unsqueeze(-1), 0)  # as beyond a single sample's end
        x = self.split(x)  # (B, S, K, D)
        chunks = None if lengths is None else own_frames(self.chunks(lengths), x.shape[1])
        for block in self.dual_mdl:
            if at_once is not None and after is None and not self.norm.whole:
                block.overwrite(x, chunks, at_once)  # type: ignore[operator]
                continue
            within, x = block(x, chunks, at_once)
            if after is not None:
                after += [self.join(path)[:, :count] for path in (within, x)]
            del within  # as large as x
        if at_once is None:
            x = pointwise(F.prelu(x, self.prelu.weight), self.conv2d)
        else:
            for part in (part for recording in x for part in recording.split(sequences(at_once, self.chunk))):
                part.copy_(pointwise(F.prelu(part, self.prelu.weight), self.conv2d))
        x = self.join(x)[:, :count]
        x = torch.tanh(pointwise(x, self.output[0])) * torch.sigmoid(pointwise(x, self.output_gate[0]))
        return torch.relu(pointwise(x, self.end_conv1x1))

    @property
    def layers(self) -> list[Layer]:
        """In the order of computation, as the sites are."""
        paths = [path for block in self.dual_mdl for path in (block.intra_mdl, block.inter_mdl)]  # type: ignore[union-attr]
        return [layer for path in paths for layer in path.mdl.layers]  # type: ignore[union-attr]

    def chunks(self, frames):
        """How many chunks cover so many frames, half a chunk of silence before them and at least that after."""
        return 2 * ((frames + self.chunk // 2) // self.chunk + 1)

    def split(self, x: Tensor) -> Tensor:
        """(B, L, D) → chunks (B, S, K, D), each half a chunk after the last."""
        half = self.chunk // 2
        after = (self.chunks(x.shape[1]) + 1) * half - half - x.shape[1]
        x = F.pad(x, (0, 0, half, after))
        return x.unfold(1, self.chunk, half).transpose(2, 3).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """Chunks added up where they overlap: (B, S, K, D) → (B, (S − 1)·K/2, D)."""
        half = self.chunk // 2
        return (x[:, 1:, :half] + x[:, :-1, half:]).flatten(1, 2)


class Net(nn.Module):
    """The three parts that a speechbrain checkpoint has files of."""

    encoder: Any
    decoder: Any

    def __init__(self, config: Config, flow: Flow):
        super().__init__()
        step = config.kernel // 2
        self.encoder = named(conv1d=nn.Conv1d(1, config.width, config.kernel, step, bias=False))
        self.masknet = MaskNet(config, flow)
        self.decoder = nn.ConvTranspose1d(config.width, 1, config.kernel, step, bias=False)

    # Both convolutions are products with overlapping pieces of audio: one quick call each, in training as well.

    def frame(self, audio: Tensor) -> Tensor:
        """audio (B, S) → frames (B, L, D)"""
        weight = self.encoder.conv1d.weight.squeeze(1)  # (D, kernel)
        return torch.relu(F.linear(audio.unfold(1, weight.shape[1], weight.shape[1] // 2), weight))

    def sound(self, frames: Tensor) -> Tensor:
        """frames (B, L, D) → audio (B, (L + 1)·step)"""
        first, second = (frames @ self.decoder.weight.squeeze(1)).chunk(2, -1)  # (B, L, step) each
        return (F.pad(first, (0, 0, 0, 1)) + F.pad(second, (0, 0, 1, 0))).flatten(1)


# --- the model


@dataclass
class Enhanced(Output):
    """An output whose result is audio: there are no logits."""

    audio: Tensor  # (B, S) clean, whole frames of it


@dataclass(frozen=True)
class Settings:
    """What any model is asked for."""

    head: bool = False  # no CTC head: it gives audio


class SepFormer(SpeechModel):
    """A SepFormer as the rest of the package sees it: called with audio, its attention sites listed and replaceable."""

    task: ClassVar[str] = "enhance"
    Settings = Settings
    config: Config

    def __init__(self, config: Config):
        flow = Flow()
        super().__init__("sepformer", Net(config, flow), config, Settings(), Tokens())  # an alphabet that nobody reads
        self.flow = flow
        self.sample_rate, self.frame_rate = config.sample_rate, 2 * config.sample_rate / config.kernel
        self.eval()

    @classmethod
    def create(cls, family: str, config: dict[str, Any], tokens: Tokens | None = None) -> SepFormer:
        """A model with fresh weights, in eval mode. `config`: the settings that differ from the published models'."""
        return cls(Config.from_dict(config))

    def front(self, audio: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Where no lengths go in, those that come out are on the CPU: that nothing is padded is seen without a wait."""
        whole = lengths is None
        lengths = check_audio(audio, lengths, self.config.kernel)
        with exactly(audio):
            frames = self.net.frame(audio.to(self.dtype))  # (B, L, D)
        count = frames.shape[1]
        if whole:
            return frames, torch.full((len(audio),), count)
        lengths = self.frames(lengths)
        own = padding_mask(lengths, count)
        return frames if own is None else frames.masked_fill(~own.unsqueeze(-1), 0), lengths

    def encode(self, features: Tensor, lengths: Tensor, hidden: bool = False, at_once: int | None = None) -> Enhanced:
        padded = padding_mask(lengths, features.shape[1]) is not None
        lengths = lengths.to(features.device)
        after: list[Tensor] = []
        mask = self.net.masknet(features, lengths if padded else None, after if hidden else None, at_once)
        with exactly(features):
            clean = features * mask.to(features.dtype)
            return Enhanced(None, lengths, clean, after, self.net.sound(clean))

    def clean(self, audio: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Noisy audio (B, S), own samples (B,) → clean audio (B, S), zero beyond its own samples.

        In a padded batch every sample gives what it gives alone. The scale of the output is the model's own: it was
        trained without one. The samples after the last whole frame, fewer than a step, are zero. Where no gradient is
        wanted the layers are run on some sequences at a time, so that memory is little more than one copy of them.
        """
        at_once = AT_ONCE if audio.device.type == "cpu" else AT_ONCE_ON_GPU
        y = self.encode(*self.front(audio, lengths), at_once=None if torch.is_grad_enabled() else at_once).audio
        return F.pad(y, (0, audio.shape[1] - y.shape[1]))

    def frames(self, samples):
        """Frames for that many samples: a number, or a tensor of lengths."""
        found = (samples - self.config.kernel) // (self.config.kernel // 2) + 1
        return found.clamp(min=0) if isinstance(found, Tensor) else max(0, found)

    @property
    def encoder(self) -> Any:
        return self.net.masknet

    @property
    def width(self) -> tuple[int, int]:
        return self.config.width, self.config.heads

    def preparation(self) -> dict[str, Any]:
        return {"kind": "waveform", "normalise": False}

    def sites(self, kind: str = "") -> list[Site]:
        """Every place where attention sits, or sat, in the order of computation; `kind`: only intra, or only inter."""
        if kind not in ("", *KINDS):
            raise LpaError(f"no kind of site {kind!r}; have {', '.join(KINDS)}")
        c = self.config
        found: list[Site] = []
        for block in range(c.blocks):
            for name, count in zip(KINDS, (c.intra_layers, c.inter_layers), strict=True):
                for layer in range(count):
                    path = f"masknet.dual_mdl.{block}.{name}_mdl.mdl.layers.{layer}.self_att.att"
                    found.append(Site(len(found), path, c.width, c.heads))
        return [site for site in found if f"{kind}_mdl" in site.path]

    def sequence(self, site: Site, samples: int) -> tuple[int, float]:
        """Chunks overlap by half, so that every frame is mixed twice."""
        within = f".{KINDS[0]}_mdl." in site.path
        return self.config.chunk if within else self.encoder.chunks(self.frames(samples)), 2 * self.frame_rate

    def base(self) -> dict[str, Any]:
        """The settings that `create` rebuilds the unconverted network from."""
        return asdict(self.config)

    @property
    def grid(self) -> int:
        """Samples in a chunk: a part of a recording that begins at a multiple of it is cut into the same chunks."""
        return self.config.chunk * self.config.kernel // 2

    @property
    def reach(self) -> int | None:
        """Samples that an output sample can depend on, before and after it; None: the whole recording."""
        c = self.config
        if c.norm == "ln" or c.inter_positions:
            return None
        chunks = 0
        for site in self.sites("inter"):
            module = self.net.get_submodule(site.path)
            span = module.mixer.reach if isinstance(module, MixerSite) else None
            if span is None:
                return None
            chunks += max(span)
        frames = (c.blocks + 1) * c.chunk + chunks * (c.chunk // 2)  # every path within chunks, and their overlap
        return (frames + 2) * c.kernel // 2


def sequences(frames: int, length: int) -> int:
    """How many sequences of a length make so many frames, one at least."""
    return max(1, frames // length)


def named(**modules: nn.Module) -> nn.Sequential:
    """Modules in sequence under names."""
    return nn.Sequential(OrderedDict(modules))


def pointwise(x: Tensor, conv: nn.Module) -> Tensor:
    """A convolution of width 1 over x (..., C), channels last."""
    return F.linear(x, conv.weight.flatten(1), conv.bias)  # type: ignore[operator, arg-type]


def position_table(count: int, width: int, device: torch.device) -> Tensor:
    """(count, width) sines and cosines of the position, for any count."""
    rates = torch.exp(torch.arange(0, width, 2, device=device).float() * -(math.log(10000.0) / width))
    angles = torch.arange(count, device=device).float().unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
