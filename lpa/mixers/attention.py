"""Attention itself, at its best, and its two bounded forms that need no training: the window and the pyramid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LpaError
from ..windows import PACE
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
from .blocks import key_blocks, query_blocks, remember, unblock, valid_frames, window_means

NEVER = -1e9  # a score no softmax will ever choose; finite, so that a row of nothing but padding stays finite too


class QueryMixer(Mixer):
    """What attention and its bounded relatives share: queries, keys and values of the attention they come from.

    Two biases move, exactly: the key's adds the same to every score of a query, so softmax drops it; the value's passes
    through weights that sum to one, so it joins the output's. Blank frames then have blank keys and values.
    """

    def __init__(self, source: Projections):
        super().__init__()
        self.heads = source.heads
        self.scale = split_heads(source.dim, source.heads) ** -0.5
        self.out = copy_linear(source.out)
        with torch.no_grad():
            self.qkv = nn.Parameter(torch.cat([source.q.weight, source.k.weight, source.v.weight]))
            self.q_bias = nn.Parameter(copy_linear(source.q).bias)
            self.out.bias.add_(source.out.weight @ copy_linear(source.v).bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, D) → queries (B, T, D), keys and values side by side (B, T, 2D)."""
        dim = x.shape[-1]
        return F.linear(x, self.qkv[:dim], self.q_bias), F.linear(x, self.qkv[dim:])

    def attend(self, q: Tensor, kv: Tensor, bias: Tensor | None) -> Tensor:
        """q (N, L, D), kv (N, S, 2D), bias broadcastable to (N, H, L, S) → (N, L, D)."""
        q, k, v = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in (q, *kv.chunk(2, -1)))
        if bias is not None:
            bias = bias.to(q.dtype).expand(q.shape[0], -1, q.shape[2], -1)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=self.scale).transpose(1, 2).flatten(2)

    def projection_mflop(self) -> float:
        return 8 * self.out.in_features**2 / 1e6


class Attention(QueryMixer):
    """Full attention on the framework's best kernel: the baseline of every table, and no member of the registry."""

    Config = MixerConfig

    @classmethod
    def from_attention(cls, attention, config=None):
        return cls(projections(attention))

    def mix(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
        q, kv = self.project(x)
        bias = None if mask is None else torch.where(mask, 0.0, NEVER)[:, None, None]
        return Mixed(blank_padding(self.out(self.attend(q, kv, bias)), mask))

    def mflop_per_frame(self) -> float:
        """Without what grows with the recording: see lpa.inspect.attention_mflop."""
        return self.projection_mflop()


@dataclass(frozen=True)
class WindowConfig(MixerConfig):
    side: int = 64  # frames either side that a frame can look at
    block: int = 32  # frames computed together; speed only
    right: int | None = None  # fewer frames ahead than that
    places: bool = False  # a learned score for every distance: for models without position embeddings


class Window(QueryMixer):
    """Sliding-window attention: every frame attends to `side` frames either side. Useful before any training."""

    Config = WindowConfig

    def __init__(self, source: Projections, config: WindowConfig):
        super().__init__(source)
        if config.side < 0 or config.block < 1:
            raise LpaError(f"a window needs side ≥ 0 and block ≥ 1, not {config.side} and {config.block}")
        self.side, self.block = config.side, config.block
        self.places = nn.Parameter(torch.zeros(self.heads, 2 * config.side + 1)) if config.places else None
        self.look_ahead(config.side if config.right is None else config.right)

    @classmethod
    def from_attention(cls, attention, config):
        return cls(projections(attention), config)

    def look_ahead(self, frames: int) -> None:
        self.right = frames_ahead(frames, self.side)
        self.reach = (self.side, self.right)

    def mix(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
        batch, frames, _ = x.shape
        q, kv = self.project(blank_padding(x, mask))
        valid = key_blocks(valid_frames(x, mask).unsqueeze(-1), self.block, self.side).squeeze(
            -1
        )  # (N, block + 2·side)
        offset = torch.arange(valid.shape[1], device=x.device) - torch.arange(self.block, device=x.device)[:, None]
        seen = valid[:, None] & (offset >= 0) & (offset <= self.side + self.right)  # (N, block, block + 2·side)
        y = self.attend(
            query_blocks(q, self.block, self.side),
            key_blocks(kv, self.block, self.side),
            self.scores(offset, seen),
        )
        return Mixed(blank_padding(self.out(unblock(y, batch, frames)), mask))

    def scores(self, offset: Tensor, seen: Tensor) -> Tensor:
        """What a key's place adds, (·, H or 1, L, S); offset (L, S) is from the window's start, seen (·, L, S)."""
        bias = torch.where(seen, 0.0, NEVER).unsqueeze(1)
        return bias if self.places is None else bias + PACE * self.places[:, offset.clamp(0, 2 * self.side)]

    def add_places(self, scores: Tensor) -> None:
        """Add to the places' scores those of distances −R … R, (H, 2R + 1); beyond R the last one counts."""
        reach = scores.shape[1] // 2
        distance = torch.arange(-self.side, self.side + 1, device=scores.device).clamp(-reach, reach)
        assert self.places is not None
        self.places.data += scores[:, distance + reach] / PACE

    def definition(self, x: Tensor, mask: Tensor | None = None) -> Mixed:
        """Full attention with everything outside the window masked: n×n, for the tests."""
        q, kv = self.project(blank_padding(x, mask))
        t = torch.arange(x.shape[1], device=x.device)
        offset = t - t[:, None]
        seen = (-self.side <= offset) & (offset <= self.right) & valid_frames(x, mask)[:, None]
        return Mixed(blank_padding(self.out(self.attend(q, kv, self.scores(offset + self.side, seen))), mask))

    def mflop_per_frame(self) -> float:
        return self.projection_mflop() + 4 * self.out.in_features * (2 * self.side + 1) / 1e6


@dataclass(frozen=True)
class PyramidConfig(MixerConfig):
    block: int = 16  # frames that share their windows, and see one another frame by frame
    pieces: tuple[int, ...] = (2, 2, 4, 8)  # how the blocks beside it are cut, nearest piece first; together one block
    steps: tuple[int, ...] = (1, 2, 4, 8)  # widths of the windows beyond that, in blocks
    right: int | None = None  # see no window that ends more frames than this after the block
    places: bool = False  # a learned score for every window: for models without position embeddings


class Pyramid(QueryMixer):
    """Queries against the pooled keys of a ladder of windows: fine near the frame, coarse further out.

    A frame sees its own block frame by frame, the blocks beside it in pieces, and beyond them ever wider windows. A
    window stands for its frames with their mean key and mean value, and counts for as many as it holds (the log of
    their number in the score).
    """

    Config = PyramidConfig
    AT_ONCE = 64  # blocks whose key lists are laid out together on the CPU: they stay in the cache
    widths: Tensor
    ends: Tensor
    piece_means: Tensor

    def __init__(self, source: Projections, config: PyramidConfig):
        super().__init__(source)
        if sum(config.pieces) != config.block or min(config.pieces + config.steps, default=1) < 1:
            raise LpaError(f"pieces {config.pieces} must be positive and add up to the block of {config.block}")
        self.config = config
        self.covers: dict = {}
        self.span = config.block * (1 + sum(config.steps))
        self.look_ahead(self.span if config.right is None else config.right)
        lo, hi = self.windows()
        self.places = nn.Parameter(torch.zeros(self.heads, config.block, len(lo))) if config.places else None
        self.register_buffer("widths", (hi - lo).float(), persistent=False)
        self.register_buffer("ends", hi.contiguous(), persistent=False)
        self.register_buffer("piece_means", self._piece_means(), persistent=False)

    @classmethod
    def from_attention(cls, attention, config):
        source = projections(attention)
        return cls(source, config).to(source.out.weight.device)

    def look_ahead(self, frames: int) -> None:
        """Beyond the frame's own block, which it always sees."""
        self.right = frames_ahead(frames, self.span)
        last = self.config.block - 1
        self.reach = (self.span + last, self.right + last)
        self.covers.clear()

    def windows(self) -> tuple[Tensor, Tensor]:
        """First frame and end of every window, counted from the start of the frame's block: two (P,) tensors."""
        c = self.config
        edges = [(j, j + 1) for j in range(c.block)]
        widths = c.pieces + tuple(c.block * s for s in c.steps)
        for sign in (-1, 1):
            edge = 0 if sign < 0 else c.block
            for width in widths:
                edges.append((edge - width, edge) if sign < 0 else (edge, edge + width))
                edge += sign * width
        lo, hi = torch.tensor(edges).T
        return lo, hi

    def add_places(self, scores: Tensor) -> None:
        """Add to the places' scores those of distances −R … R, (H, 2R + 1): a window weighs as its frames would."""
        reach = scores.shape[1] // 2
        assert self.places is not None
        for window, (lo, hi) in enumerate(zip(*(edges.tolist() for edges in self.windows()), strict=True)):
            frame = torch.arange(self.config.block, device=scores.device).unsqueeze(1)
            distance = torch.arange(lo, hi, device=scores.device) - frame  # (block, width)
            seen = scores[:, distance.clamp(-reach, reach) + reach]  # (H, block, width)
            self.places.data[:, :, window] += (seen.logsumexp(-1) - math.log(hi - lo)) / PACE

    def definition(self, x: Tensor, mask: Tensor | None = None) -> Mixed:
        """Every frame's windows one by one, each the difference of two prefix sums, in float64."""
        q, kv = self.project(blank_padding(x, mask))
        lo, hi = (edge.to(x.device) for edge in self.windows())
        start = torch.arange(x.shape[1], device=x.device).unsqueeze(1) // self.config.block * self.config.block
        pooled, counts = window_means(kv, valid_frames(x, mask), start + lo, start + hi)  # (B, T, P, 2D), (B, T, P)
        k, v = (a.unflatten(-1, (self.heads, -1)) for a in pooled.chunk(2, -1))
        q = q.double().unflatten(-1, (self.heads, -1))  # (B, T, H, E)
        scores = torch.einsum("bthe,btphe->bthp", q, k) * self.scale
        seen = (counts > 0) & (hi <= self.config.block + self.right)
        scores += torch.where(seen, counts.clamp(min=1).log(), NEVER).unsqueeze(2)
        if self.places is not None:
            scores += PACE * self.places.transpose(0, 1)[torch.arange(x.shape[1]) % self.config.block]  # (T, H, P)
        y = torch.einsum("bthp,btphe->bthe", scores.softmax(-1), v).flatten(2).to(x.dtype)
        return Mixed(blank_padding(self.out(y), mask))

    def mix(self, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
        batch, frames, _ = x.shape
        block = self.config.block
        pad = -frames % block
        x = blank_padding(x, mask)
        q, kv = self.project(F.pad(x, (0, 0, 0, pad)) if pad else x)
        near = kv.unflatten(1, (-1, block))  # (B, n, block, 2D)
        if mask is None:
            own = x.new_ones(1, frames, dtype=torch.bool)
            cover, bias = remember(self.covers, (frames, x.device), lambda: self._cover(own, pad))
            bias = bias.expand(batch, -1, -1, -1, -1)
        else:
            cover, bias = self._cover(mask, pad)
        parts = [near, *(mean / share.to(mean) for mean, share in zip(self._far_means(near), cover, strict=True))]
        q = q.unflatten(1, (-1, block))
        together = self.AT_ONCE if x.device.type == "cpu" else q.shape[1]
        done = []
        for at in range(0, q.shape[1], together):
            some = slice(at, at + together)
            keys = torch.cat([part[:, some] for part in parts], 2)  # (B, n', P, 2D)
            y = self.attend(q[:, some].flatten(0, 1), keys.flatten(0, 1), self.scores(bias[:, some].flatten(0, 1)))
            done.append(y.view(batch, -1, y.shape[-1]))
        return Mixed(blank_padding(self.out(torch.cat(done, 1)[:, :frames]), mask))

    def scores(self, bias: Tensor) -> Tensor:
        """What the number of a window's frames adds, (N, 1, 1, P), and its place: (N, H or 1, block or 1, P)."""
        return bias if self.places is None else bias + PACE * self.places

    def _cover(self, valid: Tensor, pad: int) -> tuple[list[Tensor], Tensor]:
        """The share of each far window that is in the recording, and what the number of its frames adds to a score."""
        own = F.pad(valid, (0, pad)).to(torch.float32).view(len(valid), -1, self.config.block, 1)
        cover = self._far_means(own)
        counts = torch.cat([own, *cover], 2).squeeze(-1) * self.widths  # (B, n, P)
        seen = (counts > 0.5) & (self.ends <= self.config.block + self.right)
        bias = torch.where(seen, counts.clamp(min=1).log(), NEVER)[..., None, None, :]
        return [share.clamp(min=1e-6) for share in cover], bias

    def _far_means(self, blocks: Tensor) -> list[Tensor]:
        """blocks (B, n, block, C) → means of every block's far windows, in the order of `windows`: each (B, n, ·, C).

        Frames outside the recording count as zeros here. Pieces are one small product within each block; wider windows
        are averages of block means, so their cost hardly counts.
        """
        n, count, span = blocks.shape[1], len(self.config.pieces), sum(self.config.steps)
        cut = self.piece_means.to(blocks.dtype).expand(len(blocks) * n, -1, -1)
        pieces = torch.bmm(cut, blocks.flatten(0, 1)).unflatten(0, (len(blocks), n))  # (B, n, 2·count, C)
        pieces = F.pad(pieces, (0, 0, 0, 0, 1, 1))
        whole = F.pad(blocks.mean(2, dtype=torch.float32), (0, 0, span + 1, span + 1))  # (B, n + 2·span + 2, C)
        slid = {1: whole}
        left, right = [pieces[:, :n, :count]], [pieces[:, 2:, count:]]
        edge = 1  # blocks between the frame's own and the nearer end of the next window
        for step in self.config.steps:
            means = sliding_means(slid, step)
            start = span + 1
            left.append(means[:, start - edge - step :][:, :n, None].to(blocks.dtype))
            right.append(means[:, start + 1 + edge :][:, :n, None].to(blocks.dtype))
            edge += step
        return left + right

    def _piece_means(self) -> Tensor:
        """(2·count, block): row by row the mean over each piece, for the block before and then for the block after."""
        rows, edge = [], 0
        for width in self.config.pieces:
            row = torch.zeros(self.config.block)
            row[edge : edge + width] = 1 / width
            rows.append(row)
            edge += width
        after = torch.stack(rows)
        return torch.cat([after.flip(1), after])

    def mflop_per_frame(self) -> float:
        dim, far = self.out.in_features, 2 * len(self.config.pieces)
        return self.projection_mflop() + (4 * dim * len(self.widths) + 4 * dim * far) / 1e6


def sliding_means(known: dict[int, Tensor], width: int) -> Tensor:
    """Mean over `width` neighbours of known[1] (B, n, C), from means over about half as many: no long sums to round."""
    if width not in known:
        half = width // 2
        a, b = sliding_means(known, half), sliding_means(known, width - half)
        known[width] = torch.lerp(a[:, : b.shape[1] - half], b[:, half:], (width - half) / width)
    return known[width]
