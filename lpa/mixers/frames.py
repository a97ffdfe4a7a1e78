"""The gate families anchored to the frame: anchored pulses (offset and width predicted) and the ladder (both fixed).

Around frame t pulse p averages the values in [t + lo, t + hi), where frame s fills [s, s + 1). The definition reads an
interpolated prefix sum at both edges. The band form writes the same weights as rows over the bounded neighbourhood and
multiplies block by block: dense products, no gathers of values, no loop over pulses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..windows import rungs
from .base import exactly
from .blocks import key_blocks, prefix_sum, query_blocks, remember, valid_frames

BLOCK = 64  # frames of the band form computed together


class Anchored(nn.Module):
    """Windows whose offset and half-width follow from the frame they belong to, never outside the reach."""

    def __init__(self, dim: int, heads: int, count: int, reach: int):
        super().__init__()
        self.heads, self.count, self.reach, self.right = heads, count, reach, reach
        self.place = nn.Linear(dim, 2 * heads * count)
        lo, hi = torch.tensor(rungs(count, reach), dtype=torch.float32).T
        half = ((hi - lo - 1) / 2).clamp(0.02 * reach, 0.9 * reach)
        offset = ((lo + hi - 1) / 2 / (reach - half)).clamp(-0.98, 0.98)
        start = torch.stack([torch.atanh(offset), torch.logit(half / reach)])  # (2, P)
        with torch.no_grad():
            self.place.weight.zero_()
            self.place.bias.copy_(start[:, None].expand(-1, heads, -1).flatten())

    def edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """lo, hi (B, T, H, P) in float32, counted from the frame itself; −reach ≤ lo ≤ hi ≤ right + 1."""
        with exactly(x):
            raw = F.linear(x.float(), self.place.weight.float(), self.place.bias.float())
        raw = raw.unflatten(-1, (2, self.heads, self.count))
        half = self.reach * raw[..., 1, :, :].sigmoid()
        offset = (self.reach - half) * raw[..., 0, :, :].tanh()
        lo, hi = offset - half, offset + half + 1
        return (lo, hi) if self.right == self.reach else (lo.clamp(max=self.right + 1), hi.clamp(max=self.right + 1))

    def look_ahead(self, frames: int) -> None:
        self.right = min(self.reach, frames)

    def sizes(self, x: Tensor, mask: Tensor | None, lo: Tensor, hi: Tensor) -> Tensor:
        return covered(valid_frames(x, mask), lo, hi)

    def rows(self, lo: Tensor, hi: Tensor, weight: Tensor) -> Tensor:
        """Rows of the band: a step up and one down at each window's edges, then a running sum over the taps."""
        reach, taps = self.reach, BLOCK + 2 * self.reach
        lo, hi, weight = (head_blocks(a, reach) for a in (lo, hi, weight))  # (B·H·n, BLOCK, P)
        at = torch.arange(BLOCK, device=lo.device).unsqueeze(1) + reach
        steps = lo.new_zeros(*lo.shape[:2], taps + 2)
        for edge, sign in ((lo, 1.0), (hi, -1.0)):
            whole = edge.floor()
            index, part = whole.long() + at, edge - whole
            steps = steps.scatter_add(2, index, sign * weight * (1 - part))
            steps = steps.scatter_add(2, index + 1, sign * weight * part)
        tap = torch.arange(taps, device=lo.device) - at  # past the last edge a running sum leaves its rounding:
        return steps.cumsum(2)[..., :taps] * ((tap >= -reach) & (tap <= self.right))  # that may not leak


class Ladder(nn.Module):
    """Windows of fixed offset and width. Only their weights follow the content."""

    lo: Tensor
    hi: Tensor
    boxes: Tensor  # (BLOCK, P, taps): each window's indicator, for every place in a block

    def __init__(self, windows: list[tuple[int, int]], reach: int):
        super().__init__()
        lo, hi = torch.tensor(windows).T
        tap = torch.arange(BLOCK + 2 * reach) - torch.arange(BLOCK).view(-1, 1, 1) - reach
        boxes = (tap >= lo.view(1, -1, 1)) & (tap < hi.view(1, -1, 1))
        self.reach = reach
        self.counts: dict = {}
        self.register_buffer("boxes", boxes.float(), persistent=False)
        self.register_buffer("lo", lo.contiguous(), persistent=False)
        self.register_buffer("hi", hi.contiguous(), persistent=False)

    def look_ahead(self, frames: int) -> None:
        """Windows end no later; those that begin later are empty."""
        with torch.no_grad():
            tap = torch.arange(self.boxes.shape[2]) - torch.arange(BLOCK).view(-1, 1, 1) - self.reach
            self.boxes *= (tap <= frames).to(self.boxes.device)
            self.lo.clamp_(max=frames + 1)
            self.hi.clamp_(max=frames + 1)
        self.counts.clear()

    def edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As whole numbers in float32, (1, 1, 1, P): the same for every frame and head."""
        return self.lo.float().view(1, 1, 1, -1), self.hi.float().view(1, 1, 1, -1)

    def sizes(self, x: Tensor, mask: Tensor | None, lo: Tensor, hi: Tensor) -> Tensor:
        if mask is not None:
            return covered(mask, lo, hi)
        own = x.new_ones(1, x.shape[1], dtype=torch.bool)
        return remember(self.counts, (x.shape[1], x.device), lambda: covered(own, lo, hi))

    def rows(self, lo: Tensor, hi: Tensor, weight: Tensor) -> Tensor:
        """Rows of the band: one product of the weights with the windows' indicators."""
        blocks = head_blocks(weight, self.reach).transpose(0, 1)  # (BLOCK, B·H·n, P)
        return torch.bmm(blocks, self.boxes.to(weight.dtype)).transpose(0, 1)


def read_prefix(total: Tensor, edge: Tensor) -> Tensor:
    """An interpolated prefix sum (B, T + 1, …) at t + edge (B, T, …, P), by linear interpolation between frames.

    The whole part of an edge moves the index and only its fraction is rounded, so that length costs no precision.
    total (B, T + 1) gives (B, T, H, P); total (B, T + 1, H, E) gives (B, T, H, P, E).
    """
    batch, frames = edge.shape[:2]
    whole = edge.floor()
    t = torch.arange(frames, device=edge.device).view(1, -1, 1, 1)
    index = whole.long() + t
    part = (edge - whole).to(total.dtype)
    inside = (index >= 0) & (index < frames)  # beyond the ends the sum is flat: nothing to interpolate
    low, high = index.clamp(0, frames), (index + 1).clamp(0, frames)
    row = torch.arange(batch, device=edge.device).view(-1, 1, 1, 1)
    part = torch.where(inside, part, 0)
    if total.dim() == 2:
        a, b = total[row, low], total[row, high]
        return a + part * (b - a)
    head = torch.arange(total.shape[2], device=edge.device).view(1, 1, -1, 1)
    a, b = total[row, low, head], total[row, high, head]
    return a + part.unsqueeze(-1) * (b - a)


def covered(valid: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """How many of the sample's own frames each window holds, at least one: (B, T, H, P)."""
    counted = F.pad(valid.double().cumsum(1), (1, 0))
    shape = (valid.shape[0], valid.shape[1], *lo.shape[2:])
    count = read_prefix(counted, hi.expand(shape)) - read_prefix(counted, lo.expand(shape))
    return count.clamp(min=1).float()


def pool_frames(v: Tensor, lo: Tensor, hi: Tensor, weight: Tensor) -> Tensor:
    """Σ_p weight · (sum of v over the window), by definition. v (B, T, H, E), weight (B, T, H, P) → (B, T, H, E)."""
    total = prefix_sum(v.flatten(2)).unflatten(2, v.shape[2:])
    lo, hi = (edge.expand(weight.shape) for edge in (lo, hi))
    sums = read_prefix(total, hi) - read_prefix(total, lo)  # (B, T, H, P, E)
    return (weight.unsqueeze(-1) * sums).sum(3).to(v.dtype)


def pool_band(v: Tensor, windows: list[tuple[Anchored | Ladder, Tensor, Tensor, Tensor]], reach: int) -> Tensor:
    """The same numbers block by block. windows: (family, lo, hi, weight) for each family present."""
    batch, frames, heads, _ = v.shape
    values = key_blocks(v.transpose(1, 2).flatten(0, 1), BLOCK, reach)  # (B·H·n, taps, E)
    rows = [family.rows(lo, hi, weight) for family, lo, hi, weight in windows]  # (B·H·n, BLOCK, taps) each
    band = rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
    y = torch.bmm(band.to(v.dtype), values)  # (B·H·n, BLOCK, E)
    return y.reshape(batch, heads, -1, y.shape[-1])[:, :, :frames].transpose(1, 2)


def head_blocks(x: Tensor, reach: int) -> Tensor:
    """(B, T, H, P) → (B·H·n, BLOCK, P), blank at the end, to match key_blocks of (B·H, T, E)."""
    return query_blocks(x.transpose(1, 2).flatten(0, 1), BLOCK, reach)
